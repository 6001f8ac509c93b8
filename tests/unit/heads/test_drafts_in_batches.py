"""Drafts of texts that share passes are those of each text alone, after others have ended or beside retrieved ones."""

from typing import Any

import pytest
import torch
from conftest import make_llama
from torch import nn

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.sequence import DecodeOutput
from draftsmith.heads import HEADS
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.retrieval import Hybrid, SuffixRetrieval

PROMPTS = [[5, 9, 33, 2], [7, 7, 8], [40, 3]]


def target_model() -> Any:
    return make_llama(num_hidden_layers=4, initializer_range=0.2).double()


def noisy(drafter: nn.Module) -> Any:
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return drafter.double().eval()


def rounds(output: DecodeOutput) -> list[tuple[int, int, list[float]]]:
    """Return the numbers of a text's drafts; sums of min(p, q) are those of passes in other orders of summation."""
    return [(r.drafted, r.accepted, [pytest.approx(value, abs=1e-9) for value in r.overlap]) for r in output.rounds]


@pytest.mark.parametrize("options", [{"num_modules": 3}, {"num_modules": 1}], ids=str)
@pytest.mark.parametrize("policy", ["chain:draft_length=3", "sampled-tree:width=2,depth=3"])
def test_drafts_after_another_text_has_ended(options: dict[str, int], policy: str) -> None:
    """The first text ends early; each module keeps the states of its own text."""
    target = target_model()
    drafter = noisy(HEADS["mtp"].from_target(target, **options))
    decoder = SpeculativeDecoder(target, drafter, policy=policy)
    settings: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0}
    texts = [text.tokens for text in decoder.generate_batch(PROMPTS, seeds=[0, 1, 2], eos_token_id=None, **settings)]
    end = next(token for token in texts[0][4:20] if token not in texts[1] + texts[2])
    together = decoder.generate_batch(PROMPTS, seeds=[0, 1, 2], eos_token_id=end, **settings)
    assert len(together[0].tokens) < len(together[1].tokens) == len(together[2].tokens) == 40
    for prompt, seed, output in zip(PROMPTS, range(3), together, strict=True):
        (alone,) = decoder.generate_batch([prompt], seeds=[seed], eos_token_id=end, **settings)
        assert output.tokens == alone.tokens
        assert rounds(output) == rounds(alone)


def test_drafts_of_a_perfect_draft_model_beside_retrieved_ones() -> None:
    """Drafts that are accepted as a whole leave their last token unread, which the next draft has to read."""
    target = target_model()
    drafter = Hybrid(DraftModel(target_model()), SuffixRetrieval(min_match=1), min_match=2)
    prompts = [[5, 9, 33, 2, 5, 9, 33, 2, 5, 9], [7, 41, 8], [40, 3, 22, 17]]
    decoder = SpeculativeDecoder(target, drafter, policy="chain:draft_length=4")
    settings: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": None}
    for prompt, output in zip(prompts, decoder.generate_batch(prompts, **settings), strict=True):
        alone = decoder.generate(prompt, **settings)
        assert output.tokens == alone.tokens
        assert rounds(output) == rounds(alone)
