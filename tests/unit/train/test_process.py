"""Signals are noted, agreed on and acted on; the handlers that were there before come back."""

import contextlib
import os
import signal

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.train import process as signals
from draftsmith.train.process import Stopping


def test_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    with contextlib.suppress(ValueError), Stopping():
        assert [signal.getsignal(number) for number in signals.SIGNALS] != before
        raise ValueError("anything")
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_what_one_process_receives_all_agree_on(number: int) -> None:
    with Stopping() as one:
        os.kill(os.getpid(), number)
    other = Stopping()
    assert one.agreed is None, "not before all know"
    sums = [a + b for a, b in zip(one.flags(), other.flags(), strict=True)]
    one.agree(sums)
    other.agree(sums)
    assert one.agreed == other.agreed == number
    other.agree(other.flags())
    assert other.agreed == number, "once agreed it stays"


def test_a_problem_of_one_stops_all() -> None:
    one, other = Stopping(), Stopping()
    one.problem = "no room"
    sums = [a + b for a, b in zip(one.flags(), other.flags(), strict=True)]
    with pytest.raises(DraftsmithError, match="no room"):
        one.agree(sums)
    with pytest.raises(DraftsmithError, match="another process had to stop"):
        other.agree(sums)
