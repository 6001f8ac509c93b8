"""Block drafters in vLLM's layout see there, layer by layer, what they were trained to see, or are not written.

The rule is stated here as vLLM 0.32 and 0.33 apply it. The slow test runs vLLM's own functions, from the wheel of PyPI
without its dependencies (340 MB); or name a wheel:

    DRAFTSMITH_VLLM_WHEEL=/path/to/vllm-0.33.0.whl pytest -m slow tests/parity/test_vllm_causality.py
"""

import ast
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parity.test_exports import exported, made
from parity.test_exports import target as target
from transformers import LlamaForCausalLM, PreTrainedConfig

from draftsmith import ConfigError, load_drafter
from draftsmith.heads.block_network import Visibility

CPU = torch.device("cpu")
Seen = list[tuple[int | None, bool]]
"""For each layer its window and whether positions of a block see no later ones."""
CASES = {
    f"{kind}, {sees}": (kind, sees)
    for kind in ("dflash", "dspark")
    for sees in (
        Visibility((None, None)),
        Visibility((3, None), causal_windows=True, windows_from_anchor=False),
        Visibility((3, 3), causal_windows=True, windows_from_anchor=False),
        Visibility((None, 3), causal_windows=False, windows_from_anchor=False),
        Visibility((None, 3), causal=True, windows_from_anchor=False),
        Visibility((None, None), causal=True),
    )
}
"""Windows of positions and causal layers are written in flat layouts, the first one in that of speculators."""


def stated(config: dict[str, Any]) -> Seen:
    """vLLM's rule: `is_causal` of the layers; for DFlash the opposite of `sliding_window_non_causal`; the windows."""
    layers, kind = config.get("transformer_layer_config", config), config.get("speculators_model_type")
    given = layers.get("is_causal")
    if given is None and kind == "dflash":
        given = not config.get("sliding_window_non_causal", True)
    depth = layers["num_hidden_layers"]
    sliding = [name == "sliding_attention" for name in layers.get("layer_types") or ["full_attention"] * depth]
    return [(layers["sliding_window"] if one else None, one if given is None else given) for one in sliding]


@pytest.fixture(scope="session")
def vllms_own(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Seen]:
    """The same by vLLM: its update of a config, and its functions that read a layer's attention from the result."""
    folder = tmp_path_factory.mktemp("vllm")
    wheel = os.environ.get("DRAFTSMITH_VLLM_WHEEL")
    if wheel is None:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), "vllm==0.33.0"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
        (found,) = folder.glob("*.whl")
        wheel = str(found)
    with zipfile.ZipFile(wheel) as files:
        algorithms, model = (
            files.read(f"vllm/{name}.py").decode()
            for name in ("transformers_utils/configs/speculators/algos", "model_executor/models/qwen3_dflash")
        )
    updates: dict[str, Any] = {}
    exec(compile(algorithms, "algos.py", "exec"), updates)
    wanted = ("_SLIDING_ATTENTION", "_dflash_layer_causal", "_resolve_layer_attention")
    parts = [
        part
        for part in ast.parse(model).body
        if getattr(part, "name", None) in wanted
        or (isinstance(part, ast.Assign) and getattr(part.targets[0], "id", None) in wanted)
    ]
    functions: dict[str, Any] = {"Qwen3Config": PreTrainedConfig}
    functions["get_current_vllm_config"] = lambda: SimpleNamespace(use_v2_model_runner=True)
    exec(compile(ast.Module(parts, []), "qwen3_dflash.py", "exec"), functions)

    def seen(config: dict[str, Any]) -> Seen:
        fields = {"layer_types": None, **config.get("transformer_layer_config", config)}
        if "speculators_model_type" in config:
            updates["SUPPORTED_SPECULATORS_TYPES"][config["speculators_model_type"]](config, fields)
        read = SimpleNamespace(**fields)
        return [functions["_resolve_layer_attention"](read, layer) for layer in range(read.num_hidden_layers)]

    return seen


def written(name: str, target: LlamaForCausalLM, folder: Path, format: str = "vllm") -> tuple[dict[str, Any], Seen]:
    """Return the config of an export, and what the drafter was trained to see."""
    kind, sees = CASES[name]
    drafter = made("dflash", target, block_size=3, markov_rank=4 if kind == "dspark" else 0)
    drafter.body.sees = sees
    out = exported(drafter, target, format, folder).folder
    again = load_drafter(out, target).body.sees
    trained = [(window, sees.causal or (sees.causal_windows and window is not None)) for window in sees.windows]
    assert [
        (window, bool(again.block(i, 3, CPU).tril().equal(again.block(i, 3, CPU))))
        for i, window in enumerate(again.windows)
    ] == trained, "read again it is the same drafter"
    assert all(again.features(i, 3, CPU).equal(sees.features(i, 3, CPU)) for i in range(2))
    return json.loads((out / "config.json").read_text()), trained


@pytest.mark.parametrize("name", CASES)
def test_vllm_resolves_each_layer_to_what_was_trained(name: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    config, trained = written(name, target, tmp_path / "out")
    assert stated(config) == trained


@pytest.mark.parametrize("name", [name for name, (kind, _) in CASES.items() if kind == "dflash"])
def test_sglang_resolves_each_layer_to_what_was_trained(name: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Its rule in flat layouts (0.5.23) is the same: `is_causal`, or else the windows."""
    config, trained = written(name, target, tmp_path / "out", "sglang")
    assert stated(config) == trained


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("causal", [True, False])
def test_windows_from_the_anchor_are_refused(kind: str, causal: bool, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """vLLM would count them from each position: the second one of a block would see one feature fewer."""
    drafter = made("dflash", target, block_size=4, markov_rank=4 if kind == "dspark" else 0)
    for windows in ((3, 3), (None, 3)):
        drafter.body.sees = Visibility(windows, causal)
        with pytest.raises(ConfigError, match="a window that counts from the anchor, which engines count from each"):
            exported(drafter, target, "vllm", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_vllms_own_functions_resolve_the_same(
    name: str, tmp_path: Path, target: LlamaForCausalLM, vllms_own: Callable[[dict[str, Any]], Seen]
) -> None:
    config, trained = written(name, target, tmp_path / "out")
    assert vllms_own(config) == trained
