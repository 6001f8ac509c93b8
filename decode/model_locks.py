"""Locks of models and drafters: threads that decode with the same one take turns, as it holds the state of one call."""

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
    """Hold the locks of the target and of `user`, a drafter or, without one, a decoder; other threads wait for them."""
    with _lock_of(user), _lock_of(target):
        yield


@contextmanager
def turn_of_others(target: nn.Module) -> Iterator[None]:
    """Release the target's lock inside `turn`, so that other threads run it with drafters of their own."""
    lock = _lock_of(target)
    lock.release()
    try:
        yield
    finally:
        lock.acquire()
