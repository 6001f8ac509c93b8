"""Turns of threads that decode with one model or one drafter, whose state is that of one text or batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from weakref import WeakKeyDictionary

from torch import nn

_LOCKS: "WeakKeyDictionary[object, RLock]" = WeakKeyDictionary()


def _lock_of(owner: object) -> RLock:
    return _LOCKS.setdefault(owner, RLock())


@contextmanager
def turn(target: nn.Module, user: object) -> Iterator[None]:
    """Let other threads wait that would run the target, or `user`: a drafter, or a decoder without one."""
    with _lock_of(user), _lock_of(target):
        yield


@contextmanager
def turn_of_others(target: nn.Module) -> Iterator[None]:
    """Let other threads run the target inside a turn, with drafters of their own."""
    lock = _lock_of(target)
    lock.release()
    try:
        yield
    finally:
        lock.acquire()
