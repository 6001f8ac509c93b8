"""Prompts with images: what is refused, and how the decoder's own parts treat their tensors."""

from functools import wraps
from typing import Any

import pytest
import torch
from conftest import make_llama, make_t5
from torch import Tensor
from vision_models import build, prompt

from draftsmith import SpeculativeDecoder
from draftsmith.decode.passes.attention import run_with
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.errors import ConfigError
from draftsmith.heads.hidden_states import extended, inputs_for, prompt_positions

ASKED = prompt("qwen3_vl", 0, [7, 8], [20])


def test_tensors_of_another_processor_are_refused_by_name() -> None:
    decoder = SpeculativeDecoder(build("llava"))
    with pytest.raises(ConfigError, match=r"inputs\['image_grid_thw'\] with model_type='llava'; expected tensors of"):
        decoder.generate(ASKED.ids, inputs=ASKED.inputs)
    with pytest.raises(ConfigError, match="with model_type='llama'; expected tensors of its own processor"):
        SpeculativeDecoder(make_llama()).generate([3, 4], inputs=ASKED.inputs)
    with pytest.raises(ConfigError, match=r"inputs\['inputs_embeds'\]"):
        decoder.generate([3, 4], inputs={"inputs_embeds": torch.zeros(1, 2, 32)})


def test_tensors_that_do_not_fit_the_prompt_are_refused_in_one_line() -> None:
    decoder = SpeculativeDecoder(build("llava"))
    asked = prompt("llava", 0, [7, 8], [20])
    with pytest.raises(ConfigError, match="model_type='llava' with pixel_values: after the prompt, its") as error:
        decoder.generate(asked.ids[:-3], inputs=asked.inputs)
    assert "\n" not in str(error.value)
    assert len(decoder.generate(asked.ids, inputs=asked.inputs, max_new_tokens=3).tokens) == 3, "later prompts are read"


def test_a_model_that_continues_otherwise_than_without_cache_is_refused() -> None:
    """As a model whose text after an image is elsewhere than `get_rope_index` says."""
    model = build("qwen3_vl")
    original = model.base_model.get_rope_index

    @wraps(original)
    def other(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        positions_A1T, shift_11 = original(*args, **kwargs)
        return positions_A1T, shift_11 + 2

    model.base_model.get_rope_index = other
    with pytest.raises(ConfigError, match=r"after the prompt, logits differ from those of a plain pass by"):
        SpeculativeDecoder(model).generate(ASKED.ids, inputs=ASKED.inputs)


def test_settings_that_do_not_apply_to_images() -> None:
    model = build("qwen3_vl")
    decoder = SpeculativeDecoder(model)
    with pytest.raises(ConfigError, match="inputs=1; expected one entry for each of the 2 prompts"):
        decoder.generate_batch([ASKED.ids, [3, 4]], inputs=[ASKED.inputs])
    run_with(model, "copied")
    with pytest.raises(ConfigError, match="inputs with a target that recomputes tokens in each round"):
        decoder.generate(ASKED.ids, inputs=ASKED.inputs)
    with pytest.raises(ConfigError, match="inputs with an encoder-decoder target; expected prompts without images"):
        SpeculativeDecoder(make_t5(1)).generate([3, 4], inputs=ASKED.inputs)


def test_whole_output_of_a_processor_in_another_dtype() -> None:
    """Processors return float32 pixels, token ids and their mask."""
    model = build("qwen3_vl")
    whole = {name: x.float() if x.is_floating_point() else x for name, x in ASKED.whole().items()}
    assert set(inputs_for(model, whole)) == set(ASKED.inputs)
    assert inputs_for(model, whole)["pixel_values"].dtype == torch.float64
    decoder = SpeculativeDecoder(model)
    rounded = {**ASKED.inputs, "pixel_values": whole["pixel_values"].double()}
    outs = [decoder.generate(whole["input_ids"], inputs=inputs, max_new_tokens=8) for inputs in (whole, rounded)]
    assert outs[0].tokens == outs[1].tokens


def test_positions_of_the_text_after_an_image_are_those_of_the_model() -> None:
    model, ids = build("qwen3_vl"), torch.tensor([ASKED.ids])
    positions_A1T, shift = prompt_positions(model, ids, ASKED.inputs)
    assert positions_A1T is not None
    assert positions_A1T.shape == (3, 1, len(ASKED.ids))
    # 6 tokens of 2 rows and 3 columns take 3 positions.
    assert shift == int(positions_A1T.max()) + 1 - len(ASKED.ids) == -3
    assert prompt_positions(build("llava"), ids, {}) == (None, 0)


def test_only_kinds_of_tokens_grow_with_the_text() -> None:
    longer = extended(ASKED.inputs, len(ASKED.ids), len(ASKED.ids) + 2)
    assert longer["mm_token_type_ids"].tolist() == [[0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0]]
    assert longer["image_grid_thw"] is ASKED.inputs["image_grid_thw"]


@torch.inference_mode()
def test_prompts_of_one_batch_do_not_write_to_each_others_slots() -> None:
    model, other = build("qwen3_vl"), prompt("qwen3_vl", 1, [5], [6], grid=(4, 4))
    together, alone = ModelRunner(model, 2), [ModelRunner(model, 1) for _ in range(2)]
    asked = [ASKED, other]
    expected = [one.read_prompts([a.ids], [a.inputs]) for one, a in zip(alone, asked, strict=True)]
    logits_BV = together.read_prompts([a.ids for a in asked], [a.inputs for a in asked])
    torch.testing.assert_close(logits_BV, torch.cat(expected))
    together.drop([1])  # the row that stays keeps its own shift of positions
    ids = torch.tensor([[6, 7]])
    torch.testing.assert_close(together.tree(ids, [(-1,)]), alone[1].tree(ids, [(-1,)]))
