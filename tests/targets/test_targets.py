"""Every class of the installed transformers against `generate`, and `docs/targets.md` against the outcome."""

import pytest

from .outcome import EXACT, outcome_of
from .page import PAGE, VERSION, row
from .tiny import model_classes
from .vision import vision_classes

CLASSES = model_classes() | vision_classes()
FAST = [
    "BartForConditionalGeneration", "BloomForCausalLM", "Cohere2ForCausalLM", "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM", "FalconForCausalLM", "GPT2LMHeadModel", "GPTNeoForCausalLM", "Gemma2ForCausalLM",
    "Gemma3ForCausalLM", "Gemma3nForCausalLM", "Glm4MoeLiteForCausalLM", "GptOssForCausalLM", "GraniteForCausalLM",
    "Lfm2ForCausalLM", "Llama4ForCausalLM", "LlamaForCausalLM", "MambaForCausalLM", "MarianMTModel",
    "MixtralForCausalLM", "MptForCausalLM", "OPTForCausalLM", "Olmo2ForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM",
    "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "RobertaForCausalLM",
    "T5ForConditionalGeneration", "UMT5ForConditionalGeneration", "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration", "LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration", "SmolVLMForConditionalGeneration",
]  # fmt: skip
OTHERS = [name for name in CLASSES if name not in FAST]


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_texts_are_those_of_generate_or_the_class_is_refused(name: str) -> None:
    if name not in CLASSES:
        pytest.skip(f"{VERSION} has no {name}")
    outcome = outcome_of(CLASSES[name])
    page = PAGE.read_text(encoding="utf-8")
    listed = f"`{name}` |" in page
    if outcome.broken:
        assert VERSION not in page or not listed, "run `python -m tests.targets`"
        return
    if name in FAST and VERSION in page:  # other versions may have other mistakes, as 5.17 has in UMT5's cache
        assert outcome.chains == EXACT
        assert outcome.batch == EXACT
        assert outcome.images == ("" if name in model_classes() else EXACT)
    decoded = (outcome.chains, outcome.trees, outcome.batch, outcome.early_exit, outcome.images)
    for cell in (*decoded, outcome.draft_model, outcome.medusa, outcome.eagle3):
        assert cell != "wrong"
        assert not cell.startswith("CRASH")
    if VERSION in page:
        assert row(outcome) in page, "run `python -m tests.targets`"
