"""Random numbers without state equal a scalar reference, are uniform, and do not depend on each other."""

import random
from itertools import combinations

import pytest
import torch

from draftsmith.decode import sampling
from draftsmith.decode.drafts.batch import DraftBatch
from draftsmith.decode.draws import first_uniforms, round_keys, seeded_draws, signed, uniforms
from draftsmith.decode.sampling import index_at

CPU = torch.device("cpu")
ALL = 2**64 - 1


def outputs(state: int, count: int) -> list[int]:
    """Return the outputs of SplitMix64, as its authors write it."""
    found = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & ALL
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & ALL
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & ALL
        found.append(z ^ (z >> 31))
    return found


def numbers(seeds: list[int], lengths: list[int], count: int) -> torch.Tensor:
    keys_B = round_keys(torch.tensor([signed(seed) for seed in seeds]), torch.tensor(lengths))
    return first_uniforms(keys_B, count)


def test_the_reference_is_splitmix64() -> None:
    """Published outputs for the seed 1234567."""
    assert outputs(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_numbers_are_those_of_the_reference() -> None:
    draw = random.Random(0)
    seeds = [0, 1, 2**63 - 1, 2**63, ALL, *(draw.randrange(2**64) for _ in range(20))]
    lengths = [draw.randrange(200) for _ in seeds]
    found = numbers(seeds, lengths, 40)
    for row, seed, length in zip(found.tolist(), seeds, lengths, strict=True):
        key = outputs(seed, length + 1)[-1]
        assert row == [output / 2**64 for output in (value >> 11 << 11 for value in outputs(key, 40))]
    keys_B = round_keys(torch.tensor([signed(seed) for seed in seeds]), torch.tensor(lengths))
    index_BN = torch.randint(40, (len(seeds), 7))
    assert torch.equal(uniforms(keys_B, index_BN), found.gather(1, index_BN))


def z_scores(values: torch.Tensor, cells: int) -> float:
    """Return the distance of the chi-squared statistic of equal cells from its mean, in standard deviations."""
    counts = torch.bincount(values.flatten(), minlength=cells).double()
    expected = values.numel() / cells
    return float((((counts - expected) ** 2 / expected).sum() - (cells - 1)) / (2 * (cells - 1)) ** 0.5)


def test_numbers_are_uniform_and_pairs_of_neighbours_are_independent() -> None:
    """Over seeds, lengths and indices that follow each other: 2^20 numbers in 1024 cells, pairs in 32 x 32.

    A fair source fails one of the five tests with a probability below 1e-8, once for these seeds.
    """
    seeds, lengths = torch.arange(64).repeat_interleave(256), torch.arange(256).repeat(64)
    u_SLN = numbers(seeds.tolist(), lengths.tolist(), 64).view(64, 256, 64)
    assert abs(z_scores((u_SLN * 1024).long(), 1024)) < 6
    cell_SLN = (u_SLN * 32).long()
    pairs = {
        "seeds": (cell_SLN[::2], cell_SLN[1::2]),
        "lengths": (cell_SLN[:, ::2], cell_SLN[:, 1::2]),
        "indices": (cell_SLN[..., ::2], cell_SLN[..., 1::2]),
        "length and index": (cell_SLN[:, ::2, ::2], cell_SLN[:, 1::2, 1::2]),
    }
    for name, (one, other) in pairs.items():
        assert abs(z_scores(32 * one + other, 1024)) < 6, name
    assert 0 <= float(u_SLN.min()) < 1e-5
    assert 1 - 1e-5 < float(u_SLN.max()) < 1
    assert len(u_SLN.unique()) == u_SLN.numel()


def test_draws_follow_their_weights() -> None:
    weights_V = torch.tensor([0.0, 1.0, 3.0, 0.0, 4.0, 0.0])
    draws = seeded_draws(range(20_000), [9] * 20_000, CPU)
    for tokens_B in (draws.next(weights_V.expand(20_000, -1)), draws.drafted(weights_V.expand(20_000, -1), 3)):
        shares_V = torch.bincount(tokens_B, minlength=6) / 20_000
        # Six standard deviations of a share of 1/2: a false failure has a probability below 1e-8.
        assert (shares_V - weights_V / weights_V.sum()).abs().max() < 6 * 0.5 / 20_000**0.5
        assert shares_V[[0, 3, 5]].sum() == 0


def test_draws_of_a_round_are_independent() -> None:
    """Each gives a fair bit; every two of them agree in half of 20,000 texts, within six standard deviations."""
    B = 20_000
    draws, every_B = seeded_draws(range(B), [9] * B, CPU), torch.ones(B, dtype=torch.bool)
    fair_BV, half_B = torch.ones(B, 2), torch.full((B,), 0.5)
    after_BP = draws.along(torch.ones(B, 4, 2), DraftBatch(torch.zeros(B, 3, dtype=torch.int64)))
    bits = [draws.drafted(fair_BV, node) for node in range(3)]
    bits += [draws.passes(half_B, node, every_B).long() for node in range(3)]
    bits += [*after_BP.unbind(1), draws.drafted(fair_BV, torch.full((B,), 40))]
    for one, other in combinations(bits, 2):
        assert abs((one == other).double().mean() - 0.5) < 6 * 0.5 / B**0.5
    assert torch.equal(draws.next(fair_BV), after_BP[:, 0]), "rules use one or the other"


def test_draws_are_the_same_however_they_are_asked_for() -> None:
    draws, B = seeded_draws(range(50), range(50), CPU), 50
    weights_BV, half_BN = torch.rand(B, 7), torch.full((B, 30), 0.5)
    for node in (0, 3, 29):
        nodes_B = torch.full((B,), node)
        assert torch.equal(draws.drafted(weights_BV, node), draws.drafted(weights_BV, nodes_B))
        passed_B = draws.passes(half_BN[:, 0], node, torch.ones(B, dtype=torch.bool))
        assert torch.equal(passed_B, draws.passes(half_BN[:, 0], nodes_B, torch.ones(B, dtype=torch.bool)))
        alone_BN = torch.arange(30).expand(B, -1) == node
        assert torch.equal(passed_B, draws.until_failure(half_BN, alone_BN) == 30)
        assert torch.equal(passed_B, draws.longest(half_BN, alone_BN) == node + 1)
        part = draws.of([7, 2])
        assert torch.equal(part.drafted(weights_BV[[7, 2]], node), draws.drafted(weights_BV, node)[[7, 2]])
    drawn_B3 = torch.stack([draws.drafted(weights_BV, node) for node in range(3)], 1)
    assert torch.equal(draws.chain(weights_BV[:, None].expand(-1, 3, -1)), drawn_B3)


def test_certain_events_are_certain() -> None:
    draws, every_B = seeded_draws(range(100), [1] * 100, CPU), torch.ones(100, dtype=torch.bool)
    assert draws.passes(torch.ones(100), 0, every_B).all()
    assert not draws.passes(torch.zeros(100), 0, every_B).any()


def test_rounding_never_leaves_the_support() -> None:
    weights_1V = torch.tensor([[0.3, 0.3, 0.4, 0.0, 0.0]])
    assert index_at(weights_1V, torch.tensor([[1 - 2**-53]], dtype=torch.float64)).item() == 2


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
