"""Draft vocabularies: offsets, mask, logits of tokens outside, and the choice of tokens."""

import pytest
import torch
from conftest import make_llama

from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS
from draftsmith.heads.lm_head import DraftVocabulary, checked_size, most_frequent


def test_offsets_mask_and_expansion() -> None:
    vocabulary = DraftVocabulary.of([7, 2, 3], vocab_size=9)
    assert vocabulary.d2t.tolist() == [2, 2, 5], "offsets: token = row + d2t[row]"
    assert vocabulary.tokens_D.tolist() == [2, 3, 7]
    assert vocabulary.t2d.nonzero()[:, 0].tolist() == [2, 3, 7]
    expanded = vocabulary.expand(torch.tensor([[[1.0, 2.0, 3.0]]]))
    assert expanded.shape == (1, 1, 9)
    assert expanded[0, 0, [2, 3, 7]].tolist() == [1, 2, 3]
    assert expanded.softmax(-1)[0, 0, [0, 1, 4, 5, 6, 8]].tolist() == [0] * 6
    assert vocabulary.fingerprint() == DraftVocabulary.of([2, 3, 7], 9).fingerprint()
    assert vocabulary.fingerprint() != DraftVocabulary.of([2, 3, 8], 9).fingerprint()


def test_the_most_frequent_tokens_are_chosen() -> None:
    counts = torch.tensor([5, 0, 9, 5, 1, 0])
    assert most_frequent(counts, 3) == [0, 2, 3]
    assert most_frequent(counts, 2) == [0, 2], "ties go to the lower id"
    assert most_frequent(counts, 3, always=(5,)) == [0, 2, 5]


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash"])
def test_own_lm_heads_start_as_the_targets_rows(kind: str) -> None:
    target = make_llama(num_hidden_layers=4)
    drafter = HEADS[kind].from_target(target, draft_vocabulary=[7, 2, 30])
    assert torch.equal(drafter.body.lm_head.weight, target.lm_head.weight[[2, 7, 30]])


class Packed(torch.nn.Parameter):
    """A weight whose rows are not those of a plain tensor, as libraries for quantization have."""


@pytest.mark.parametrize("kind", ["mtp", "eagle", "hass"])
def test_rows_of_the_targets_lm_head_follow_it(kind: str) -> None:
    target = make_llama(num_hidden_layers=4)
    drafter = HEADS[kind].from_target(target, draft_vocabulary=[7, 2, 30])
    states = torch.randn(5, 32, dtype=torch.float64)
    target.double()
    torch.testing.assert_close(drafter.double().body.head(states), target.lm_head(states)[:, [2, 7, 30]])
    drafter.choose_tokens(target, [1, 2, 60])
    torch.testing.assert_close(drafter.body.head(states), target.lm_head(states)[:, [1, 2, 60]])
    target.lm_head.weight = Packed(target.lm_head.weight.data, requires_grad=False)
    with pytest.raises(ConfigError, match=r"draft_vocab_size=3 with a target whose lm_head is quantized; .* plain"):
        HEADS[kind].from_target(target, draft_vocabulary=[7, 2, 30])


def test_sizes_and_maps_out_of_range_are_refused() -> None:
    assert checked_size(None, 9) is None
    assert checked_size(9, 9) is None
    with pytest.raises(ConfigError, match=r"drafter\.draft_vocab_size=10; expected 1 to 9"):
        checked_size(10, 9)
    for tokens in ([], [1, 1], [9], [-1]):
        with pytest.raises(ConfigError, match="expected distinct ids below 9"):
            DraftVocabulary.of(tokens, 9)
    vocabulary = DraftVocabulary.of([2, 3], 9)
    vocabulary.d2t += 7
    with pytest.raises(ConfigError, match="d2t leads outside the vocabulary of 9"):
        vocabulary.require_consistent("x")
