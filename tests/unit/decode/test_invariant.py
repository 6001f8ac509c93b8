"""`invariant=True`: greedy texts equal the target's own bit by bit in bf16, or the target is refused."""

from typing import Any

import pytest
import torch
from conftest import make_llama, make_t5
from recurrent_models import build
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from draftsmith import SpeculativeDecoder
from draftsmith.decode.costs import Costs
from draftsmith.decode.passes import eager
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.retrieval import Hybrid

COSTS = Costs({1: 1.0, 4: 1.2, 16: 2.0}, {1: 0.1})
PROMPTS = [[(7 * place + 13 * number) % 61 + 2 for place in range(5 + 15 * number)] for number in range(3)]
SETTINGS: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": None}
"""Some texts cross a multiple of the slots, others do not reach one."""
SIZES = {"hidden_size": 96, "intermediate_size": 200, "num_attention_heads": 3, "num_key_value_heads": 1}


def windowed(seed: int = 0, **changes: Any) -> MistralForCausalLM:
    """Layers that see the last 24 tokens, in bf16."""
    sizes = make_llama().config.to_dict() | SIZES | {"model_type": "mistral", "initializer_range": 0.1}
    torch.manual_seed(seed)
    config = MistralConfig(**{**sizes, "head_dim": 32, "sliding_window": 24, **changes})
    return MistralForCausalLM(config).eval().to(torch.bfloat16)


def invariant_or_skip(target: PreTrainedModel) -> SpeculativeDecoder:
    try:
        return SpeculativeDecoder(target, invariant=True)
    except ConfigError as error:  # the kernels of another machine
        pytest.skip(str(error))


@pytest.mark.parametrize("policy", ["chain:draft_length=3", "chain:draft_length=12", "adaptive"])
def test_greedy_texts_in_bf16_equal_the_targets_own(policy: str) -> None:
    """12 draft tokens are read in two passes; retrieved drafts have up to 10 tokens."""
    target, noisy = windowed(), windowed()
    with torch.no_grad():  # right often, wrong often
        for parameter, noise in zip(noisy.parameters(), windowed(1).parameters(), strict=True):
            parameter.add_(noise, alpha=0.1)
    alone = [invariant_or_skip(target).generate(prompt, **SETTINGS).tokens for prompt in PROMPTS]
    drafter = Hybrid(DraftModel(noisy), min_match=1)
    outputs = SpeculativeDecoder(target, drafter, policy=policy, costs=COSTS, invariant=True).generate_batch(
        PROMPTS, **SETTINGS
    )
    assert [output.tokens for output in outputs] == alone
    records = [record for output in outputs for record in output.rounds]
    assert any(record.accepted for record in records)
    assert any(record.accepted < record.drafted for record in records)


@pytest.mark.parametrize("drafts", [False, True])
def test_every_pass_after_the_prompt_has_one_shape(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_llama()
    drafter = DraftModel(make_llama(1)) if drafts else None
    policy = "chain:draft_length=12" if drafts else None
    decoder = SpeculativeDecoder(target, drafter, policy=policy, costs=COSTS, invariant=True)
    run, shapes = eager.EagerPasses._run, []

    def watched(passes: eager.EagerPasses, inputs: dict[str, Any], reading: Any) -> Any:
        if passes.model is target:
            shapes.append((inputs["input_ids"].shape, inputs["attention_mask"]))
        return run(passes, inputs, reading)

    monkeypatch.setattr(eager.EagerPasses, "_run", watched)
    text = decoder.generate(PROMPTS[2], **SETTINGS)
    (prompt, _), *after = shapes
    assert prompt == (1, len(PROMPTS[2]))
    assert (
        len(after)
        == (2 if drafts else 1) * len(text.rounds) - sum(record.drafted < 8 for record in text.rounds) * drafts
    )
    assert {shape for shape, _ in after} == {(1, 8)}
    assert {mask.shape[-1] for _, mask in after if isinstance(mask, Tensor)} == {64, 128}


@pytest.mark.parametrize("kind", ["eagle", "medusa", "dflash"])
def test_drafters_get_the_same_states(kind: str) -> None:
    """In fp64, drafts read in two padded passes are accepted as those of one pass."""
    target = make_llama().double()
    options = {"eagle": {}, "medusa": {"num_heads": 11}, "dflash": {"block_size": 12}}[kind]
    drafter = HEADS[kind].from_target(target, **options).double().eval()
    texts = []
    for invariant in (False, True):
        decoder = SpeculativeDecoder(target, drafter, draft_length=11, invariant=invariant)
        texts.append(decoder.generate(PROMPTS[2], temperature=0.7, **SETTINGS))
    plain, same = texts
    assert plain.tokens == same.tokens
    assert plain.overlaps == pytest.approx(same.overlaps, abs=1e-9)


def experts() -> MixtralForCausalLM:
    sizes = make_llama().config.to_dict() | {"model_type": "mixtral", "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes)).eval()


@pytest.mark.parametrize(
    ("target", "changes", "message"),
    [
        (make_llama, {"compile": True}, "with compile=True"),
        (make_llama, {"policy": "best-first:size=4,depth=2"}, "policy=best-first:size=4,depth=2 has branches"),
        (experts, {}, "experts"),
        (lambda: make_t5(1), {}, "model_type='t5'; expected a decoder-only target"),
        (lambda: build("mamba"), {}, "model_type='mamba'; expected a decoder-only target"),
    ],
)
def test_what_it_does_not_hold_for_is_refused(target: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeDecoder(target(), DraftModel(make_llama()), invariant=True, **changes)


def test_a_target_whose_logits_depend_on_the_place_is_refused() -> None:
    target = make_llama()

    def rounded_by_place(module: LlamaForCausalLM, args: Any, output: Any) -> None:
        output.logits[:, 3:4] *= 1 + 1e-6

    target.register_forward_hook(rounded_by_place)
    with pytest.raises(ConfigError, match="in float32 on cpu: the logits of a token depend on its index"):
        SpeculativeDecoder(target, invariant=True)
