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


SOME = [1, 4, 5, 9]


def _truncated(kind: str, p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Over the draft vocabulary `SOME`, with the target's distribution as it is; plain formula."""
    p_V, q_D = p_logits.softmax(-1), q_logits.softmax(-1)
    p_D = p_V[SOME]
    if kind == "tv":
        return 1 - torch.minimum(p_D, q_D).sum()
    if kind == "ce":
        best = int(p_V.argmax())
        return -q_D.log()[SOME.index(best)] if best in SOME else 0 * q_D.sum()
    inside = p_D.sum()
    return (p_D * ((p_D / inside).log() - q_D.log())).sum()


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_tokens_outside_the_draft_vocabulary_count_as_misses(kind: str) -> None:
    generator = torch.Generator().manual_seed(5)
    signals = _signals(generator)
    lm_head = nn.Linear(H, V, bias=False).double().requires_grad_(False)
    head = nn.Linear(D, len(SOME)).double()
    state = torch.randn(B, T, D, dtype=torch.float64, generator=generator)
    sums = Objective(kind)([Unrolled(state, head, offset=1, vocabulary_D=torch.tensor(SOME))], signals, lm_head)
    expected, alpha, match, outside = torch.zeros((), dtype=torch.float64), 0.0, 0, 0
    for b in range(B):
        for t in range(1, T):
            if signals.mask_BT[b, t]:
                p, q = lm_head(signals.hidden_BTH[b, t]), head(state[b, t - 1])
                expected = expected + _truncated(kind, p, q)
                alpha += float(torch.minimum(p.softmax(-1)[SOME], q.softmax(-1)).sum())
                match += int(p.argmax()) == SOME[int(q.argmax())]
                outside += int(p.argmax()) not in SOME
    assert outside > 0, "the case under test"
    torch.testing.assert_close(sums.loss.double(), expected, rtol=1e-6, atol=1e-6)
    assert sums.alpha_K.item() == pytest.approx(alpha, rel=1e-6)
    assert sums.match_K.item() == match
    ours = torch.autograd.grad(sums.loss, list(head.parameters()))
    for mine, plain in zip(ours, torch.autograd.grad(expected, list(head.parameters())), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-12)


def test_the_terms_of_eagle_hass_and_dspark() -> None:
    """Feature distance, top-k cross-entropy and the confidence head's, each the plain formula's value."""
    generator = torch.Generator().manual_seed(7)
    signals = _signals(generator)
    lm_head, head = (nn.Linear(H, V, bias=False).double() for _ in range(2))
    state = torch.randn(B, T, H, dtype=torch.float64, generator=generator)
    sure = nn.Linear(H, 1).double()
    entry = Unrolled(state, head, offset=2, regresses=True, confidence=lambda x: sure(x)[..., 0])
    weights = {"feature_weight": 0.7, "top_k": 3, "top_k_weight": 0.3, "confidence_weight": 0.2}
    silent = dict.fromkeys(("feature_weight", "top_k_weight", "confidence_weight"), 0.0)
    extra = Objective(**weights)([entry], signals, lm_head).loss - Objective(**silent)([entry], signals, lm_head).loss
    expected = 0.0
    for b in range(B):
        for t in range(2, T):
            if signals.mask_BT[b, t]:
                f, s = signals.hidden_BTH[b, t], state[b, t - 2]
                gap = (f - s).abs()
                expected += 0.7 * torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean()
                p, q = lm_head(f).softmax(-1), head(s).softmax(-1)
                best = p.argsort(descending=True)[:3]
                expected += 0.3 * -(p[best] * q[best].log()).sum()
                alpha, c = torch.minimum(p, q).sum(), sure(s).sigmoid()
                expected += 0.2 * -(alpha * c.log() + (1 - alpha) * (1 - c).log()).sum()
    torch.testing.assert_close(extra.double(), torch.as_tensor(expected).double(), rtol=1e-5, atol=1e-5)


def test_states_at_chosen_places() -> None:
    """Blocks behind anchors: each state meets the target's at the place that it names, -1 and masked ones none."""
    signals = _signals(torch.Generator().manual_seed(9))
    lm_head, head = nn.Linear(H, V).double(), nn.Linear(D, V).double()
    whole = torch.randn(B, T, D, dtype=torch.float64)
    places = torch.tensor([[4, -1, 0], [1, 2, 3], [10, 9, -1]])
    chosen = torch.stack([whole[b, places[b].clamp_min(0)] for b in range(B)])
    some = Objective("kl")([Unrolled(chosen, head, places_BT=places)], signals, lm_head)
    mask = torch.zeros_like(signals.mask_BT)
    for b in range(B):
        mask[b, [place for place in places[b].tolist() if place >= 0]] = True
    kept = TeacherSignals(signals.input_ids_BT, signals.attention_mask_BT, signals.hidden_BTH, signals.mask_BT & mask)
    all_of_them = Objective("kl")([Unrolled(whole, head)], kept, lm_head)
    assert some.count_K == all_of_them.count_K
    torch.testing.assert_close(some.loss, all_of_them.loss)
