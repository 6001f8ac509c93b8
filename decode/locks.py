"""Locks of a call of the decoder: calls in several threads run one after another.

A drafter holds the state of one batch from its start to its end, also while a callback runs: its lock is held for the
whole call. Models have no such state, but passes register hooks and change their attention: one lock of the process is
held while they run, and released while a callback runs. All calls take the locks in one order, those of
drafters first, so none waits forever.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock, RLock, get_ident
from weakref import WeakKeyDictionary

from draftsmith.errors import ConfigError
from draftsmith.heads.base import Drafter


class _State:
    """The lock of a drafter or decoder, which one call holds to its end."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._thread: int | None = None

    @property
    def is_own(self) -> bool:
        """This thread holds the lock."""
        return self._thread == get_ident()

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            self._thread = get_ident()
            try:
                yield
            finally:
                self._thread = None


_STATES: "WeakKeyDictionary[object, _State]" = WeakKeyDictionary()
_MODELS = RLock()
"""Held while models run."""


class Locks:
    """The locks of a drafter and of the models.

    Args:
        drafter: also the drafters and the draft model inside it.
        owner: an object that is locked like a drafter.
    """

    def __init__(self, drafter: Drafter | None, owner: object = None) -> None:
        drafters = [] if drafter is None else [part for part in drafter.modules() if isinstance(part, Drafter)]
        named = {**({} if owner is None else {owner: "decoder"}), **{one: f"{one.type} drafter" for one in drafters}}
        self._states = [(name, _STATES.setdefault(one, _State())) for one, name in named.items()]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold all locks.

        Raises:
            ConfigError: see `check`.
        """
        self.check()
        with ExitStack() as stack:
            for state in sorted((state for _, state in self._states), key=id):
                stack.enter_context(state.held())
            stack.enter_context(_MODELS)
            yield

    def check(self) -> None:
        """Raise a ConfigError in a callback of a call with the same drafter or owner, which would lose its state."""
        for name, state in self._states:
            if state.is_own:
                raise ConfigError(
                    f"a callback uses the {name} of the call that it belongs to; expected a decoder with a drafter of "
                    "its own, or a call after this one"
                )


def running() -> RLock:
    """Return the lock of the models: to run them without the drafter."""
    return _MODELS


@contextmanager
def released() -> Iterator[None]:
    """Release the lock of the models inside the context, so that other threads run them."""
    _MODELS.release()
    try:
        yield
    finally:
        _MODELS.acquire()
