"""Seconds of rounds on a machine by batch size: measured here, or read from a profile of another machine.

    name: one A10, bf16                  # optional
    alone: {1: 0.0241, 8: 0.0252}        # batch: seconds in which the target alone decodes one token of every text
    verify:                              # batch: tokens of each text: seconds of the target's forward pass
      1: {1: 0.0238, 5: 0.0241, 9: 0.0249}
      8: {1: 0.0247, 5: 0.0262, 9: 0.0291}
    drafters:
      my-drafter:                        # the name in the command; `*` stands for all other drafters
        draft: {1: {1: 0.0011, 8: 0.0086}, 8: {1: 0.0013, 8: 0.0101}}   # batch: draft tokens: seconds of drafting
        round: {1: 0.0003, 8: 0.0006}    # batch: remaining seconds of a round; default 0
    repeats: []                          # optional: profiles from repeated timings of the same machine

YAML or JSON. Curves are interpolated linearly, and extrapolated with the slope of the last two points.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import PreTrainedModel

from draftsmith.decode.costs import Costs, interpolated
from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.policies import Chain
from draftsmith.decode.profiling import measure_costs
from draftsmith.decode.sampling import Processors, Sampling, SeededRng
from draftsmith.decode.sequence import DecodeSequence, Round
from draftsmith.decode.target import TransformersTarget
from draftsmith.errors import ConfigError, reason_of
from draftsmith.eval.teacher_forced import TargetText
from draftsmith.heads.base import Drafter, TrainableDrafter
from draftsmith.heads.draft_tree import Draft
from draftsmith.heads.model_config import context_limit
from draftsmith.heads.ngram import Hybrid
from draftsmith.provenance import model_fingerprint
from draftsmith.reading import LARGEST_YAML, parse_yaml, read_text
from draftsmith.storage import write_json

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
ANY = "*"
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Draft lengths at which rounds are timed: all of them for the target, which also reads trees and copies, and for each
drafter those that it reaches."""
ALONE = ("", 0)
Timed = dict[tuple[str, int], list[Round]]
"""Rounds by drafter and draft length."""
ROUNDS, TURNS = 5, 8
"""Rounds that are timed in a row, and turns over all lengths, whose differences give the error of the seconds."""
ROOM = 5
"""Tokens of the prefill and of two rounds with a draft token each, of which the first is a warm-up."""


class DrafterSeconds(BaseModel):
    """Seconds that one drafter adds to a round."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    draft: dict[Count, Annotated[dict[Count, NotNegative], Field(min_length=1)]] = Field(min_length=1)
    round: dict[Count, NotNegative] = {1: 0.0}


class CostModel(BaseModel):
    """A profile, as described above."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = ""
    alone: Annotated[dict[Count, Seconds], Field(min_length=1)]
    verify: Annotated[dict[Count, Annotated[dict[Count, Seconds], Field(min_length=1)]], Field(min_length=1)]
    drafters: dict[str, DrafterSeconds] = {}
    repeats: tuple["CostModel", ...] = ()
    """Profiles of single turns over all lengths; the seconds above are means over all turns."""

    def token_seconds(self, batch: int) -> float:
        """Return the seconds in which the target alone decodes one token of each of `batch` texts."""
        return interpolated(self.alone, batch)

    def verify_seconds(self, width: float, batch: int) -> float:
        """Return the seconds of a target forward pass over `width` tokens of each of `batch` texts."""
        return _at(self.verify, batch, width)

    def round_seconds(self, drafter: str, nodes: float, passes: float, batch: int) -> float:
        """Return the seconds of a round that verifies `nodes` draft tokens per text after `passes` drafter passes."""
        own = self.of(drafter)
        seconds = self.verify_seconds(nodes + 1, batch)
        if own is None:
            return seconds
        # Noise may make the extrapolation beyond the longest timed draft negative.
        drafting = max(_at(own.draft, batch, passes), 0.0) if passes else 0.0
        return seconds + interpolated(own.round, batch) + drafting

    def of(self, drafter: str) -> DrafterSeconds | None:
        """Return the seconds of a drafter; None if the profile has none."""
        return self.drafters.get(drafter, self.drafters.get(ANY))

    def require(self, drafters: dict[str, Drafter]) -> None:
        """Raise ConfigError unless the profile has the seconds of every drafter with logits."""
        for name, drafter in drafters.items():
            if not drafter.only_retrieves and self.of(name) is None:
                known = ", ".join(self.drafters) or "none"
                raise ConfigError(f"profile has no drafters.{name}; expected its seconds, or `*` (there are: {known})")

    def save(self, path: Path) -> None:
        write_json(path, self.model_dump(mode="json"))

    @classmethod
    def load(cls, path: Path) -> "CostModel":
        """Read a profile; ConfigError naming the first invalid key."""
        try:
            values = parse_yaml(read_text(path, LARGEST_YAML))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"profile={path} cannot be read ({reason_of(error, whole=True)}); expected YAML or JSON"
            ) from error
        if not isinstance(values, dict):
            raise ConfigError(f"profile={path} holds {type(values).__name__}; expected keys alone, verify and drafters")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"{_problem(error)} (profile {path})") from error


def _problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"] if part != "[key]")
    if problem["type"] == "missing":
        return f"{key} is missing; expected seconds"
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key}; expected name, alone, verify or drafters, with draft and round in a drafter"
    expected = problem["msg"].removeprefix("Input should be ")
    return f"{key}={problem['input']!r}; expected {expected}"


def _at(curves: dict[int, dict[int, float]], batch: int, width: float) -> float:
    """Interpolate over the width at every batch size, then over the batch size."""
    return interpolated({size: interpolated(curve, width) for size, curve in curves.items()}, batch)


class _Fixed(Drafter):
    """Proposes token 0 at no cost: its rounds cost as much as the target's forward pass."""

    type = "fixed"
    only_retrieves = True

    def __init__(self, draft_length: int) -> None:
        super().__init__()
        self.max_draft_length = self._draft_length = draft_length

    def retrieve(self, row: int, room: int) -> Draft | None:
        return Draft.chain([0] * min(self._draft_length, room))


def pass_costs(target: PreTrainedModel, drafters: dict[str, Drafter]) -> dict[str, Costs]:
    """Return the costs by which passes are padded: of the target alone, by the key '', and with each timed drafter."""
    alone = measure_costs(target)
    # All passes use the same padding: measured separately, noise may change the padding of a width.
    timed = {name: _network(drafters[name]) for name in _timed_as(drafters).values()}
    return {"": alone} | {name: measure_costs(target, drafter, verify=alone.verify) for name, drafter in timed.items()}


def timeable(target: PreTrainedModel, texts: Sequence[TargetText]) -> list[TargetText]:
    """Return the texts that leave room in the target's context for the shortest rounds after their half.

    Raises:
        ConfigError: if there are none.
    """
    limit = context_limit(target.config)
    found = [text for text in texts if limit is None or len(_half(text)) + ROOM <= limit]
    if limit is not None and not found:
        shortest = min(text.prompt_length for text in texts)
        expected = f"one of at most {limit - 2 * ROOM}: timed rounds need room in the context of {limit}"
        raise ConfigError(f"prompts={shortest} tokens or more; expected {expected}")
    return found


def _half(text: TargetText) -> list[int]:
    """Return the text up to the middle of its continuation, after which rounds are timed."""
    return text.tokens[: (text.prompt_length + len(text.tokens) + 1) // 2]


def measure_hardware(
    target: PreTrainedModel,
    drafters: dict[str, Drafter],
    texts: Sequence[TargetText],
    costs: dict[str, Costs],
    *,
    draft_length: int,
    sampling: Sampling,
    batches: Sequence[int] = (1,),
    done: Callable[[], None] = lambda: None,
) -> CostModel:
    """Return the mean seconds of real rounds after real texts, on this machine with the current threads.

    Draft lengths are timed in turns, so that temporary slowdowns affect all of them alike; the means of each turn are
    the `repeats`. `verify` holds the target's pass with the rule for chosen tokens; `draft` holds the remaining seconds
    of a drafter's rounds. `texts`: from `timeable`. `costs`: from `pass_costs`. `done` is called after each of the
    `turns`.
    """
    arms: dict[tuple[str, int], TimedVariant] = {ALONE: TimedVariant(target)}
    arms |= {("", length): TimedVariant(target, _Fixed(length), length, costs[""]) for length in LENGTHS}
    timed_as = _timed_as(drafters)
    for name in dict.fromkeys(timed_as.values()):
        drafter = _network(drafters[name])
        longest = min(draft_length, drafter.max_draft_length or draft_length)
        reached = [length for length in LENGTHS if length <= longest]
        arms |= {(name, length): TimedVariant(target, drafter, length, costs[name]) for length in reached}
    of_batch = {batch: _timed(arms, texts, batch, sampling, done) for batch in batches}
    together = {
        b: {arm: [record for turn in timed for record in turn[arm]] for arm in arms} for b, timed in of_batch.items()
    }
    hardware = _profile(_means(together, timed_as))
    hardware.require(drafters)
    repeats = [_profile(_means({b: timed[turn] for b, timed in of_batch.items()}, timed_as)) for turn in range(TURNS)]
    known = [repeat for repeat in repeats if repeat.drafters.keys() == hardware.drafters.keys()]
    return hardware.model_copy(update={"name": "measured", "repeats": tuple(known)})


def _network(drafter: Drafter) -> Drafter:
    """Return what computes: a hybrid's drafter, since rounds of copies cost only the target's pass."""
    return drafter.drafter if isinstance(drafter, Hybrid) else drafter


def _timed_as(drafters: dict[str, Drafter]) -> dict[str, str]:
    """Return for each drafter that computes the first one with the same network, whose rounds are timed for both."""
    first: dict[str, str] = {}
    found = {}
    for name, drafter in drafters.items():
        if drafter.only_retrieves:
            continue
        network = _network(drafter)
        same = str(id(network))
        if isinstance(network, TrainableDrafter):
            same = f"{network.type} {network.config()} {model_fingerprint(network)}"
        found[name] = first.setdefault(same, name)
    return found


def turns(batches: Sequence[int]) -> int:
    """Return the number of turns over all lengths in `measure_hardware`."""
    return len(batches) * (TURNS + 1)


def _means(rounds: dict[int, Timed], timed_as: dict[str, str]) -> dict[str, Any]:
    """Return the mean seconds at each batch size: of the target's passes, and of each drafter's whole rounds.

    `timed_as`: by drafter, the one whose rounds were timed.

    Other processes interrupt at a rate per second: medians of short passes would never include interruptions, medians
    of long passes always, and so would medians of turns, in which the target alone is timed most often. Means grow by
    the same share as the time of whole texts.
    """
    alone, verify = {}, {}
    whole: dict[str, dict[int, dict[int, float]]] = {name: {} for name in timed_as}
    for batch, timed in rounds.items():
        alone[batch] = fmean(record.seconds for record in timed[ALONE])
        verify[batch] = {n + 1: fmean(r.verify_seconds for r in timed["", n]) for n in LENGTHS if timed["", n]}
        verify[batch][1] = fmean(record.verify_seconds for record in timed[ALONE])
        for name, entry in whole.items():
            owner = timed_as[name]
            mine = {
                length: records for (timed_name, length), records in timed.items() if timed_name == owner and records
            }
            if mine:
                entry[batch] = {n: fmean(r.seconds for r in records) for n, records in mine.items()}
    return {"alone": alone, "verify": verify, "whole": {name: entry for name, entry in whole.items() if entry}}


def _profile(means: dict[str, Any]) -> CostModel:
    """Return the profile in which a round of every timed draft length costs its mean.

    The seconds of a round in addition to the target's pass grow with the draft: sampled tokens need a more expensive
    rule, and hidden states are transferred. Therefore all of them count as `draft`, and `round` is 0.
    """
    verify = means["verify"]
    drafters = {
        name: DrafterSeconds(
            draft={
                batch: {n: max(seconds - verify[batch][n + 1], 0.0) for n, seconds in curve.items()}
                for batch, curve in whole.items()
            }
        )
        for name, whole in means["whole"].items()
    }
    return CostModel(alone=means["alone"], verify=verify, drafters=drafters)


@dataclass(frozen=True)
class TimedVariant:
    """The target alone, or a drafter with chains of one length, whose rounds are timed."""

    target: PreTrainedModel
    drafter: Drafter | None = None
    draft_length: int = 0
    costs: Costs | None = None
    """Costs that determine to which widths passes are padded, as in the decoder."""

    @torch.inference_mode()
    def rounds(self, texts: Sequence[TargetText], sampling: Sampling, seed: int) -> list[Round]:
        """Time a few rounds after half of each text, at an average context length; the first is a warm-up.

        Returns only rounds with the full draft length: none if the context does not hold such a draft.
        """
        target = TransformersTarget(self.target)
        target.widths = {} if self.costs is None else self.costs.verify_widths
        widths = None if self.costs is None else self.costs.draft_widths
        rows = []
        for number, text in enumerate(texts):
            half = _half(text)
            most = len(half) + (ROUNDS + 2) * (self.draft_length + 2)
            longest = most if target.context_limit is None else min(most, target.context_limit)
            rows.append(DecodeSequence(half, longest, SeededRng(seed + number), source=text.source, number=number))
        processors, policy = Processors(sampling, texts=len(rows)), Chain(max(self.draft_length, 1))
        decoding = DecodeLoop(target, self.drafter, policy, rows, processors, None, widths)
        records = []
        with closing(target), closing(decoding):
            decoding.prefill()
            while len(records) <= ROUNDS and len(decoding.texts) == len(rows):
                records.append(decoding.round()[0][2])
        return [record for record in records[1:] or records if record.drafted == self.draft_length]


def _timed(
    arms: dict[tuple[str, int], TimedVariant],
    texts: Sequence[TargetText],
    batch: int,
    sampling: Sampling,
    done: Callable[[], None],
) -> list[Timed]:
    """Return the rounds of every variant in each turn except the first, which allocates memory and chooses kernels.

    The target alone is timed repeatedly in each turn, since every speedup is relative to it. Each turn begins with
    another variant and uses other texts.
    """
    turns: list[Timed] = []
    others = [key for key in arms if key != ALONE]
    for turn in range(TURNS + 1):
        timed: Timed = {key: [] for key in arms}
        first = turn * len(others) // (TURNS + 1)
        together = [texts[(turn * batch + row) % len(texts)] for row in range(batch)]
        for place, key in enumerate([*others[first:], *others[:first]]):
            for variant in (ALONE, key) if place % 4 == 0 else (key,):
                timed[variant] += arms[variant].rounds(together, sampling, turn)
        turns.append(timed)
        done()
    return turns[1:]
