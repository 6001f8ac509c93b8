"""Every class of the installed transformers against `generate`, and `docs/reference/targets.md` against the outcome."""

import sys
from inspect import getmembers, isclass

import pytest
import torch
from conftest import mostly_slow
from torch import nn

from draftsmith.decode.passes.recurrent import _updates_states, is_recurrent

from .outcome import EXACT, outcome_of
from .page import PAGE, VERSION, group, listed
from .tiny import model_classes, tiny_config
from .vision import vision_classes, vision_config

CLASSES = model_classes() | vision_classes()
FAST = [
    "BloomForCausalLM", "DeepseekV3ForCausalLM", "Gemma2ForCausalLM", "GptOssForCausalLM", "Llama4ForCausalLM",
    "MambaForCausalLM", "OPTForCausalLM", "T5ForConditionalGeneration",
]  # fmt: skip
"""ALiBi, latent attention, sliding windows, sinks with experts, chunks, recurrent layers, learned positions and
an encoder; families of tests/parity are not repeated."""


@pytest.mark.parametrize("name", mostly_slow(dict.fromkeys([*FAST, *CLASSES]), *FAST))
def test_texts_are_those_of_generate_or_the_class_is_refused(name: str) -> None:
    if name not in CLASSES:
        pytest.skip(f"{VERSION} has no {name}")
    outcome = outcome_of(CLASSES[name])
    page = PAGE.read_text(encoding="utf-8")
    if outcome.broken:
        assert VERSION not in page or name not in listed(page), "run `python -m tests.targets`"
        return
    if name in FAST and VERSION in page:  # other versions may have other mistakes, as 5.17 has in UMT5's cache
        assert outcome.chains == EXACT
        assert outcome.batch == EXACT
        assert outcome.images == ("" if name in model_classes() else EXACT)
        whole = getattr(CLASSES[name].config_class, "is_encoder_decoder", False)
        assert (outcome.compiled == EXACT) == (outcome.trees == EXACT and not whole)
    decoded = (outcome.chains, outcome.trees, outcome.batch, outcome.early_exit, outcome.images)
    for cell in (*decoded, outcome.compiled, outcome.draft_model, outcome.medusa, outcome.eagle3):
        assert cell != "wrong"
        assert not cell.startswith("CRASH")
    if VERSION in page:
        assert listed(page)[name] == group(outcome), "run `python -m tests.targets`"


def has_recurrent_code(model: nn.Module) -> bool:
    """Return whether a module of transformers that defines a part of the model defines recurrent layers, too."""
    files = {sys.modules[type(part).__module__] for part in model.modules()}
    kinds = [kind for file in files if "transformers.models" in file.__name__ for _, kind in getmembers(file, isclass)]
    return any(_updates_states(kind) for kind in kinds if issubclass(kind, nn.Module))


@pytest.mark.slow
def test_classes_with_recurrent_code_are_built_with_recurrent_layers() -> None:
    """Or the table would show what a model of attention alone can do, as it did for LFM2."""
    found = 0
    for name, kind in CLASSES.items():
        try:
            config = vision_config(kind) if name in vision_classes() else tiny_config(kind)
            with torch.device("meta"):
                model = kind._from_config(config)
        except Exception:  # whatever transformers raises; the page names those that cannot be built
            continue
        if has_recurrent_code(model):
            found += 1
            assert is_recurrent(model), name
    assert found > 20
