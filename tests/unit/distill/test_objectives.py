"""The chunked objectives give the plain formula's value and gradient, and never hold more than a chunk of logits."""

import pytest
import torch
from torch import Tensor, nn

from draftsmith.distill.objectives import DIVERGENCES, Objective, overlap
from draftsmith.heads.drafter import TeacherSignals, Unrolled

B, T, H, D, V = 3, 11, 8, 6, 13


def _signals(generator: torch.Generator) -> TeacherSignals:
    mask = torch.rand(B, T, generator=generator) < 0.6
    hidden = torch.randn(B, T, H, dtype=torch.float64, generator=generator)
    ids = torch.zeros(B, T, dtype=torch.long)
    return TeacherSignals(ids, torch.ones_like(ids), hidden, mask)


def _plain(kind: str, p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """The formula over one row, as it stands in a paper."""
    p, q = p_logits.softmax(-1), q_logits.softmax(-1)
    return {
        "kl": (p * (p.log() - q.log())).sum(),
        "tv": (p - q).abs().sum() / 2,
        "ce": -q.log()[p.argmax()],
    }[kind]


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_value_and_gradient_equal_the_plain_formula(kind: str, chunk: int) -> None:
    generator = torch.Generator().manual_seed(3)
    signals = _signals(generator)
    lm_head = nn.Linear(H, V, bias=False).double().requires_grad_(False)
    heads = [nn.Linear(D, V).double() for _ in range(2)]
    states = [torch.randn(B, T, D, dtype=torch.float64, generator=generator, requires_grad=True) for _ in heads]
    objective = Objective(kind, temperature=0.7, position_decay=0.5, chunk_tokens=chunk)
    unrolled = [Unrolled(state, head, offset=k + 1) for k, (state, head) in enumerate(zip(states, heads, strict=True))]
    sums = objective(unrolled, signals, lm_head)
    leaves = [*states, *(parameter for head in heads for parameter in head.parameters())]
    gradients = torch.autograd.grad(sums.loss, leaves)

    expected, alphas, counts = torch.zeros((), dtype=torch.float64), [0.0, 0.0], [0, 0]
    for k in range(2):
        for b in range(B):
            for t in range(k + 1, T):
                if signals.mask_BT[b, t]:
                    p = lm_head(signals.hidden_BTH[b, t]) / 0.7
                    q = heads[k](states[k][b, t - k - 1]) / 0.7
                    expected = expected + 0.5**k * _plain(kind, p, q)
                    alphas[k] += overlap(p[None], q[None]).item()
                    counts[k] += 1
    torch.testing.assert_close(sums.loss.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sums.alpha_K.double(), torch.tensor(alphas, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    assert sums.count_K.tolist() == counts
    for ours, plain in zip(gradients, torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-12)


def test_no_more_than_one_chunk_of_logits_is_alive() -> None:
    """Counts, over forward and backward, the rows that the head turns into logits at a time."""
    generator = torch.Generator().manual_seed(0)
    rows = []

    class Head(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            rows.append(x.shape[0])
            return super().forward(x)

    signals = _signals(generator)
    state = torch.randn(B, T, D, requires_grad=True)
    lm_head = nn.Linear(H, V).double()
    saved: list[int] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x)
    with hooks:
        loss = Objective("kl", chunk_tokens=2)([Unrolled(state, Head(D, V), 0)], signals, lm_head).loss
    forward_calls = len(rows)
    loss.backward()
    assert max(rows) <= 2
    assert len(rows) == 2 * forward_calls, "logits are made again in the backward pass, not kept"


def test_an_empty_mask_still_reaches_every_parameter() -> None:
    """A process whose slice holds no token must still take part in the reduction of gradients."""
    signals = _signals(torch.Generator().manual_seed(0))
    empty = TeacherSignals(
        signals.input_ids_BT, signals.attention_mask_BT, signals.hidden_BTH, torch.zeros_like(signals.mask_BT)
    )
    state = torch.randn(B, T, D, requires_grad=True)
    sums = Objective()([Unrolled(state, nn.Linear(D, V), 0)], empty, nn.Linear(H, V).double())
    sums.loss.backward()
    assert sums.loss.item() == 0
    assert state.grad is not None
    assert not state.grad.any()
