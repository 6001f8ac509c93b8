"""Exports for vLLM, loaded by the package whose layout it is (`speculators` from PyPI): its logits are ours.

The package pins older versions of what stands here, so it lives in an environment of its own that borrows this one's
torch and transformers. `make test-slow` makes it, which needs a package index; or name one that has the package:

    DRAFTSMITH_SPECULATORS_PYTHON=/path/to/python pytest -m slow tests/parity/test_speculators_engine.py
"""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.published_files import DRAFTED, KEPT, PROMPT, six_layers
from recording import decoded_confidences, decoded_logits
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from draftsmith.heads import HEADS
from draftsmith.heads.base import FINAL, TrainableDrafter
from draftsmith.hub.export import export_drafter

pytestmark = pytest.mark.slow

PACKAGES = ("speculators==0.9.0", "hs-connectors==0.9.0")
LIGHT = ("openai", "loguru", "pydantic-settings")
"""Imports of theirs that this environment lacks; of their other dependencies it has newer versions."""
STEPS = 3
CLOSE = 2e-5
"""fp32 of one network by two implementations; logits are of the order of 10."""

DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"layers": [2, 3, 5]}),
    "eagle3, 8 tokens, two layers": ("eagle3", {"draft_vocabulary": KEPT, "num_hidden_layers": 2}),
    "eagle3, residual normed": ("eagle3", {"norm_before_residual": True}),
    "eagle3, norm before fc": ("eagle3", {"norm_before_fc": True}),
    "eagle3.1, two features": ("eagle3", {"fc_norm": True, "norm_output": True, "layers": [1, 6]}),
    "eagle3, window of 3": ("eagle3", {"window": 3}),
    "peagle": ("peagle", {"num_tokens": STEPS, "mask_token": 17}),
    "peagle, its own mask": ("peagle", {"num_tokens": STEPS, "mask_token": 17, "mask_before_fc": True}),
    "peagle, 8 tokens": ("peagle", {"num_tokens": STEPS, "draft_vocabulary": KEPT}),
    "dflash": ("dflash", {"block_size": STEPS + 1, "mask_token": 17}),
    "dspark": ("dflash", {"block_size": STEPS + 1, "markov_rank": 5, "confidence_head": True}),
    "dspark from the anchor, 8 tokens": (
        "dflash",
        {
            "block_size": STEPS,
            "sample_from_anchor": True,
            "draft_vocabulary": KEPT,
            "markov_rank": 5,
            "confidence_head": True,
        },
    ),
    "dflash2": (
        "dflash",
        {"block_size": STEPS + 1, "conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 6},
    ),
    "sure without a bias": ("dflash", {"block_size": STEPS + 1, "confidence_head": True}),
}


@pytest.fixture(scope="session")
def their_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    named = os.environ.get("DRAFTSMITH_SPECULATORS_PYTHON")
    if named is not None:
        return named
    folder = tmp_path_factory.mktemp("speculators")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = folder / "lib" / version / "site-packages" / "borrowed.pth"
    own.write_text(sysconfig.get_paths()["purelib"] + "\n" + "\n".join(p for p in sys.path if "site-packages" in p))
    for arguments in (["--no-deps", *PACKAGES], LIGHT):
        done = subprocess.run([str(python), "-m", "pip", "install", "-q", *arguments], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    return str(python)


def off_the_start(kind: str, options: dict[str, Any], target: LlamaForCausalLM) -> TrainableDrafter:
    """A drafter whose weights are all its own; a DFlash's mask is left as the embedding of a token."""
    torch.manual_seed(3)
    options = {**options}
    window = options.pop("window", None)
    drafter = HEADS[kind].from_target(target, **options).eval().requires_grad_(False)
    if window is not None:
        drafter.body.config.layer_types, drafter.body.config.sliding_window = ["sliding_attention"], window
    for name, parameter in drafter.named_parameters():
        if "mask_embedding" not in name:
            parameter += 0.2 * torch.randn_like(parameter)
    drafter.draft_length_hint = STEPS
    return drafter


@torch.no_grad()
@pytest.mark.parametrize("name", DRAFTERS)
def test_their_loader_says_what_ours_says(name: str, their_python: str, tmp_path: Path) -> None:
    target = six_layers()
    target.save_pretrained(tmp_path / "target")
    kind, options = DRAFTERS[name]
    drafter = off_the_start(kind, options, target)
    ours = decoded_logits(drafter, target, PROMPT, DRAFTED)
    exported = export_drafter(drafter, target, "vllm", tmp_path / "export", target_name=str(tmp_path / "target"))
    save_file(_text(target, drafter), tmp_path / "text.safetensors")
    script = Path(__file__).with_name("speculators_engine.py")
    arguments = [str(exported.folder), str(tmp_path / "text.safetensors"), str(tmp_path / "logits.safetensors")]
    done = subprocess.run([their_python, str(script), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = load_file(tmp_path / "logits.safetensors")
    ours = ours[: len(theirs["logits"])]
    assert torch.equal(ours.isinf(), theirs["logits"].isinf())
    worst = float((ours - theirs["logits"]).nan_to_num(0.0).abs().max())
    largest = float(ours[~ours.isinf()].abs().max())
    print(f"{name}: {len(ours)} positions, logits up to {largest:.1f}, largest difference {worst:.1e}")
    assert worst < CLOSE
    if kind == "dflash" and drafter.confidence is not None:
        confidences = decoded_confidences(drafter, DRAFTED[1:3])
        assert torch.allclose(torch.stack(confidences), theirs["sure"][1:].sigmoid(), atol=CLOSE)


def _text(target: LlamaForCausalLM, drafter: TrainableDrafter) -> dict[str, torch.Tensor]:
    """The prompt, the draft and a little more, with the target's states as engines hand them on."""
    ids = torch.tensor([*PROMPT, *DRAFTED, 6, 7, 8])
    layers = drafter.needs.layers
    states = target(ids[None], output_hidden_states=True).hidden_states
    deepest: list[torch.Tensor] = []  # after the last block, before the last norm
    handle = target.model.norm.register_forward_pre_hook(lambda _, given: deepest.append(given[0]))
    target(ids[None])
    handle.remove()
    depth = target.config.num_hidden_layers
    rows = [states[-1] if k == FINAL else deepest[0] if k == depth else states[k] for k in layers]
    hidden = torch.cat(rows, -1)[0]
    return {"ids": ids, "hidden": hidden.contiguous(), "at": torch.tensor(len(PROMPT) - 1)}


@pytest.mark.parametrize(
    ("what", "rows"),
    [(["speed", "online"], None), (["memory", "cached", "peer, by text"], 40), (["tau", "cached"], 40)],
    ids=str,
)
def test_their_trainer_runs_beside_ours(what: list[str], rows: int | None, their_python: str, tmp_path: Path) -> None:
    """Each measurement of benchmarks/peers.py, at a size that says nothing of the figures."""
    name, teacher, *side = what
    root = Path(__file__).parents[2]
    sizes = ["--steps", "1", "--tau-steps", "1", "--prompts", "2", "--count", "40"]
    sizes += [] if rows is None else ["--set", f"drafter.draft_vocab_size={rows}"]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    for step in [["prepare", teacher, str(tmp_path)]] * (name != "tau") + [[name, teacher, str(tmp_path), *side]]:
        command = [their_python, str(root / "benchmarks" / "peers.py"), *sizes, "--measure", *step]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == {"speed": {"ours", "peer", "peer, by text"}, "memory": {"peak"}, "tau": {"T=0", "T=1"}}[name]
