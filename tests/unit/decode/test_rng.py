"""Seeded draws follow their weights."""

import pytest
import torch

from draftsmith.decode import sampling
from draftsmith.decode.sampling import SeededRng, index_at


def test_frequencies_follow_the_weights() -> None:
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0, 4.0, 0.0])
    rng, counts = SeededRng(0), torch.zeros(6)
    draws = 20_000
    for _ in range(draws):
        counts[rng.categorical(weights)] += 1
    expected = weights / weights.sum()
    # Six standard deviations of a share of 1/2: a false failure has a probability below 1e-8.
    assert (counts / draws - expected).abs().max() < 6 * 0.5 / draws**0.5
    assert counts[[0, 3, 5]].sum() == 0


def test_certain_events_are_certain() -> None:
    rng = SeededRng(1)
    assert all(rng.bernoulli(1.0) for _ in range(100))
    assert not any(rng.bernoulli(0.0) for _ in range(100))


class _Extreme:
    """A `SeededRng` whose uniform number is the largest one below 1."""

    def _uniform(self) -> float:
        return 1 - 2**-53


def test_rounding_never_leaves_the_support() -> None:
    weights = torch.tensor([0.3, 0.3, 0.4, 0.0, 0.0])
    index = SeededRng.categorical(_Extreme(), weights)  # type: ignore[arg-type]
    assert index == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [64, 96, 97, 1000])
def test_a_large_vocabulary_is_drawn_from_as_a_small_one(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 32 and of 8 weights, whole blocks of zeros, and every bound between two tokens."""
    torch.manual_seed(size)
    monkeypatch.setattr(sampling, "BLOCK_WIDTH", 32)
    weights_RV = torch.rand(3, size, dtype=dtype) * (torch.rand(3, size) < 0.3)
    weights_RV[0, :40], weights_RV[1, -40:], weights_RV[2] = 0, 0, torch.eye(size, dtype=dtype)[size // 2]
    cumulative_RV = weights_RV.cumsum(-1, dtype=torch.float64)
    inside_RV = cumulative_RV - weights_RV * 0.5
    shares_RN = (torch.cat([inside_RV, cumulative_RV], 1) / cumulative_RV[:, -1:]).clamp(max=1 - 2**-53)
    for row, weights_V in enumerate(weights_RV):
        for share in [0.0, 1 - 2**-53, *shares_RN[row].tolist()]:
            uniform_11 = torch.tensor([[share]], dtype=torch.float64)
            monkeypatch.setattr(sampling, "LARGE", 33)
            drawn = index_at(weights_V[None], uniform_11).item()
            monkeypatch.setattr(sampling, "LARGE", 10**6)
            expected = index_at(weights_V[None], uniform_11).item()
            bounds_V = cumulative_RV[row] / cumulative_RV[row, -1]
            near = (bounds_V - share).abs().min() < 1e-14  # there, sums in another order may choose the neighbour
            assert drawn == expected or near
            assert weights_V[drawn] > 0
    monkeypatch.setattr(sampling, "LARGE", 33)
    together = index_at(weights_RV[:, None].expand(3, 2, size), torch.rand(3, 2, 1, dtype=torch.float64))
    assert together.shape == (3, 2, 1)
    assert (weights_RV.gather(1, together[..., 0]) > 0).all()
    assert index_at(torch.zeros(1, size), torch.zeros(1, 1, dtype=torch.float64)).item() == size
