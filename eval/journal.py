"""Journals of measurements, which continue after a kill.

`cells.jsonl` holds measured cells: one arm, temperature, batch, turn and repeat each. `batches.jsonl` holds those
of servers, with all turns of a batch, as facts.
"""

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, NotRequired, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from draftsmith.decode.costs import Costs
from draftsmith.decode.sequence import DecodeOutput, Round
from draftsmith.errors import ConfigError, one_line
from draftsmith.eval.settings import ANOTHER, Arm, Settings, require_same_run
from draftsmith.metrics import PositionCounts, position_counts
from draftsmith.reading import parse_json
from draftsmith.storage import JsonLines

SCHEMA = 2
"""Version of `eval.json` and `cells.jsonl`; increased when old code would misread new files."""
OURS = "what `draftsmith eval` wrote"
JOURNAL = "cells.jsonl"
KEPT = "earlier results are kept; with enough space, the same command continues from them"

ACCEPTED, CORRECTION, BONUS, OWN = "acbt"
"""Origin of a token: an accepted draft token, the target's correction of a rejected draft token, the bonus token after
a fully accepted draft, or the target's token without a draft."""


@dataclass(frozen=True)
class TextRecord:
    """A text of a cell: its tokens, and what verification decided."""

    prompt: str
    tokens: list[int]
    rounds: list[Annotated[str, Field(pattern=f"^[{ACCEPTED}{CORRECTION}{BONUS}{OWN}]*$")]]
    """One string per round, one letter per token; the first string is the prefill's token."""
    tested: list[int]
    """By draft position, rounds that accepted all positions before it and had a draft token there."""
    accepted: list[int]
    """By draft position, rounds of `tested` that accepted it."""
    overlap: float
    """Sum over the tested positions of sum_v min(p_v, q_v)."""
    overlaps: int
    prompt_tokens: int = 0
    """Length of the prompt, with earlier turns; 0 in journals of versions before 0.3."""

    @classmethod
    def of(cls, prompt: str, output: DecodeOutput) -> "TextRecord":
        tested, accepted = position_counts(output.rounds)
        overlaps = output.overlaps
        rounds = [OWN, *map(_kinds, output.rounds)]
        return cls(
            prompt,
            list(output.tokens),
            rounds,
            tested,
            accepted,
            sum(overlaps),
            len(overlaps),
            len(output.prompt_tokens),
        )

    @property
    def decode_tokens(self) -> int:
        """Tokens committed by rounds: all but the first, which the prefill gives."""
        return len(self.tokens) - 1

    @property
    def decode_rounds(self) -> int:
        return len(self.rounds) - 1


def _kinds(record: Round) -> str:
    if record.drafted == 0:
        return OWN
    # An accepted path without a child was accepted to its end, in trees as in chains.
    last = CORRECTION if record.tested > record.accepted else BONUS
    return (ACCEPTED * record.accepted + last)[: record.committed]


class Place(NamedTuple):
    """A batch of prompts at one turn, in one repeat, at one temperature: what every arm decodes once."""

    repeat: int
    temperature: float
    batch_size: int
    group: int
    """Number of the batch."""
    turn: int


Key = tuple[Arm, Place]


@dataclass(frozen=True)
class Cell:
    """One call of the decoder. Seconds are those of the whole batch; `seconds` excludes the prefill."""

    drafter: str
    policy: str
    temperature: float
    batch_size: int
    group: int
    """Number of the batch of prompts."""
    repeat: int
    turn: int
    texts: list[TextRecord]
    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float
    seconds: float

    @classmethod
    def of(cls, arm: Arm, place: Place, names: list[str], outputs: list[DecodeOutput]) -> "Cell":
        """Build the record of one decoded batch.

        Finished texts leave a batch, so of texts that share passes the one with the most rounds took part in all.
        """
        longest: dict[int, list[Round]] = {}
        for output in outputs:
            longest[output.shared_with] = max(longest.get(output.shared_with, []), output.rounds, key=len)
        rounds = [record for records in longest.values() for record in records]
        return cls(
            drafter=arm[0],
            policy=arm[1],
            **place._asdict(),
            texts=[TextRecord.of(name, output) for name, output in zip(names, outputs, strict=True)],
            prefill_seconds=max(output.prefill_seconds for output in outputs),
            draft_seconds=sum(record.draft_seconds for record in rounds),
            verify_seconds=sum(record.verify_seconds for record in rounds),
            seconds=sum(record.seconds for record in rounds),
        )

    lengths_known: ClassVar[bool] = True

    @property
    def arm(self) -> Arm:
        return (self.drafter, self.policy)

    @property
    def place(self) -> Place:
        return Place(self.repeat, self.temperature, self.batch_size, self.group, self.turn)

    @property
    def key(self) -> Key:
        return self.arm, self.place

    @property
    def sums(self) -> NDArray[np.float64]:
        """Tokens, rounds, seconds, overlap and overlaps, as `as_series` reads them."""
        texts = ((text.decode_tokens, text.decode_rounds, 0.0, text.overlap, text.overlaps) for text in self.texts)
        return np.sum([*texts, (0, 0, self.seconds, 0, 0)], axis=0)

    @property
    def positions(self) -> list[tuple[PositionCounts, PositionCounts]]:
        """For each text the rounds that tested and that accepted each draft position."""
        return [(text.tested, text.accepted) for text in self.texts]

    def line(self) -> dict[str, Any]:
        return {"cell": asdict(self)}


class Numbers(NamedTuple):
    """Tokens and seconds of a batch, and the engine's counts of verified drafts and of accepted tokens by position."""

    tokens: int
    seconds: FiniteFloat
    drafts: FiniteFloat
    accepted: tuple[FiniteFloat, ...]
    drafted: FiniteFloat | None = None
    """Draft tokens; None where the engine does not count them, and in journals of versions before 0.4."""
    left_out: tuple[tuple[str, int], ...] = ()
    """Later questions that were not asked, by the reason: the answers before them could not be continued."""

    @property
    def rounds(self) -> float:
        """Rounds of all texts.

        Every round commits one token that was not drafted; vLLM counts the rounds with a draft only. Without
        drafts every token is a round.
        """
        if self.accepted:
            return max(self.drafts, self.tokens - sum(self.accepted))
        return self.drafts or self.tokens

    @property
    def lengths_known(self) -> bool:
        """Whether the counts determine how many drafts tested each position: all have one token, or all positions."""
        only_first = len(self.accepted) < 2 or not self.accepted[0]
        return only_first or self.drafted in (self.drafts, self.drafts * len(self.accepted))

    @property
    def tested(self) -> tuple[float, ...]:
        """Rounds that tested each first draft position of which the counts tell it, as they always do of the first."""
        whole = self.drafted == self.drafts * len(self.accepted)
        return (self.drafts, *(self.accepted[:-1] if whole else ()))[: len(self.accepted)]


BATCH = "batch "
"""Prefix of the facts that hold the `Numbers` of a batch; the arm and the place of the batch follow."""


@dataclass(frozen=True)
class ServedCell:
    """A batch of prompts that a server answered, with all its turns; `place` is that of its first turn."""

    arm: Arm
    place: Place
    numbers: Numbers
    texts: ClassVar[tuple[TextRecord, ...]] = ()
    """The journal does not store them."""

    @classmethod
    def read(cls, name: str, value: Any, where: str) -> "ServedCell":
        """Return the cell of a fact; ConfigError for one that `line` did not return."""
        try:
            stored = parse_json(name.removeprefix(BATCH))
        except ValueError:
            stored = name
        drafter, temperature, size, repeat, group = checked(tuple[str, float, int, int, int], stored, where)
        return cls((drafter, ""), Place(repeat, temperature, size, group, 0), checked(Numbers, value, where))

    def line(self) -> dict[str, Any]:
        place = self.place
        stored = [self.arm[0], place.temperature, place.batch_size, place.repeat, place.group]
        return {"fact": [BATCH + json.dumps(stored), self.numbers]}

    @property
    def key(self) -> Key:
        return self.arm, self.place

    @property
    def lengths_known(self) -> bool:
        return self.numbers.lengths_known

    @property
    def sums(self) -> NDArray[np.float64]:
        """See `Cell`; the overlap is the number of tested positions that were accepted."""
        numbers, ((tested, accepted),) = self.numbers, self.positions
        return np.array([numbers.tokens, numbers.rounds, numbers.seconds, sum(accepted), sum(tested)])

    @property
    def positions(self) -> list[tuple[PositionCounts, PositionCounts]]:
        return [(self.numbers.tested, self.numbers.accepted[: len(self.numbers.tested)])]


AnyCell = TypeVar("AnyCell", bound=Cell | ServedCell)


class PlainSpeeds(TypedDict):
    """Tokens per second of the target alone and of transformers' `generate`; see `compare_with_generate`."""

    prompts: int
    identical: int
    generate_tokens_per_second: FiniteFloat
    baseline_tokens_per_second: FiniteFloat
    ratio: FiniteFloat
    ratio_interval: NotRequired[list[FiniteFloat] | None]
    """Missing in files of versions before 0.4."""


COUNTED = "counted"
"""Name of the fact that holds, by server, the reason for which its counters are not known; '' for known ones."""
FACTS: dict[str, Any] = {
    "threads": Annotated[int, Field(ge=1, le=4096)],
    "plain": PlainSpeeds,
    COUNTED: dict[str, str],
}
"""Values that a run determines once, with their types; all other facts are costs."""


@dataclass
class Journal(Generic[AnyCell]):
    """The results of a run so far, one JSON object per line. A kill loses at most the line that is being written.

    The first line identifies the run. Without a path, nothing is stored.
    """

    path: Path | None = None
    cells: dict[Key, AnyCell] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """Values that are determined once per run, such as measured costs."""
    sittings: list[dict[str, Any]] = field(default_factory=list)
    """The environment of each start of the run."""

    def __post_init__(self) -> None:
        self._file = None if self.path is None else JsonLines(self.path, KEPT, sync=True)

    def begin(self, settings: Settings, fingerprints: dict[str, Any], environment: dict[str, Any]) -> None:
        """Read the results of an earlier call, and append the environment of this start.

        Raises:
            ConfigError: for a file of another run, naming the value that differs.
        """
        if self.path is None or not self._read(self.path, settings, fingerprints):
            self._append({"run": {"schema": SCHEMA, "settings": settings.model_dump(), **fingerprints}})
        self.sittings.append(environment)
        self._append({"sitting": environment})

    def add(self, cell: AnyCell) -> None:
        self.cells[cell.key] = cell
        self._append(cell.line())

    def fact(self, name: str, value: Any) -> None:
        self.facts[name] = value
        self._append({"fact": [name, value]})

    def _read(self, path: Path, settings: Settings, fingerprints: dict[str, Any]) -> bool:
        """Read the file; return whether it has a line."""
        lines = whole_lines(path)
        if lines:
            require_same_run(lines[0]["run"], settings, path.parent, {"schema": SCHEMA, **fingerprints})
        for number, line in enumerate(lines[1:], 2):
            where, cell = f"{path}:{number}", None
            name, value = checked(tuple[str, Any], line.get("fact", ("", None)), where)
            if "cell" in line:
                cell = checked(Cell, line["cell"], where)
            elif name.startswith(BATCH):
                cell = ServedCell.read(name, value, where)
            elif name:
                checked(FACTS.get(name, Costs), value, where, strict=name in FACTS)
                self.facts[name] = value
            else:
                self.sittings.append(checked(dict[str, Any], line.get("sitting"), where))
            if cell is not None:
                self.cells[cell.key] = cast(AnyCell, cell)
        return bool(lines)

    def _append(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.append(line)


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a journal; none where there is no file.

    Raises:
        ConfigError: for a complete line that is not JSON.
    """
    lines = []
    for number, (_, text) in enumerate(JsonLines(path, KEPT).lines(), 1):
        try:
            line = parse_json(text)
            if not isinstance(line, dict) or (number == 1) != isinstance(line.get("run"), dict):
                raise ValueError("only the first line says which run it is")
        except ValueError as error:
            raise ConfigError(f"{path}:{number} is damaged ({error}); expected {OURS}, {ANOTHER}") from error
        lines.append(line)
    return lines


def begun(path: Path) -> datetime | None:
    """Return the time that the prompts of a journal show; None where there is no journal, or they show none."""
    lines = whole_lines(path)
    now = lines[0]["run"].get("now") if lines else None
    return None if now is None else checked(datetime, now, path)


def kept(out: Path) -> str:
    """Return a clause about the measurements that the journal in `out` holds."""
    count = sum("cell" in line for line in whole_lines(out / JOURNAL))
    return f"{count} measurements are kept in {out / JOURNAL}" if count else "nothing was measured yet"


def checked(kind: Any, value: Any, place: Path | str, *, strict: bool = False) -> Any:
    """Return `value` validated as `kind`; ConfigError naming `place` and the first key that does not fit.

    `strict`: refuse values of another type that could be converted, such as numbers in quotes.
    """
    try:
        return TypeAdapter(kind).validate_python(value, strict=strict)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"])) or "it"
        shown = one_line(repr(problem["input"]), 80)
        raise ConfigError(f"{place}: {key}={shown} ({problem['msg']}); expected {OURS}") from error
