"""Passes of a model with recurrent layers: its mixers continue from their own states, see `cache/recurrent.py`."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from draftsmith.decode.cache.recurrent import LOCK, Mixer, mixers_of, replaced
from draftsmith.decode.cache.rollback import RollbackCache
from draftsmith.decode.passes.base import Output, Plan, Reading, Seen
from draftsmith.decode.passes.eager import EagerPasses
from draftsmith.heads.hidden_states import ProcessorInputs
from draftsmith.heads.model_config import text_config
from draftsmith.heads.rows import Counts, Rows


class Mixers:
    """All mixers of a model."""

    def __init__(self, model: PreTrainedModel, cache: RollbackCache) -> None:
        states = getattr(text_config(model), "number_of_conv_states", 1)
        with LOCK:
            self.all = [Mixer(module, cache, states) for module in mixers_of(model)]

    @contextmanager
    def reading(self, width: int, counts: Counts | None) -> Iterator[None]:
        """Let the mixers of the model continue from their states, inside the context; see `Mixer.method`."""
        # Another thread may have replaced the methods: they are looked up once this one has the lock.
        with LOCK, replaced([mixer.method(width, counts) for mixer in self.all]):
            yield

    def keep(self, slots: Rows) -> None:
        """Commit the draft tokens of each row in these slots, which are the first ones, and discard the others."""
        for mixer in self.all:
            mixer.keep(slots.counts)

    def drop(self, rows: list[int]) -> None:
        """Keep only these rows."""
        for mixer in self.all:
            mixer.drop(rows)


class RecurrentPasses(EagerPasses):
    """Passes in which mixers read again the tokens that were committed since their states were saved."""

    rewinds = False

    def __init__(self, model: PreTrainedModel, plan: Plan, cache: RollbackCache, seen: Seen | None = None) -> None:
        super().__init__(model, plan, cache, seen)
        self.mixers = Mixers(model, cache)

    def prompt(self, row: int, ids: list[int], given: ProcessorInputs | None) -> Output:
        with self.mixers.reading(len(ids), Counts([len(ids)], self._device)):
            return super().prompt(row, ids, given)

    def read(self, reading: Reading) -> Output:
        with self.mixers.reading(reading.width, reading.counts):
            return super().read(reading)

    def keep(self, slots: Rows) -> None:
        self.mixers.keep(slots)
        super().keep(slots)

    def drop(self, rows: list[int]) -> None:
        self.mixers.drop(rows)
        super().drop(rows)
