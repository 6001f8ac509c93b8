"""A bound on the time that code of others may compute, such as a chat template with loops inside loops."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class OutOfTime(BaseException):
    """No Exception, so that nothing in between catches it."""


@contextmanager
def computing_at_most(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in the block once the process has computed for `seconds` in it, however busy the machine is.

    Without effect where Python delivers no signals: outside of the main thread, and on Windows.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
