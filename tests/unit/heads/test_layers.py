"""The layers of drafters for targets of any architecture: rotary positions, and the gain of the last norm."""

from typing import Any

import pytest
import torch
from conftest import make_llama
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
)
from vision_models import build

from draftsmith import SpeculativeDecoder
from draftsmith.heads import HEADS
from draftsmith.heads.layers import last_norm_is_centred, layer_config

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2, "pad_token_id": 0}


def phi3(part: float) -> Phi3ForCausalLM:
    """A target with longrope for this part of each head of 16 values."""
    count = int(16 * part) // 2
    rope = {"rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": part}
    rope |= {"short_factor": [1.0 + 0.01 * k for k in range(count)], "long_factor": [2.0 + k for k in range(count)]}
    positions = {"max_position_embeddings": 128, "original_max_position_embeddings": 64}
    torch.manual_seed(0)
    config = Phi3Config(**SIZES, **positions, rope_parameters=rope | positions, bos_token_id=None, eos_token_id=None)
    return Phi3ForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp", "peagle", "dflash"])
def test_drafters_of_a_target_with_longrope_for_a_part_of_each_head(kind: str) -> None:
    """Phi-4-mini: the default rotation of the whole head, with the target's theta."""
    target, options = phi3(0.75), {"dflash": {"layers": [1, 2]}}
    drafter = HEADS[kind].from_target(target, **options.get(kind, {})).eval()
    expected = SpeculativeDecoder(target).generate([5, 6, 7, 8], max_new_tokens=12).tokens
    assert SpeculativeDecoder(target, drafter).generate([5, 6, 7, 8], max_new_tokens=12).tokens == expected
    assert layer_config(target, 1).rope_parameters == {"rope_type": "default", "rope_theta": 500.0}


def test_longrope_of_whole_heads_is_kept() -> None:
    rope = layer_config(phi3(1.0), 1).rope_parameters
    assert rope is not None
    assert rope["rope_type"] == "longrope"
    assert len(rope["long_factor"]) == 8


def with_norm(kind: str) -> PreTrainedModel:
    """A target whose last norm has a random weight; Cohere's and Nemotron's subtract the mean."""
    torch.manual_seed(0)
    models = {
        "llama": lambda: make_llama(num_hidden_layers=4),
        "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16)),
        "cohere": lambda: CohereForCausalLM(CohereConfig(**SIZES)),
        "nemotron": lambda: NemotronForCausalLM(NemotronConfig(**SIZES)),
        "gemma3 with images": lambda: build("gemma3"),
        "llava": lambda: build("llava"),
    }
    target = models[kind]().float().eval()
    norm = target.get_decoder().norm
    norm.weight.data.normal_(0.0 if "gemma" in kind else 1.0, 0.3)
    return target


@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere", "nemotron", "gemma3 with images", "llava"])
def test_whether_the_gain_of_the_last_norm_is_one_more_than_its_weight(kind: str) -> None:
    assert bool(last_norm_is_centred(with_norm(kind))) == (kind in ("gemma2", "gemma3 with images", "nemotron"))
