"""The lists of layers whose outputs drafters read, in models that contain encoders or lists of their own."""

import pytest
import torch
from conftest import make_t5
from targets.tiny import build
from targets.vision import vision_config
from transformers import GitForCausalLM

from draftsmith.errors import ConfigError
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.hidden_states import layer_lists


def test_layers_of_a_language_model_that_contains_an_encoder_of_images() -> None:
    model = build(GitForCausalLM, vision_config(GitForCausalLM))
    assert layer_lists(model) == ["git.encoder.layer"]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_layers_of_an_encoder_decoder_that_are_lists_themselves(layers: int) -> None:
    """T5 keeps two parts of a layer of the encoder in a list, three of the decoder."""
    model = make_t5(layers)
    assert layer_lists(model) == ["encoder.block", "decoder.block"]
    draft = DraftModel.from_target(model, num_hidden_layers=layers, init="target_layers")
    assert len(draft.trained_blocks()) == 2 * layers
    target = make_t5(6)
    copied = DraftModel.from_target(target, num_hidden_layers=layers, init="target_layers", keep="first").state_dict()
    last = f"decoder.block.{layers - 1}.layer.0.SelfAttention.q.weight"
    assert torch.equal(copied[f"model.{last}"], target.state_dict()[last])
    with pytest.raises(ConfigError, match="no list of 3 layers"):
        layer_lists(make_t5(3, num_decoder_layers=1))
