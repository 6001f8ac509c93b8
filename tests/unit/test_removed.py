"""Every name that earlier versions had is refused where a user writes it, with what to use instead."""

import json
import re
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
from conftest import make_llama
from safetensors.torch import save_file

from draftsmith import ConfigError, SpeculativeDecoder, load_drafter
from draftsmith.cli import main
from draftsmith.errors import REMOVED
from draftsmith.heads.checkpoint import describe_target, save_drafter, unattached_drafter
from draftsmith.heads.medusa import Medusa
from draftsmith.train.recipe import load_recipe


def recipe(*overrides: str) -> Callable[[], object]:
    return lambda: load_recipe("medusa/any_prompts", list(overrides))


def command(*words: str) -> Callable[[], object]:
    """A command that ends with an error in one line."""

    def run() -> None:
        said = StringIO()
        with pytest.raises(SystemExit) as ended, redirect_stderr(said):
            main([*words, "x"])
        assert ended.value.code == 2
        raise ConfigError(said.getvalue())

    return run


CASES: dict[str, Callable[[], object]] = {
    **{name: command(*name.split()[1:]) for name in REMOVED if name.startswith("draftsmith ")},
    "drafter.type=hydra": recipe("drafter={type: hydra, num_layers: 2}"),
    "drafter.type=mlp_speculator": recipe("drafter.type=mlp_speculator"),
    "drafter=hybrid:memory": lambda: load_drafter("hybrid:drafter=suffix,memory=on", make_llama()),
    "drafter=suffix:memory": lambda: load_drafter("suffix:memory=off", make_llama()),
    "rule=traversal": lambda: SpeculativeDecoder(make_llama(), rule="traversal"),
    "target.tensor_parallel": recipe("target.tensor_parallel=8"),
}


def refused(name: str, use: Callable[[], object]) -> str:
    with pytest.raises(ConfigError, match=re.escape(f"{name} was removed in 0.5; expected {REMOVED[name]}")) as error:
        use()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", REMOVED)
def test_each_name_says_what_to_use_instead(name: str) -> None:
    refused(name, CASES[name])


@pytest.mark.parametrize("kind", ["hydra", "mlp_speculator"])
def test_a_checkpoint_of_a_removed_type_is_named(kind: str, tmp_path: Path) -> None:
    target = make_llama()
    drafter = Medusa.from_target(target)
    save_drafter(drafter, tmp_path, target=describe_target(target, None, "t"), recipe=None, draft_length=2)
    config = json.loads((tmp_path / "config.json").read_text())
    config["draftsmith"]["type"] = kind
    (tmp_path / "config.json").write_text(json.dumps(config))
    for load in (lambda: load_drafter(tmp_path, target), lambda: unattached_drafter(str(tmp_path), target)):
        assert refused(f"drafter.type={kind}", load).startswith(f"drafter={tmp_path}: ")


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("hydra", {"hydra_head_arch": "mlp"}),
        ("hydra", {"hydra_num_heads": 4}),
        ("mlp_speculator", {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}),
    ],
)
def test_a_published_drafter_of_a_removed_type_is_named(kind: str, config: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"head.weight": make_llama().lm_head.weight.detach().clone()}, tmp_path / "model.safetensors")
    said = refused(f"drafter.type={kind}", lambda: load_drafter(tmp_path, make_llama()))
    assert said.startswith(f"drafter={tmp_path}: ")


def test_a_removed_rule_is_named_on_the_command_line() -> None:
    refused("rule=traversal", command("eval", "--target", "embedded", "--rule", "traversal", "--drafter"))
