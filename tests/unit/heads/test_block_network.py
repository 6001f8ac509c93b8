"""Attention of blocks at many anchors against a loop over single queries, in fp64, and its memory."""

from collections.abc import Callable

import pytest
import torch
from conftest import make_llama, spread
from torch import Tensor

from draftsmith.heads import block_network
from draftsmith.heads.base import TeacherSignals
from draftsmith.heads.block_network import AnchoredBlocks, Visibility
from draftsmith.heads.dflash import DFlash

B, A, BLOCK, T, HEADS, GROUPS, SIZE = 2, 5, 3, 9, 4, 2, 8


WINDOWS = {
    "": (Visibility((None,)), lambda slot, key, window: True),
    "causal": (Visibility((None,), causal=True), lambda slot, key, window: key <= slot),
    "features": (Visibility((3,), False), lambda slot, key, window: key >= -window),
    "features, causal": (Visibility((3,)), lambda slot, key, window: -window <= key <= slot),
    "places": (Visibility((2,), False, windows_from_anchor=False), lambda slot, key, window: abs(slot - key) < window),
    "places, causal": (Visibility((3,), windows_from_anchor=False), lambda slot, key, window: 0 <= slot - key < window),
}
"""What each layout means by a window; whether slot `slot` sees place `key`, both relative to the anchor."""


def plain(
    q: Tensor,
    context: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    anchors: Tensor,
    documents: Tensor | None,
    seen: Callable[[int, int, int], bool],
    window: int,
) -> Tensor:
    """Return the output of every query, each from its own list of keys."""
    out = torch.zeros_like(q)
    for b in range(B):
        for x in range(A * BLOCK):
            anchor, first = int(anchors[b, x // BLOCK]), x // BLOCK * BLOCK
            before = [t for t in range(anchor) if documents is None or documents[b, t] == documents[b, anchor]]
            before = [t for t in before if seen(x - first, t - anchor, window)]
            after = [y for y in range(first, first + BLOCK) if seen(x - first, y - first, window)]
            for head in range(HEADS):
                pairs = [(context[0][b, head // 2, t], context[1][b, head // 2, t]) for t in before]
                pairs += [(own[0][b, head // 2, y], own[1][b, head // 2, y]) for y in after]
                scores = torch.stack([q[b, head, x] @ key for key, _ in pairs]) / SIZE**0.5
                out[b, head, x] = scores.softmax(0) @ torch.stack([value for _, value in pairs])
    return out


@pytest.mark.parametrize(("queries", "packed"), spread([1, 6, 512], [False, True]))
def test_blocks_attend_as_single_queries_do(queries: int, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_network, "QUERIES", queries)
    torch.manual_seed(0)
    q = torch.randn(B, HEADS, A * BLOCK, SIZE, dtype=torch.float64, requires_grad=True)
    own = [torch.randn(B, GROUPS, A * BLOCK, SIZE, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    context = [torch.randn(B, GROUPS, T, SIZE, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    anchors = torch.stack([torch.randperm(T - 1)[:A] + 1 for _ in range(B)])
    documents = torch.tensor([[0] * 4 + [1] * 5, [0] * 7 + [1] * 2]) if packed else None
    leaves = [q, *own, *context]
    for sees, seen in WINDOWS.values():
        expected = plain(q, (*context,), (*own,), anchors, documents, seen, sees.windows[0] or 0)
        attend = AnchoredBlocks([(*context,)], anchors, BLOCK, documents, sees)
        ours = attend(0, q, *own)
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
        pairs = [torch.autograd.grad(out.sin().sum(), leaves, retain_graph=True) for out in (ours, expected)]
        for mine, other in zip(*pairs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


def signals_of(mask_BT: Tensor) -> TeacherSignals:
    ids_BT = torch.zeros_like(mask_BT, dtype=torch.long)
    features = torch.randn(*mask_BT.shape, 64)
    return TeacherSignals(ids_BT, ids_BT + 1, features[..., :32], mask_BT, features)


def test_saved_memory_is_linear_in_the_anchors() -> None:
    """Masks and copies of the features' keys are not kept for each group of blocks."""
    drafter = DFlash.from_target(make_llama().requires_grad_(False), layers=[1, 2], block_size=4)

    def saved(anchors: int) -> int:
        drafter.anchors, sizes = anchors, []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x):
            drafter.unroll(signals_of(torch.ones(1, 1200, dtype=torch.bool)))
        return sum(sizes)

    assert saved(1000) < 2.1 * saved(500)


def test_blocks_are_made_where_something_is_trained() -> None:
    """As many as the text with most trained positions has, without the first position, which has no features."""
    drafter = DFlash.from_target(make_llama().requires_grad_(False), layers=[1, 2], block_size=4, anchors=6)
    mask_BT = torch.zeros(2, 12, dtype=torch.bool)
    counts = []
    for trained in (0, 1, 4, 9):
        mask_BT[1, :trained] = True
        places = [entry.places_N for entry in drafter.unroll(signals_of(mask_BT))]
        counts.append(len(places[0]) // 2)
        assert (places[0] >= 0).sum() == min(6, max(0, trained - 1))
    assert counts == [1, 1, 3, 6]
