"""The chunked objectives give the plain formula's value and gradient, and never hold more than a chunk of logits."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from plain_losses import (
    LAST_ALPHA,
    B,
    D,
    H,
    T,
    V,
    overlap,
    plain_loss,
    random_signals,
    require_equal,
    shifted,
    three_positions,
)
from torch import Tensor, nn

from draftsmith.distill.losses import LOSSES
from draftsmith.distill.objective import Objective
from draftsmith.heads.base import DraftStates, TeacherSignals
from draftsmith.heads.lm_head import LogitsHead, LogitsMap
from draftsmith.train.estimate.fake_run import LiveBytes

SUMMED = [kind for kind in LOSSES if kind != "accepted_length"]


def _next_token(signals: TeacherSignals, b: int, t: int) -> int | None:
    """Return the token after position t; None at the end of the text."""
    return int(signals.input_ids_BT[b, t + 1]) if t + 1 < T else None


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("kind", SUMMED)
def test_value_and_gradient_equal_the_plain_formula(kind: str, chunk: int) -> None:
    generator = torch.Generator().manual_seed(3)
    signals = random_signals(generator)
    lm_head = nn.Linear(H, V, bias=False).double().requires_grad_(False)
    heads = [nn.Linear(D, V).double() for _ in range(2)]
    states = [torch.randn(B, T, D, dtype=torch.float64, generator=generator, requires_grad=True) for _ in heads]
    objective = Objective(kind, temperature=0.7, position_decay=0.5, chunk_tokens=chunk)
    unrolled = [shifted(state, head, k + 1) for k, (state, head) in enumerate(zip(states, heads, strict=True))]
    sums = objective(unrolled, signals, lm_head, LAST_ALPHA)
    leaves = [*states, *(parameter for head in heads for parameter in head.parameters())]

    expected, alphas, counts = torch.zeros((), dtype=torch.float64), [0.0, 0.0], [0, 0]
    for k in range(2):
        for b in range(B):
            for t in range(k + 1, T):
                if signals.mask_BT[b, t]:
                    p = lm_head(signals.hidden_BTH[b, t]) / 0.7
                    q = heads[k](states[k][b, t - k - 1]) / 0.7
                    expected = expected + 0.5**k * plain_loss(kind, p, q, k, _next_token(signals, b, t))
                    alphas[k] += overlap(p, q).item()
                    counts[k] += 1
    torch.testing.assert_close(sums.alpha_K.double(), torch.tensor(alphas, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    assert sums.count_K.tolist() == counts
    require_equal(sums.loss, expected, leaves)


@pytest.mark.parametrize("after", [LogitsMap(), LogitsMap(1.3, 2.0, torch.linspace(-1, 1, V, dtype=torch.float64))])
@pytest.mark.parametrize("terms", [{"kl": 1.0}, {"tv": 0.5, "ce": 0.5, "label": 0.2}, {"accepted_length": 1.0}])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_stored_normalizers_give_the_loss_of_all_logits(
    terms: dict[str, float], after: LogitsMap, temperature: float
) -> None:
    """With the sum of all exponentials, the rows of a draft vocabulary give p, the loss, its gradient and alpha.

    At another temperature the sum is another one, and all rows are needed.
    """
    generator = torch.Generator().manual_seed(5)
    signals, linear, unrolled, states = three_positions(generator)
    lm_head = LogitsHead(linear, after)
    tokens_D = torch.tensor([7, 0, 3, 12, 4])
    head = nn.Linear(D, len(tokens_D)).double()
    unrolled = [replace(entry, head=head, vocabulary_D=tokens_D) for entry in unrolled]
    objective = Objective(mix=terms, chunk_tokens=4, temperature=temperature)

    def results(given: TeacherSignals, used: Callable[[Tensor], Tensor]) -> list[Tensor]:
        sums = objective(unrolled, given, used)
        return [sums.loss, sums.alpha_K, sums.match_K, *torch.autograd.grad(sums.loss, [*states, *head.parameters()])]

    plain = results(signals, lm_head)
    logits_BTV = lm_head(signals.hidden_BTH)
    stored = replace(signals, log_sum_BT=logits_BTV.logsumexp(-1), argmax_BT=logits_BTV.argmax(-1))
    if temperature == 1:  # these rows are not needed
        linear.weight[[token for token in range(V) if token not in tokens_D]] = torch.nan
    for a, b in zip(results(stored, lm_head), plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_no_more_than_one_chunk_of_logits_is_alive() -> None:
    """Count the rows that the head maps to logits in one call, over forward and backward."""
    generator = torch.Generator().manual_seed(0)
    rows = []

    class Head(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            rows.append(x.shape[0])
            return super().forward(x)

    signals = random_signals(generator)
    state = torch.randn(B, T, D, requires_grad=True)
    lm_head = nn.Linear(H, V).double()
    saved: list[int] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x)
    with hooks:
        loss = Objective("kl", chunk_tokens=2)([DraftStates.everywhere(state, Head(D, V))], signals, lm_head).loss
    forward_calls = len(rows)
    loss.backward()
    assert max(rows) <= 2
    assert len(rows) == forward_calls == -(-int(signals.mask_BT.sum()) // 2), "logits are made once"
    assert max(saved) <= max(signals.hidden_BTH.numel(), 2 * V), "and no more than a chunk of them is kept"


def test_an_empty_mask_still_reaches_every_parameter() -> None:
    """A process without tokens in its slice still takes part in the reduction of gradients."""
    signals = random_signals(torch.Generator().manual_seed(0))
    empty = replace(signals, mask_BT=torch.zeros_like(signals.mask_BT))
    state = torch.randn(B, T, D, requires_grad=True)
    head = nn.Linear(D, V)
    sums = Objective()([DraftStates.everywhere(state, head)], empty, nn.Linear(H, V).double())
    sums.loss.backward()
    assert sums.loss.item() == 0
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in (state, head.weight, head.bias))
    assert not state.grad.any()


SOME = [1, 4, 5, 9]


def _truncated(kind: str, p_logits: Tensor, q_logits: Tensor, label: int | None) -> Tensor:
    """Return the loss over the draft vocabulary `SOME`, with p not renormalised; plain formula."""
    p_V, q_D = p_logits.softmax(-1), q_logits.softmax(-1)
    p_D = p_V[SOME]
    if kind == "tv":
        return 1 - torch.minimum(p_D, q_D).sum()
    if kind == "ce":
        best = int(p_V.argmax())
        return -q_D.log()[SOME.index(best)] if best in SOME else 0 * q_D.sum()
    if kind == "label":
        return -q_D.log()[SOME.index(label)] if label in SOME else 0 * q_D.sum()
    if kind == "reverse_kl":
        return (q_D * (q_D / p_D).log()).sum()
    if kind == "lk_alpha":
        return -torch.minimum(p_D, q_D).sum().log()
    if kind == "js":
        q_V = torch.zeros_like(p_V).index_put((torch.tensor(SOME),), q_D)
        m_V = (p_V + q_V) / 2
        return ((p_V * (p_V / m_V).log()).sum() + (q_D * (q_D / m_V[SOME]).log()).sum()) / 2
    inside = p_D.sum()
    return (p_D * ((p_D / inside).log() - q_D.log())).sum()


@pytest.mark.parametrize("kind", [kind for kind in SUMMED if kind != "lk_lambda"])
def test_tokens_outside_the_draft_vocabulary_count_as_misses(kind: str) -> None:
    generator = torch.Generator().manual_seed(5)
    signals = random_signals(generator)
    lm_head = nn.Linear(H, V, bias=False).double().requires_grad_(False)
    head = nn.Linear(D, len(SOME)).double()
    state = torch.randn(B, T, D, dtype=torch.float64, generator=generator)
    sums = Objective(kind)([shifted(state, head, 1, vocabulary_D=torch.tensor(SOME))], signals, lm_head)
    expected, alpha, match, outside = torch.zeros((), dtype=torch.float64), 0.0, 0, 0
    for b in range(B):
        for t in range(1, T):
            if signals.mask_BT[b, t]:
                p, q = lm_head(signals.hidden_BTH[b, t]), head(state[b, t - 1])
                expected = expected + _truncated(kind, p, q, _next_token(signals, b, t))
                alpha += torch.minimum(p.softmax(-1)[SOME], q.softmax(-1)).sum().item()
                match += int(p.argmax()) == SOME[int(q.argmax())]
                outside += int(p.argmax()) not in SOME
    assert outside > 0, "the case under test"
    assert sums.alpha_K.item() == pytest.approx(alpha, rel=1e-6)
    assert sums.match_K.item() == match
    require_equal(sums.loss, expected, list(head.parameters()))


def test_the_terms_of_eagle_hass_and_dspark() -> None:
    """Feature distance, top-k cross-entropy and confidence loss equal the plain formulas."""
    generator = torch.Generator().manual_seed(7)
    signals = random_signals(generator)
    lm_head, head = (nn.Linear(H, V, bias=False).double() for _ in range(2))
    state = torch.randn(B, T, H, dtype=torch.float64, generator=generator)
    sure = nn.Linear(H, 1).double()
    entry = shifted(state, head, 2, regresses=True, confidence=lambda x: sure(x)[..., 0])
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
    """Blocks after anchors: each state is compared at the place that it names; -1 and masked ones are not."""
    signals = random_signals(torch.Generator().manual_seed(9))
    lm_head, head = nn.Linear(H, V).double(), nn.Linear(D, V).double()
    whole = torch.randn(B, T, D, dtype=torch.float64)
    places = torch.tensor([[4, -1, 0], [1, 2, 3], [10, 9, -1]])
    chosen = torch.stack([whole[b, places[b].clamp_min(0)] for b in range(B)])
    some = Objective("kl")([DraftStates.in_rows(chosen, places, T, head)], signals, lm_head)
    mask = torch.zeros_like(signals.mask_BT)
    for b in range(B):
        mask[b, [place for place in places[b].tolist() if place >= 0]] = True
    kept = TeacherSignals(signals.input_ids_BT, signals.attention_mask_BT, signals.hidden_BTH, signals.mask_BT & mask)
    all_of_them = Objective("kl")([DraftStates.everywhere(whole, head)], kept, lm_head)
    assert some.count_K == all_of_them.count_K
    torch.testing.assert_close(some.loss, all_of_them.loss)


@pytest.mark.parametrize("vocabulary", [None, SOME])
def test_labels_are_the_tokens_after_the_states_places(vocabulary: list[int] | None) -> None:
    """Value and gradient by place instead of offset, at a temperature, against the plain formula."""
    generator = torch.Generator().manual_seed(18)
    signals = random_signals(generator)
    tokens = list(range(V)) if vocabulary is None else vocabulary
    lm_head, head = nn.Linear(H, V).double(), nn.Linear(D, len(tokens)).double()
    places = torch.tensor([[4, -1, 0], [1, 2, 3], [10, 9, -1]])
    state = torch.randn(B, 3, D, dtype=torch.float64, generator=generator, requires_grad=True)
    rows = None if vocabulary is None else torch.tensor(vocabulary)
    entry = DraftStates.in_rows(state, places, T, head, vocabulary_D=rows)
    objective = Objective("label", temperature=0.5, chunk_tokens=2)
    ours = objective([entry], signals, lm_head).loss
    expected, learned = torch.zeros((), dtype=torch.float64), 0
    for b in range(B):
        for i, place in enumerate(places[b].tolist()):
            label = _next_token(signals, b, place) if place >= 0 and signals.mask_BT[b, place] else None
            if label in tokens:
                learned += 1
                q_log = (head(state[b, i]) / 0.5).log_softmax(-1)
                expected = expected - q_log[tokens.index(label)]
    assert learned > 0
    require_equal(ours, expected, [state, *head.parameters()])


def test_padding_is_no_label() -> None:
    """An unmasked position before the padding does not learn from the pad token."""
    signals = random_signals(torch.Generator().manual_seed(16))
    lm_head, head = nn.Linear(H, V).double(), nn.Linear(D, V).double()
    entry = DraftStates.everywhere(torch.randn(B, T, D, dtype=torch.float64), head)
    whole = torch.ones_like(signals.mask_BT)
    attention = torch.ones_like(signals.attention_mask_BT)
    attention[:, T - 3 :] = 0
    short = TeacherSignals(signals.input_ids_BT, attention, signals.hidden_BTH, whole)
    kept = TeacherSignals(signals.input_ids_BT, torch.ones_like(attention), signals.hidden_BTH, whole.clone())
    kept.mask_BT[:, T - 4 :] = False
    losses = [Objective("label")([entry], one, lm_head).loss for one in (short, kept)]
    torch.testing.assert_close(*losses)


def test_a_shared_head_has_one_gradient() -> None:
    """Draft positions that share a head add to one gradient, instead of one each until the backward pass."""
    signals = random_signals(torch.Generator().manual_seed(23))
    lm_head, head = nn.Linear(H, 8 * V).double().requires_grad_(False), nn.Linear(D, 8 * V).double()
    size = head.weight.numel() * head.weight.element_size()

    def kept(count: int) -> int:
        states = [torch.randn(B, T, D, dtype=torch.float64) for _ in range(count)]
        unrolled = [shifted(state, head, k + 1) for k, state in enumerate(states)]
        with LiveBytes() as live:
            sums = Objective("kl", chunk_tokens=2)(unrolled, signals, lm_head)
            return live.now if sums.loss.requires_grad else 0

    inputs = B * T * (D + 3) * 8  # states and indices of a draft position
    assert size < kept(1)
    assert kept(5) - kept(1) < 4 * inputs < 4 * size


def test_mixes_and_the_decay_by_position() -> None:
    signals, lm_head, unrolled, _ = three_positions(torch.Generator().manual_seed(14))

    def loss(**settings: object) -> float:
        return Objective(**settings)(unrolled, signals, lm_head).loss.item()

    mixed = loss(mix={"kl": 0.5, "tv": 2.0}, temperature=0.5, position_decay=0.25)
    each = {"temperature": 0.5, "position_decay": 0.25}
    parts = [weight * loss(kind=kind, **each) for kind, weight in (("kl", 0.5), ("tv", 2.0))]
    assert mixed == pytest.approx(sum(parts), rel=1e-5)
    first = Objective(position_decay=1.0)(unrolled[:1], signals, lm_head).loss.item()
    rest = Objective(position_decay=0.25)(unrolled[1:], signals, lm_head).loss.item()
    assert loss(position_decay=0.25) == pytest.approx(first + 0.25 * rest, rel=1e-5)


def test_the_loss_is_a_sum_over_tokens_however_they_are_batched() -> None:
    """Single rows and rows with more padding give the same sums: no mean is taken before the training loop divides."""
    signals, lm_head, unrolled, states = three_positions(torch.Generator().manual_seed(15))
    objectives = [Objective(kind) for kind in LOSSES]

    def cut(pick: Callable[[Tensor], Tensor]) -> tuple[TeacherSignals, list[DraftStates]]:
        parts = (signals.input_ids_BT, signals.attention_mask_BT, signals.hidden_BTH, signals.mask_BT)
        return TeacherSignals(*map(pick, parts)), [
            shifted(pick(state), unrolled[k].head, k + 1) for k, state in enumerate(states)
        ]

    def padded(x: Tensor) -> Tensor:
        return torch.cat([x, torch.zeros_like(x[:, :3])], 1)

    for objective in objectives:
        whole = objective(unrolled, signals, lm_head).loss.item()
        rows = [cut(lambda x, b=b: x[b : b + 1]) for b in range(B)]
        assert whole == pytest.approx(sum(objective(u, s, lm_head).loss.item() for s, u in rows), rel=1e-5)
        more, entries = cut(padded)
        assert whole == pytest.approx(objective(entries, more, lm_head).loss.item(), rel=1e-5), objective.kind
