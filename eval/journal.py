"""Measured cells (one variant, temperature, batch, turn and repeat), and the file `cells.jsonl` that stores them."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, Field, model_validator

from draftsmith.decode.costs import Costs
from draftsmith.decode.sequence import DecodeOutput, Round
from draftsmith.errors import ConfigError
from draftsmith.eval.results import PlainSpeeds, StoredSitting, checked
from draftsmith.eval.settings import Variant
from draftsmith.reading import parse_json
from draftsmith.storage import writing

SCHEMA = 2
"""Version of `eval.json` and `cells.jsonl`; increased when old code would misread new files."""
JOURNAL = "cells.jsonl"
KEPT = "earlier results are kept; with enough space, the same command continues from them"

Key = tuple[str, str, float, int, int, int, int]

ACCEPTED, CORRECTION, BONUS, OWN = "acbt"
"""Origin of a token: an accepted draft token, the target's correction of a rejected draft token, the bonus token after
a fully accepted draft, or the target's token without a draft."""


@dataclass(frozen=True)
class TextRecord:
    """A decoded text: its tokens, and what verification decided."""

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

    @classmethod
    def of(cls, prompt: str, output: DecodeOutput) -> "TextRecord":
        deepest = max((record.tested for record in output.rounds), default=0)
        reached = [[r for r in output.rounds if r.tested > i] for i in range(deepest)]
        return cls(
            prompt=prompt,
            tokens=list(output.tokens),
            rounds=[OWN, *(_kinds(record) for record in output.rounds)],
            tested=[len(rounds) for rounds in reached],
            accepted=[sum(r.accepted > i for r in rounds) for i, rounds in enumerate(reached)],
            overlap=sum(value for record in output.rounds for value in record.overlap),
            overlaps=sum(len(record.overlap) for record in output.rounds),
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


class BatchKey(NamedTuple):
    """One question to one batch of prompts, which every drafter and the target alone answer in turn."""

    repeat: int
    temperature: float
    batch_size: int
    group: int
    """Number of the batch."""
    turn: int


@dataclass(frozen=True)
class Measurement:
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
    def of(cls, arm: Variant, place: BatchKey, names: list[str], outputs: list[DecodeOutput]) -> "Measurement":
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
            temperature=place.temperature,
            batch_size=place.batch_size,
            group=place.group,
            repeat=place.repeat,
            turn=place.turn,
            texts=[TextRecord.of(name, output) for name, output in zip(names, outputs, strict=True)],
            prefill_seconds=max(output.prefill_seconds for output in outputs),
            draft_seconds=sum(record.draft_seconds for record in rounds),
            verify_seconds=sum(record.verify_seconds for record in rounds),
            seconds=sum(record.seconds for record in rounds),
        )

    @property
    def arm(self) -> Variant:
        return (self.drafter, self.policy)

    @property
    def key(self) -> Key:
        place = (self.temperature, self.batch_size, self.group, self.repeat, self.turn)
        return (self.drafter, self.policy, *place)


FACTS: dict[str, Any] = {"threads": Annotated[int, Field(ge=1, le=4096)], "plain": PlainSpeeds}
"""Values that a run determines once, with their types; all other facts are costs."""


class JournalLine(BaseModel):
    """A line after the first; holds exactly one of these."""

    cell: Measurement | None = None
    fact: tuple[str, Any] | None = None
    sitting: StoredSitting | None = None

    @model_validator(mode="after")
    def _require_one(self) -> Self:
        if sum(part is not None for part in (self.cell, self.fact, self.sitting)) != 1:
            raise ValueError("one of cell, fact and sitting")
        return self


@dataclass
class Journal:
    """The results of a run so far, one JSON object per line. A kill loses at most the line that is being written.

    The first line identifies the run. Without a path, nothing is stored.
    """

    path: Path | None = None
    cells: dict[Key, Measurement] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """Values that are determined once per run, such as measured costs."""
    sittings: list[dict[str, Any]] = field(default_factory=list)
    """The environment of each start of the run."""

    def begin(self, identity: dict[str, Any], environment: dict[str, Any]) -> None:
        """Read the results of an earlier call, and append the environment of this start.

        Raises:
            ConfigError: for a file of another run, naming the value that differs.
        """
        if self.path is not None and self.path.exists():
            self._read(self.path, identity)
        if not self.cells and not self.facts and not self.sittings:
            self._append({"run": {"schema": SCHEMA, **identity}}, anew=True)
        self.sittings.append(environment)
        self._append({"sitting": environment})

    def add(self, cell: Measurement) -> None:
        self.cells[cell.key] = cell
        self._append({"cell": asdict(cell)})

    def fact(self, name: str, value: Any) -> None:
        self.facts[name] = value
        self._append({"fact": [name, value]})

    def _read(self, path: Path, identity: dict[str, Any]) -> None:
        lines = whole_lines(path)
        if lines:
            require_same(lines[0]["run"], {"schema": SCHEMA, **identity}, path.parent)
        for number, line in enumerate(lines[1:], 2):
            entry = checked(JournalLine, line, f"{path}:{number}", "what `draftsmith eval` wrote")
            if entry.cell is not None:
                self.cells[entry.cell.key] = entry.cell
            elif entry.fact is not None:
                name, value = line["fact"]
                place = f"{path}:{number}"
                checked(FACTS.get(name, Costs), value, place, "what `draftsmith eval` wrote", strict=name in FACTS)
                self.facts[name] = value
            else:
                self.sittings.append(line["sitting"])

    def _append(self, line: dict[str, Any], *, anew: bool = False) -> None:
        if self.path is None:
            return
        with writing(self.path, KEPT):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("wb" if anew else "ab") as file:
                file.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a journal; an incomplete last line is removed from the file.

    Raises:
        ConfigError: for a file that is not a journal, or a complete line that is not JSON.
    """
    if not path.is_file():  # reading a pipe would block
        raise ConfigError(f"{path} is no regular file; expected what `draftsmith eval` wrote, or another folder")
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        os.truncate(path, end)
    lines = []
    for number, text in enumerate(data[:end].splitlines(), 1):
        try:
            line = parse_json(text)
            if not isinstance(line, dict) or (number == 1) != isinstance(line.get("run"), dict):
                raise ValueError("only the first line says which run it is")
        except ValueError as error:
            raise ConfigError(
                f"{path}:{number} is damaged ({error}); expected what `draftsmith eval` wrote, or another folder"
            ) from error
        lines.append(line)
    return lines


def require_same(before: Mapping[str, Any], now: Mapping[str, Any], out: Path) -> None:
    """Raise ConfigError naming the first value in which a run differs from the one stored in its folder."""
    now = json.loads(json.dumps(now))
    for key, value in now.items():
        there = before.get(key)
        if key == "settings" and isinstance(there, dict):
            require_same(there, value, out)
        elif there != value:
            raise ConfigError(
                f"out={out} holds another run: {key}={there!r} there, {value!r} here; expected another folder"
            )
