"""Seconds of real rounds on this machine, as a profile."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.costs import Costs
from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.passes.plan import Plan
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.decode.policies import Chain, Policy
from draftsmith.decode.profiling import measure_costs
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.sequence import DecodeSequence, Round
from draftsmith.decode.target import TransformersTarget
from draftsmith.errors import ConfigError
from draftsmith.eval.forecast.profile import TARGET, Profile, require_known
from draftsmith.eval.teacher_forced import TargetText
from draftsmith.heads.base import Context, Drafter
from draftsmith.heads.draft_tree import Draft
from draftsmith.heads.model_config import context_limit
from draftsmith.heads.retrieval import Hybrid
from draftsmith.terminal import stage

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Draft lengths at which rounds are timed: all of them for the target, which also reads trees and retrieved drafts, and
for each drafter those that it reaches."""
ArmKey = tuple[str, int | str]
"""A drafter and a draft length of its chains, or another of its policies by name."""
ALONE: ArmKey = ("", 0)
ArmRounds = dict[ArmKey, list[Round]]
"""The timed rounds of each arm."""
ROUNDS, TURNS = 5, 8
"""Rounds that are timed in a row, and turns over all lengths, whose differences give the error of the seconds."""
ROOM = 5
"""Tokens of the prefill and of two rounds with a draft token each, of which the first is a warm-up."""


class _Fixed(Drafter):
    """Proposes tokens of the text at no cost: its rounds cost as much as the target's forward pass.

    Mixtures of experts read more weights for different tokens than for equal ones.
    """

    type = "fixed"
    only_retrieves = True

    def __init__(self, draft_length: int) -> None:
        super().__init__()
        self.max_draft_length = self._draft_length = draft_length

    def start(self, context: Context) -> None:
        super().start(context)
        self._drafted = 0

    def retrieve(self, row: int, room: int) -> Draft | None:
        tokens, first = self.context.sequences[row].tokens, self._drafted
        self._drafted += min(self._draft_length, room)  # other tokens in each round
        return Draft.chain([tokens[index % len(tokens)] for index in range(first, self._drafted)])


def pass_costs(
    target: PreTrainedModel,
    drafters: dict[str, Drafter],
    prompt: Sequence[int] = (),
) -> dict[str, Costs]:
    """Return the costs from which the decoder chooses the widths of passes: by drafter, and of the target alone.

    `prompt`: tokens that the timed passes read.
    """
    alone = measure_costs(target, text=prompt)
    # All passes use the same padding: measured separately, noise may change the padding of a width.
    options: dict[str, Any] = {"verify": alone.verify, "text": prompt}
    return {TARGET: alone} | {name: measure_costs(target, one, **options) for name, one in _computing(drafters).items()}


def _computing(drafters: dict[str, Drafter]) -> dict[str, Drafter]:
    """Return the drafters to time: of a hybrid the one that computes, since retrieval takes no passes of its own."""
    networks = {name: one.drafter if isinstance(one, Hybrid) else one for name, one in drafters.items()}
    return {name: network for name, network in networks.items() if not network.only_retrieves}


def timeable(target: PreTrainedModel, texts: Sequence[TargetText]) -> list[TargetText]:
    """Return the texts after whose middle the target's context has room for the shortest rounds.

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
    policies: Mapping[str, Sequence[Policy]] = {},
    shown: str = "",
) -> Profile:
    """Return the mean seconds of real rounds after real texts, on this machine with the current threads.

    Draft lengths are timed in turns, so that temporary slowdowns affect all of them alike; the means of each turn are
    the `repeats`. `verify` holds the target's pass with the rule for chosen tokens; `chains` holds the remaining
    seconds of a drafter's rounds. `texts`: from `timeable`. `costs`: from `pass_costs`. `policies`: by drafter,
    those besides chains whose rounds are timed. `shown`: name of the stage that is shown on stderr.
    """
    drafters = _computing(drafters)
    arms = _arms(target, drafters, costs, draft_length, policies)
    with stage(shown, len(batches) * (TURNS + 1) * (len(arms) - 1), shown=bool(shown)) as done:
        of_batch = {batch: _timed(arms, texts, batch, sampling, done) for batch in batches}
    together = {
        b: {key: [record for turn in timed for record in turn[key]] for key in arms} for b, timed in of_batch.items()
    }
    profile = profile_of(together)
    require_known(profile, drafters)
    turns = [profile_of({b: timed[turn] for b, timed in of_batch.items()}) for turn in range(TURNS)]
    known = [turn for turn in turns if turn.keys() == profile.keys()]
    return {
        name: replace(costs, name="measured", repeats=tuple(turn[name] for turn in known))
        for name, costs in profile.items()
    }


def _arms(
    target: PreTrainedModel,
    drafters: dict[str, Drafter],
    costs: dict[str, Costs],
    draft_length: int,
    policies: Mapping[str, Sequence[Policy]],
) -> dict[ArmKey, "TimedArm"]:
    """Return the timed arms: the target alone, its passes over drafts, and the rounds of each drafter."""
    arms: dict[ArmKey, TimedArm] = {ALONE: TimedArm(target)}
    arms |= {("", length): TimedArm(target, _Fixed(length), length, costs[TARGET]) for length in LENGTHS}
    for name, drafter in drafters.items():
        longest = min(draft_length, drafter.max_draft_length or draft_length)
        reached = [length for length in LENGTHS if length <= longest]
        arms |= {(name, length): TimedArm(target, drafter, length, costs[name]) for length in reached}
        for policy in policies.get(name, ()):
            arms[name, str(policy)] = TimedArm(target, drafter, policy.longest, costs[name], policy)
    return arms


def profile_of(rounds: dict[int, ArmRounds]) -> Profile:
    """Return the profile in which a round of every timed draft length, and of every other policy, costs its mean.

    `rounds`: of each arm, by batch size.

    Other processes interrupt at a rate per second: medians of short passes would never include interruptions, medians
    of long passes always, and so would medians of turns, in which the target alone is timed most often. Means grow by
    the same share as the time of whole texts. The seconds of a round in addition to the target's pass grow with the
    draft: sampled tokens need a more expensive rule, and hidden states are transferred. Therefore all of them count as
    `chains`, and `round` is 0.
    """
    alone = {batch: fmean(record.seconds for record in timed[ALONE]) for batch, timed in rounds.items()}
    verify = {
        batch: {1: fmean(r.verify_seconds for r in timed[ALONE])}
        | {n + 1: fmean(r.verify_seconds for r in timed["", n]) for n in LENGTHS if timed["", n]}
        for batch, timed in rounds.items()
    }
    target = Costs(verify, alone=alone)
    profile = {TARGET: target}
    for name in dict.fromkeys(name for timed in rounds.values() for name, _ in timed if name):
        chains = {
            batch: {
                n: max(fmean(r.seconds for r in records) - target.verify_seconds(n + 1, batch), 0.0)
                for (owner, n), records in timed.items()
                if owner == name and isinstance(n, int) and records
            }
            for batch, timed in rounds.items()
        }
        if any(chains.values()):
            own = replace(target, chains={batch: curve for batch, curve in chains.items() if curve})
            profile[name] = replace(own, policies=_beyond(rounds, name, own))
    return profile


def _beyond(rounds: dict[int, ArmRounds], drafter: str, costs: Costs) -> dict[str, dict[int, float]]:
    """Return by policy and batch size the seconds of its rounds beyond those of chains."""
    beyond: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for batch, arms in rounds.items():
        for (owner, policy), records in arms.items():
            if owner == drafter and isinstance(policy, str) and records:
                beyond[policy][batch] = fmean(
                    r.seconds - costs.round_seconds(r.drafted, r.depth, batch) for r in records
                )
    return beyond


ReadPrompts = dict[tuple[tuple[int, ...], bool], tuple[ModelRunner, Sequence[int], Tensor, Tensor, Tensor | None]]
"""The prompts that a target has read, for several decodings after them: the runner, the lengths, the last logits, the
states and the features, by the layers whose outputs are kept and whether passes are padded."""


def end(read: ReadPrompts) -> None:
    """Free the caches; other prompts may follow."""
    for runner, *_ in read.values():
        runner.close()
    read.clear()


class ReadOnce(TransformersTarget):
    """Reads the prompts once for several decodings after them, if the model's cache rolls back that far.

    Args:
        costs: determine to which widths passes are padded.
    """

    def __init__(self, model: PreTrainedModel, read: ReadPrompts, costs: Costs | None = None) -> None:
        widths = {} if costs is None else costs.verify_widths
        super().__init__(model, plan=Plan(widths=widths))
        self._read, self._is_padded = read, bool(widths)

    def prefill(self, sequences: Sequence[DecodeSequence], layers: tuple[int, ...] = ()) -> Tensor:
        key = (layers, self._is_padded)
        if key not in self._read or not self._read[key][0].rewind(self._read[key][1]):
            if key in self._read:
                self._read[key][0].close()
            logits_BV, runner = super().prefill(sequences, layers), self._runner
            self._read[key] = (runner, runner.lengths, logits_BV, runner.states, runner.features_BQF)
        self._runner, _, logits_BV, self._runner.states, self._runner.features_BQF = self._read[key]
        return logits_BV.clone()

    def close(self) -> None:
        """Do nothing: other decodings follow; see `end`."""


@dataclass(frozen=True)
class TimedArm:
    """The target alone, or a drafter with chains of one length or another policy, whose rounds are timed."""

    target: PreTrainedModel
    drafter: Drafter | None = None
    draft_length: int = 0
    costs: Costs | None = None
    """Costs that determine to which widths passes are padded, as in the decoder."""
    policy: Policy | None = None
    """Default: chains of `draft_length`."""

    @torch.inference_mode()
    def rounds(self, texts: Sequence[TargetText], sampling: Sampling, seed: int, read: ReadPrompts) -> list[Round]:
        """Time a few rounds after half of each text, at an average context length; the first is a warm-up.

        Returns only rounds with the full draft length: none if the context does not hold such a draft. `read`: shared
        with other arms of the same target and texts, which then read the prompts once.
        """
        target = ReadOnce(self.target, read, self.costs)
        widths = None if self.costs is None else self.costs.draft_widths
        rows = []
        for number, text in enumerate(texts):
            half = _half(text)
            most = len(half) + (ROUNDS + 2) * (max(self.draft_length, LENGTHS[-1]) + 2)
            longest = most if target.context_limit is None else min(most, target.context_limit)
            rows.append(DecodeSequence(half, longest, seed + number, source=text.source, number=number))
        processors, policy = Processors(sampling, sequences=len(rows)), self.policy or Chain(max(self.draft_length, 1))
        decoding = DecodeLoop(target, self.drafter, policy, rows, processors, None, widths)
        records = []
        with closing(decoding):
            decoding.prefill()
            while len(records) <= ROUNDS and len(decoding.sequences) == len(rows):
                has_room = min(row.room for row in rows) >= self.draft_length
                records.append((decoding.round()[0][2], has_room))
        return [record for record, has_room in records[1:] or records if has_room and self._is_whole(record)]

    def _is_whole(self, record: Round) -> bool:
        """Return whether the drafter's context did not cut the draft."""
        return record.drafted == self.draft_length if self.policy is None else record.drafted > 0


def _timed(
    arms: dict[ArmKey, TimedArm],
    texts: Sequence[TargetText],
    batch: int,
    sampling: Sampling,
    done: Callable[[], None],
) -> list[ArmRounds]:
    """Return the rounds of every arm in each turn except the first, which allocates memory and chooses kernels.

    The target alone is timed repeatedly in each turn, since every speedup is relative to it. Each turn begins with
    another arm and uses other texts, whose prompts all arms share. `done` is called after each arm.
    """
    turns: list[ArmRounds] = []
    others = [key for key in arms if key != ALONE]
    read: ReadPrompts = {}
    for turn in range(TURNS + 1):
        timed: ArmRounds = {key: [] for key in arms}
        first = turn * len(others) // (TURNS + 1)
        together = [texts[(turn * batch + row) % len(texts)] for row in range(batch)]
        for number, key in enumerate([*others[first:], *others[:first]]):
            for next_key in (ALONE, key) if number % 4 == 0 else (key,):
                timed[next_key] += arms[next_key].rounds(together, sampling, turn, read)
            done()
        end(read)
        turns.append(timed)
    return turns[1:]
