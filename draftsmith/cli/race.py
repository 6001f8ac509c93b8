"""Two decoders that take turns on one machine, so that both texts grow at their own speeds.

Each decodes in a thread of its own, which waits after every round. The decoder whose rounds have taken less time so far
decodes next: both texts appear as if each had the machine for itself, and no round is timed while another one runs.
"""

from collections.abc import Iterator, Sequence
from threading import Semaphore, Thread
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.sequence import Round
from draftsmith.distill.detokenize import IncrementalText
from draftsmith.eval.baseline import threads
from draftsmith.metrics import tau


class _Left(Exception):
    """Raised in the thread of a text that is closed."""


class Piece(NamedTuple):
    """The text that a token completed."""

    text: str
    drafted: bool


class Lane:
    """A text while it is decoded, one round at a time.

    Args:
        prompt: token ids.
        settings: of `SpeculativeDecoder.generate`.
        cpu_threads: of the decoding; torch counts them by thread.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        tokenizer: PreTrainedTokenizerBase,
        prompt: list[int],
        settings: dict[str, Any],
        cpu_threads: int,
    ) -> None:
        self._decoder, self._prompt, self._settings, self._cpu_threads = decoder, prompt, settings, cpu_threads
        self._text = IncrementalText(tokenizer, prompt)
        self._go, self._paused, self._left = Semaphore(0), Semaphore(0), False
        self._thread: Thread | None = None
        self.pieces: list[Piece] = []
        self.tokens: list[int] = []
        self.rounds: list[Round] = []
        self.finished = False
        self.error: Exception | None = None

    @property
    def seconds(self) -> float:
        """Seconds of all rounds, without the prefill."""
        return sum(record.seconds for record in self.rounds)

    @property
    def speed(self) -> float:
        """Tokens per second of the rounds; 0 before the first one."""
        return sum(record.committed for record in self.rounds) / self.seconds if self.rounds else 0.0

    @property
    def tau(self) -> float:
        """Mean number of tokens that a round commits; 0 before the first one."""
        return tau([record.committed for record in self.rounds], len(self.rounds))

    def advance(self) -> None:
        """Decode one more round, at first the prefill, and wait for it."""
        if self._thread is None:
            self._thread = Thread(target=self._run, daemon=True)
            self._thread.start()
        self._go.release()
        self._paused.acquire()

    def close(self) -> None:
        """Stop decoding; nothing happens if the text is finished."""
        self._left = True
        if self._thread is not None and not self.finished:
            self.advance()

    def _run(self) -> None:
        self._go.acquire()
        try:
            with threads(self._cpu_threads):
                self._decoder.generate(self._prompt, on_tokens=self._on_tokens, **self._settings)
            self.pieces.append(Piece(self._text.rest(), drafted=False))
        except _Left:
            pass
        except Exception as error:  # it is raised where the text is read
            self.error = error
        finally:
            self.finished = True
            self._paused.release()

    def _on_tokens(self, tokens: list[int], record: Round | None) -> None:
        drafted = 0 if record is None else record.accepted
        self.tokens += tokens
        self.pieces += [Piece(self._text.add(token), place < drafted) for place, token in enumerate(tokens)]
        if record is not None:
            self.rounds.append(record)
        self._paused.release()
        self._go.acquire()
        if self._left:
            raise _Left


def race(lanes: Sequence[Lane]) -> Iterator[None]:
    """Decode all texts to their ends, and yield after every round of one of them.

    Raises:
        Exception: what the decoding of a text raised.
    """
    try:
        while running := [lane for lane in lanes if not lane.finished]:
            lane = min(running, key=lambda lane: lane.seconds)
            lane.advance()
            if lane.error is not None:
                raise lane.error
            yield
    finally:
        for lane in lanes:
            lane.close()
