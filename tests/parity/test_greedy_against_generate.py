"""Greedy decoding gives transformers' own `generate` token by token, in fp32, on 100 prompts."""

import pytest
import torch
from conftest import VOCAB, make_llama
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.sequence import DecodeOutput
from draftsmith.heads import Drafter, DraftModel, Medusa

PROMPTS = 100
NEW_TOKENS = 32


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(1, 30, (PROMPTS,), generator=generator).tolist()
    return [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def _perturbed(drafter: Drafter) -> Drafter:
    """Noise, so that some draft tokens are accepted and some are not."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return drafter.eval()


def _drafter(kind: str, target: nn.Module) -> Drafter | None:
    if kind == "none":
        return None
    if kind == "medusa":
        return _perturbed(Medusa.from_target(target, num_heads=3))
    return _perturbed(DraftModel.from_target(target, num_hidden_layers=2, init="target_layers"))


def _generated(target: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    text = target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    return text[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def generated() -> list[list[int]]:
    """Return the texts of `generate` after each prompt."""
    target = make_llama()
    return [_generated(target, prompt) for prompt in _prompts()]


@pytest.mark.parametrize(("kind", "together"), [("none", 1), ("draft_model", 8), ("medusa", 1)])
def test_identical_tokens_on_a_hundred_prompts(kind: str, together: int, generated: list[list[int]]) -> None:
    """One text at a time, and in ragged batches."""
    target = make_llama()
    decoder = SpeculativeDecoder(target, _drafter(kind, target))
    prompts, outputs = _prompts(), list[DecodeOutput]()
    for first in range(0, PROMPTS, together):
        outputs += decoder.generate_batch(prompts[first : first + together], max_new_tokens=NEW_TOKENS)
    assert [ours.tokens for ours in outputs] == generated
    stops = {ours.stopped_by for ours in outputs}
    accepted = sum(record.accepted for ours in outputs for record in ours.rounds)
    assert stops == {"eos", "length"}, "both ways to stop have to be covered"
    assert (accepted > 0) == (kind != "none")


def test_identical_tokens_for_gpt2() -> None:
    """Another architecture: learned positions, tied embeddings, no position_ids of its own making."""
    torch.manual_seed(2)
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=2, n_positions=128, initializer_range=0.2, eos_token_id=1
    )
    target = GPT2LMHeadModel(config).eval()
    decoder = SpeculativeDecoder(target, DraftModel.from_target(target, num_hidden_layers=2, init="target_layers"))
    for prompt in _prompts()[:10]:
        assert decoder.generate(prompt, max_new_tokens=NEW_TOKENS).tokens == _generated(target, prompt)
