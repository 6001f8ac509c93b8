"""Targets whose layers differ, or pass several states of each token on: Gemma 3n and 4."""

import pytest
from targets.outcome import trains
from targets.tiny import build, model_classes, tiny_config
from transformers import GemmaConfig, LlamaConfig, PreTrainedModel

from draftsmith import SpeculativeDecoder
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS
from draftsmith.heads.draft_model import DraftModel, EarlyExit
from draftsmith.heads.layers import layer_config
from draftsmith.heads.model_config import layer_value
from draftsmith.train.estimate.memory import cache_bytes
from draftsmith.train.recipe import parse_recipe

CLASSES = model_classes()
pytestmark = pytest.mark.skipif("Gemma4ForCausalLM" not in CLASSES, reason="transformers without Gemma 4")
ON_LAYERS = {"eagle3": {"layers": [1, 2]}, "peagle": {"layers": [1, 2]}, "dflash": {"layers": [1, 2]}}


def tiny(name: str) -> PreTrainedModel:
    return build(CLASSES[name], tiny_config(CLASSES[name]))


@pytest.mark.parametrize("kind", ["draft_model", "medusa", "eagle", "eagle3", "mtp", "peagle", "dflash"])
def test_drafters_of_gemma_4_train_and_draft(kind: str) -> None:
    target = tiny("Gemma4ForCausalLM").float()
    assert trains(target, kind, **ON_LAYERS.get(kind, {}))
    drafter = HEADS[kind].from_target(target, **ON_LAYERS.get(kind, {})).eval()
    expected = SpeculativeDecoder(target).generate([5, 6, 7], max_new_tokens=12).tokens
    assert SpeculativeDecoder(target, drafter).generate([5, 6, 7], max_new_tokens=12).tokens == expected
    again = HEADS[kind].from_config(drafter.config())
    again.load_state_dict(drafter.state_dict())
    if isinstance(again, DraftModel) and isinstance(drafter, DraftModel):
        assert again.model.config.layer_types == drafter.model.config.layer_types == ["full_attention"]


def test_sizes_are_those_of_the_first_layer() -> None:
    config = layer_config(tiny("Gemma4ForCausalLM"), 1)
    assert (config.head_dim, config.num_key_value_heads, config.intermediate_size) == (8, 2, 48)
    assert config.rope_parameters["rope_type"] == "default"
    target = tiny("Gemma4ForCausalLM").config
    assert [layer_value(target, "head_dim", layer) for layer in range(4)] == [8, 16, 8, 16]
    assert layer_value(LlamaConfig(head_dim=4), "head_dim", 3) == 4
    assert layer_value(GemmaConfig(), "q_lora_rank") is None


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash"])
def test_features_of_several_streams_are_refused(kind: str) -> None:
    target = tiny("Gemma3nForCausalLM")
    with pytest.raises(ConfigError, match=r"has 4 streams of hidden states between its layers .altup_num_inputs.; exp"):
        HEADS[kind].from_target(target, **ON_LAYERS[kind])
    assert trains(target.float(), "eagle")


def test_a_new_model_of_gemma_3ns_architecture_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model_type='gemma3n_text' with random weights has no finite gradients"):
        DraftModel.from_target(tiny("Gemma3nForCausalLM"))


@pytest.mark.parametrize("name", ["Gemma3nForCausalLM", "Gemma4ForCausalLM"])
def test_early_exit_of_a_table_for_all_layers_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="has one table of embeddings for all layers; expected another target for ea"):
        EarlyExit(tiny(name))


def test_the_cache_of_layers_that_differ_is_estimated_by_layer() -> None:
    recipe = parse_recipe({"name": "m", "output": "m", "drafter": {"type": "medusa"}}, "test")
    alike = LlamaConfig(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=12)
    assert cache_bytes(recipe, tiny("Gemma4ForCausalLM").config) == cache_bytes(recipe, alike)
