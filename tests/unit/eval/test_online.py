"""The numbers of a learning drafter beside its frozen copy."""

import numpy as np
import pytest

from draftsmith.eval.metrics import Series
from draftsmith.eval.online import Online, online_cells, online_lines, online_result, plot_online


class Learned:
    """A learner after an evaluation."""

    seconds = 2.5

    def __init__(self, adopted: int = 1, recalled: int = 0) -> None:
        self.adopted, self.recalled = adopted, recalled

    def summary(self) -> str:
        return "learned from 9 tokens"


def series(seconds: list[float], rounds: list[int]) -> Series:
    size = (len(seconds), 1)
    columns = {"seconds": np.reshape(seconds, size), "rounds": np.reshape(rounds, size), "tokens": np.full(size, 12.0)}
    return Series([[str(n)] for n in range(len(seconds))], **columns, overlap=np.zeros(size), overlaps=np.zeros(size))


def result(learning: list[float], rounds: list[int], adopted: int = 1, recalled: int = 0) -> Online:
    count = len(learning)
    arms = [series([3.0] * count, [12] * count), series([2.0] * count, [6] * count), series(learning, rounds)]
    return online_result("d", arms, Learned(adopted, recalled))  # pyright: ignore[reportArgumentType]


def test_windows_gains_and_the_request_that_breaks_even() -> None:
    # 0.5 s more in each of the first four requests are made good by 1 s less in each from the fifth on.
    online = result([2.5] * 4 + [1.0] * 6, [6] * 5 + [4] * 5)
    first, last = online["windows"]
    assert [(w["first"], w["last"], w["tokens_served"]) for w in (first, last)] == [(1, 5, 60), (6, 10, 120)]
    assert first["tau"] == [2.0, 2.0]
    assert last["tau"] == [2.0, 3.0]
    assert last["tokens_per_second"] == [4.0, 6.0, 12.0]
    assert last["gain"] == pytest.approx(1.0)
    assert last["gain_interval"] == pytest.approx([1.0, 1.0])
    assert last["tau_gain"] == pytest.approx(0.5)
    assert last["tau_gain_interval"] == pytest.approx([0.5, 0.5])
    assert online["total"]["gain"] == pytest.approx(20 / 16 - 1)
    low, high = online["total"]["gain_interval"] or [0, 0]
    assert low < 0.25 < high
    assert online["broke_even"] == 6  # after five: 11 s against 10 s; after six: 12 s against 12 s
    assert "broke even at request 6" in online_lines(online)[0]
    assert "requests 6 to 10" in online_lines(online)[1]
    assert "It took 2.5 s" in online_lines(online)[2]
    assert online_cells(online)[1] == ["6-10", "120", "2.00", "3.00", "4", "6", "12", "+100.0 % [+100.0, +100.0]"]
    assert online_cells(online)[-1][0] == "1-10"


def test_learning_that_falls_back_has_not_broken_even() -> None:
    online = result([1.0] * 5 + [4.0] * 5, [6] * 10)
    assert online["broke_even"] is None
    assert "did not break even" in online_lines(online)[0]


def test_without_an_update_nothing_breaks_even() -> None:
    online = result([1.0] * 10, [6] * 10, adopted=0)
    assert online["broke_even"] is None
    assert "No update was adopted" in online_lines(online)[0]


def test_drafts_from_earlier_texts_break_even_without_an_update() -> None:
    online = result([1.0] * 10, [6] * 10, adopted=0, recalled=3)
    assert online["broke_even"] == 1
    assert online["recalled"] == 3
    assert "broke even at request 1" in online_lines(online)[0]


def test_learning_that_is_ahead_at_once() -> None:
    assert result([1.0] * 10, [6] * 10)["broke_even"] == 1


def test_one_request_has_no_interval() -> None:
    online = result([1.0], [6])
    assert online["total"]["gain_interval"] is None
    assert online_cells(online)[0][-1] == "+100.0 %"


def test_no_marker_of_the_plot_is_cut_off() -> None:
    axes = plot_online(result([1.0] * 10, [6] * 5 + [4] * 5)).figure.axes
    tops = [max(max(line.get_ydata()) for line in axis.lines) for axis in axes]
    assert tops == [3.0, 12.0]
    assert all(axis.get_ylim()[1] > 1.05 * top for axis, top in zip(axes, tops, strict=True))
