"""Logits of training and of the walk, from the same candidates and scores, in fp64."""

from typing import Any

import pytest
import torch

from draftsmith.errors import ConfigError
from draftsmith.heads.dflash import DFlash
from draftsmith.heads.layers import LayerConfig
from draftsmith.heads.transitions import CandidateSelector

V, H, RANK, TOP, N = 12, 8, 3, 4, 6


def test_training_divides_among_candidates_what_the_states_give_them() -> None:
    """q of training is finite, gives other tokens what the unary logits do, and is the walk's among candidates."""
    torch.manual_seed(0)
    selector = CandidateSelector(V, RANK, V, H, TOP).double()
    torch.nn.init.normal_(selector.successor_codebook)
    unary_NV, states_NH, before_N = torch.randn(N, V).double(), torch.randn(N, H).double(), torch.randint(V, (N,))
    values_NX, _ = selector.read(selector.begin(states_NH), before_N, states_NH)
    walk_NV, trained_NV = (selector(unary_NV, values_NX, walks).softmax(-1) for walks in (True, False))
    plain_NV = unary_NV.softmax(-1)
    for n in range(N):
        kept = unary_NV[n].argsort(descending=True)[:TOP]
        context = selector.predecessor_codebook[before_N[n]] * (selector.hidden_projection.weight @ states_NH[n])
        scores = torch.stack([unary_NV[n, b] + selector.successor_codebook[b] @ context for b in kept])
        torch.testing.assert_close(walk_NV[n, kept], scores.softmax(-1))
        torch.testing.assert_close(trained_NV[n, kept], plain_NV[n, kept].sum() * scores.softmax(-1))
        others = [b for b in range(V) if b not in kept]
        torch.testing.assert_close(trained_NV[n, others], plain_NV[n, others])
        assert not walk_NV[n, others].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selector_rank": 2, "selector_top_k": V + 1}, f"selector_top_k={V + 1}; expected at most the {V} tokens"),
        ({"selector_rank": 2, "selector_top_k": 3, "markov_rank": 2}, "selector_rank=2; expected 0 with a markov_rank"),
        ({"conv_kernel_size": 5}, "conv_kernel_size=5; expected at most the block size 4"),
        ({"conv_kernel_size": 2, "conv_group_size": 3}, f"conv_group_size=3; expected a divisor of the width {H}"),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    body = LayerConfig(vocab_size=V, hidden_size=H, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    with pytest.raises(ConfigError, match=message):
        DFlash(body, layers=(1,), block_size=4, anchors=1, **options)
