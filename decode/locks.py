"""Locks of the models that a call of the decoder uses: calls in several threads run one after another.

A drafter holds the state of one text or batch from its start to its end, also while a callback runs: its lock is held
for the whole call. A target or draft model has no such state, but passes place hooks and change its attention: its lock
is released while a callback runs. All calls take the locks in one order, those of drafters first, so none waits
forever.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock, RLock, get_ident
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

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
_MODELS: "WeakKeyDictionary[nn.Module, RLock]" = WeakKeyDictionary()
"""By the input embeddings, which models that share layers share, as for early exit."""


class Locks:
    """The locks of a target and a drafter.

    Args:
        drafter: also the drafters and the draft model inside it.
        owner: an object that is locked like a drafter.
    """

    def __init__(self, target: PreTrainedModel, drafter: Drafter | None, owner: object = None) -> None:
        drafters = [] if drafter is None else [part for part in drafter.modules() if isinstance(part, Drafter)]
        models = [target, *(model for one in drafters if (model := one.language_model) is not None)]
        named = {**({} if owner is None else {owner: "decoder"}), **{one: f"{one.type} drafter" for one in drafters}}
        self._states = [(name, _STATES.setdefault(one, _State())) for one, name in named.items()]
        embeddings = {model.get_input_embeddings() for model in models}
        self._models = sorted((_MODELS.setdefault(one, RLock()) for one in embeddings), key=id)

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
            stack.enter_context(self.running())
            yield

    def check(self) -> None:
        """Raise a ConfigError in a callback of a call with the same drafter or owner, which would lose its state."""
        for name, state in self._states:
            if state.is_own:
                raise ConfigError(
                    f"a callback uses the {name} of the call that it belongs to; expected a decoder with a drafter of "
                    "its own, or a call after this one"
                )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold the locks of the models only: to run them without the drafter."""
        with ExitStack() as stack:
            for lock in self._models:
                stack.enter_context(lock)
            yield

    @contextmanager
    def released(self) -> Iterator[None]:
        """Release the locks of the models inside the context, so that others run them."""
        for lock in self._models:
            lock.release()
        try:
            yield
        finally:
            for lock in self._models:
                lock.acquire()
