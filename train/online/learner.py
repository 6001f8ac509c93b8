"""`OnlineLearning`: trains a drafter on the states of its own verifications, and uses an update only if it is better.

decode ──▶ rows ──┬─▶ training rows ──▶ optimizer steps on a candidate ──┐
                  └─▶ held-back rows ──▶ candidate better? ◀─────────────┘
                                          │ yes: copied into the drafter, between two rounds
                                          └ no: rolled back, learning pauses
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.clock import now
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import TargetHead
from draftsmith.errors import ConfigError
from draftsmith.eval.teacher_forced import TargetText
from draftsmith.heads.base import FINAL, Drafter
from draftsmith.heads.checkpoint import save_drafter
from draftsmith.heads.lm_head import logits_head
from draftsmith.heads.recall import Recall
from draftsmith.storage import atomic_folder
from draftsmith.train.learning_rates import TRAINED, scaled_rate, width_of
from draftsmith.train.online.budget import Budget
from draftsmith.train.online.buffer import CONTEXT, ROW_TOKENS, OpenRow, Row, RowBuffer, States, rows_of
from draftsmith.train.online.candidate import Candidate, learnable
from draftsmith.train.online.judge import Scores, Verdict, judged, scores
from draftsmith.train.online.steps import Steps, blank_row
from draftsmith.train.online.update import Update
from draftsmith.train.online.watch import Watch

HELD_EVERY, HELD_ROWS = 4, 64
"""One text in four is held back, of long ones one block in four: rows of a text are alike. The newest rows decide."""
LEAST_ROWS, LEAST_BLOCKS = 8, 4
"""Held-back rows, and texts or blocks of long ones, that a decision needs."""
LONGEST_INTERVAL = 2
"""Most steps between two comparisons, in units of those before the first."""
LONGEST_PAUSE = 8
"""Longest pause, in units of the learning before it."""


class OnlineLearning:
    """Learning while decoding, for `SpeculativeDecoder(target, drafter, learn=OnlineLearning())`.

    Decoding stays lossless: weights change between rounds only. No text is written to disk.

    Args:
        share: largest share of the wall time that learning takes; less until an update was adopted, see `Budget`.
        every: decoded tokens per optimizer step, instead of a share of the time: then no clock is read, and the same
            requests with the same seed give the same updates and texts.
        seed: of the rows of each step, the objective's random positions and the intervals.
        buffer_bytes: memory of the stored states.
        objective: default: KL(p || q) as in recipes.
        optimizer, learning_rate: default: Muon at the rate for drafters with trained weights.
        recall: also draft from texts that were decoded before, where such drafts are accepted more often, see `Recall`.
        lora_rank: for draft models: train adapters of this rank only; their product is added to the weights in use.
        batch_rows: rows of a step.
        judge_every: steps before a candidate is compared with the drafter in use for the first time; the next
            comparisons come after twice as many. After fewer steps, its running average is close to where it began.
        patience: undecided comparisons in a row, none with a larger gain than before, after which a candidate is
            refused.
        on_update: called after each `Update`.
    """

    def __init__(
        self,
        *,
        share: float = 0.1,
        every: int | None = None,
        seed: int = 0,
        buffer_bytes: int = 256 * 2**20,
        objective: Objective | None = None,
        optimizer: Literal["muon", "adamw"] = "muon",
        learning_rate: float | None = None,
        recall: bool = True,
        lora_rank: int | None = None,
        batch_rows: int = 8,
        judge_every: int = 48,
        patience: int = 4,
        on_update: Callable[[Update], None] = lambda _: None,
    ) -> None:
        if not 0 < share < 1:
            raise ConfigError.of("share", share, "a number between 0 and 1")
        counts = {"every": every, "buffer_bytes": buffer_bytes, "lora_rank": lora_rank, "batch_rows": batch_rows}
        for key, value in {**counts, "judge_every": judge_every, "patience": patience}.items():
            if value is not None and value < 1:
                raise ConfigError.of(key, value, ">= 1")
        if optimizer not in ("muon", "adamw"):
            raise ConfigError.of("optimizer", optimizer, "'muon' or 'adamw'")
        if learning_rate is not None and not learning_rate > 0:
            raise ConfigError.of("learning_rate", learning_rate, "> 0")
        self.every, self.seed, self._budget = every, seed, Budget(share, every)
        self.batch_rows, self.judge_every, self.patience = batch_rows, judge_every, patience
        self._objective, self._rate, self._lora_rank = objective, learning_rate, lora_rank
        self._optimizer: Literal["muon", "adamw"] = optimizer
        self._recalls, self._recall = recall, cast(Recall | None, None)
        self._rows, self._held = RowBuffer(buffer_bytes * 3 // 4), RowBuffer(buffer_bytes // 4, HELD_ROWS)
        self._on_update, self._candidate = on_update, cast(Candidate | None, None)
        self._open: dict[int, OpenRow] = {}
        self.updates: list[Update] = []
        self.tokens = self.steps = self.adopted = self.refused = 0
        self.seconds = 0.0
        """Time that learning has taken since requests are served."""
        self._random = Random(seed)
        self._texts = self._judgements = self._pauses = 0
        self._asleep_until, self._awake_since = 0, 0
        self._mark, self._watch = 0.0, Watch()
        self._served_scores: dict[Row, np.ndarray] = {}

    # What the decoder calls; see `draftsmith.decode.observer`.

    def attach(self, target: PreTrainedModel, drafter: Drafter | None) -> Drafter:
        """Prepare a candidate for this pair, and return the drafter with a memory of decoded texts.

        Raises:
            ConfigError: for a drafter that cannot be trained from stored states, by its type; for a second pair.
        """
        if self._candidate is not None:
            raise ConfigError("learn: this OnlineLearning is used by another decoder; expected one for each decoder")
        served = learnable(drafter, target.config.get_text_config(decoder=True).vocab_size)
        self._device = next(target.parameters()).device
        self._draft_length = served.draft_length_hint or served.max_draft_length or 4
        objective = self._objective or Objective(draft_length=self._draft_length, chunk_tokens=1024)
        peak = self._rate or scaled_rate(TRAINED, self._optimizer, width_of(target.config))
        # Heads on one state need no text before it; draft models and networks attend to it.
        self._context = 0 if served.needs.hidden and not served.needs.layers else CONTEXT
        self._final = served.needs.layers == (FINAL,)
        self._lm_head = cast(TargetHead, logits_head(target))
        with torch.inference_mode(False):
            self._candidate = Candidate(served, target, self._lora_rank, self.seed)
            self._steps = Steps(self._candidate, self._lm_head, objective, self._optimizer, peak)
        learned = served.online or {}
        self.tokens, self.steps = learned.get("tokens", 0), learned.get("steps", 0)
        self.adopted, self.refused = learned.get("adopted", 0), learned.get("refused", 0)
        self._awake_since = self.tokens
        self._begin_judging()
        if self.every is None:
            self._expect(blank_row(served, target, self._lm_head, self._context))
        self._mark = now(self._device)
        assert drafter is not None, "learnable"
        self._recall = Recall.of(drafter) if self._recalls else None
        return drafter if self._recall is None else self._recall

    def begin(self, texts: Sequence[DecodeSequence], sampling: Sampling) -> None:
        """Open a row for each text; texts of the last call have ended."""
        self._close(all_of_them=True)
        numbered = enumerate(texts, self._texts)
        self._open = {id(text): OpenRow(text, sampling, self._context, self._final, n) for n, text in numbered}
        self._texts += len(texts)
        self._mark = now(self._device)

    def read(self, text: DecodeSequence, hidden_nH: Tensor, features_nF: Tensor | None) -> None:
        """Store the states of the tokens that the target has just read."""
        self.tokens += len(hidden_nH)
        self._open[id(text)].add(hidden_nH, features_nF)

    def between_rounds(self) -> None:
        """Train and judge within the budget."""
        started = now(self._device)
        self._budget.decoded(started - self._mark)
        self._close()
        if self._owed():
            with torch.inference_mode(False), torch.enable_grad():
                self._work()
                while self.every is not None and self._owed():  # by the clock, the caller waits for tokens
                    self._work()
        self._mark = now(self._device)
        self.seconds += self._mark - started

    # Texts that were decoded elsewhere.

    def rows_of(self, text: TargetText, states: States, sampling: Sampling, number: int) -> Iterator[Row]:
        """Divide a text, whose states are known, into rows for `learn_from`; the number tells it from other texts."""
        return rows_of(text, states, sampling, self._context, self._final, number)

    def learn_from(self, row: Row, *, held: bool) -> None:
        """Store a row, held back or to be trained on, and train and judge as often as `every` says."""
        self.tokens += len(row.text.tokens) - row.text.prompt_length
        (self._held if held else self._rows).add(row)
        self.between_rounds()

    def scores_of(self, rows: Sequence[Row]) -> Scores:
        """Return what the drafter in use commits on rows, see `judge.scores`."""
        assert self._candidate is not None, "attached"
        return scores(self._candidate.served, rows, self._lm_head, self._draft_length)

    # Budget.

    def _expect(self, row: Row) -> None:
        """Measure a step on half of its rows, so that the first one, which is at most twice as long, is bounded too."""
        rows = -(-self.batch_rows // 2)
        with torch.inference_mode(False), torch.enable_grad(), self._seeded():
            self._budget.expect(self._steps.seconds(row, rows) * self.batch_rows / rows)

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """For drafters that unroll at random anchors; the state of the global generator is restored."""
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            torch.manual_seed(self.seed * 1_000_003 + self.steps)
            yield

    def _owed(self) -> bool:
        """Return whether the next optimizer step is due."""
        if self.tokens < self._asleep_until and not self._watch.fallen():
            ready = False
        else:
            self._wake()
            blocks = len({row.block for row in self._held})
            ready = min(len(self._rows), len(self._held)) >= LEAST_ROWS and blocks >= LEAST_BLOCKS
        if self._asleep_until or (not ready and self.every is not None):
            self._budget.start(self.tokens)
        return ready and self._budget.owes(self.tokens, judgement=self._unjudged >= self._interval)

    def _wake(self) -> None:
        if not self._asleep_until:
            return
        if self.tokens < self._asleep_until:
            self._budget.forget()
            self._pauses = 0
            self._record(Update("resumed", self.tokens, self.steps, reason="the acceptance length has fallen"))
        else:
            self._record(Update("resumed", self.tokens, self.steps))
        self._asleep_until, self._awake_since = 0, self.tokens
        self._budget.start(self.tokens)

    def _pause(self, reason: str) -> None:
        """Stop learning for as many tokens as the learning before took, twice as long each time in a row."""
        length = max(self.tokens - self._awake_since, 1) * min(2**self._pauses, LONGEST_PAUSE)
        self._pauses += 1
        self._asleep_until = self.tokens + length
        self._watch.pause()
        self._record(Update("paused", self.tokens, self.steps, reason=f"{reason}; for {length} tokens"))

    def _record(self, update: Update) -> None:
        self.updates.append(update)
        self._on_update(update)

    # Rows.

    def _close(self, *, all_of_them: bool = False) -> None:
        """Move rows that are long enough, or whose text has ended, to the training or the held-back rows."""
        for key, one in list(self._open.items()):
            ended = all_of_them or one.sequence.stopped_by is not None
            if not ended and one.decoded < ROW_TOKENS:
                continue
            row = one.close()
            if ended:
                self._watch.add(one.committed, one.reads - 1)
                del self._open[key]
            if row is not None:
                (self._held if sum(row.block) % HELD_EVERY == HELD_EVERY - 1 else self._rows).add(row)

    # Training.

    def _work(self) -> None:
        """Take an optimizer step or compare the candidate, which costs as much as many steps: less and less often."""
        started, compares = now(self._device), self._unjudged >= self._interval
        if compares:
            self._unjudged, self._interval = 0, min(2 * self._interval, LONGEST_INTERVAL * self.judge_every)
            with self._seeded():
                self._judge()
            self._budget.judged(now(self._device) - started)
            return
        places = self._random.sample(range(len(self._rows)), min(self.batch_rows, len(self._rows)))
        with self._seeded():
            finite = self._steps([self._rows[place] for place in places])
        self._unjudged += 1
        self.steps += 1
        self._budget.learned(now(self._device) - started)
        if not finite:
            self._refuse(None, "the loss or its gradient is not finite")

    def _begin_judging(self) -> None:
        self._unjudged = self._undecided = 0
        self._best, self._interval = 0.0, self.judge_every

    # Judging.

    def _judge(self) -> None:
        """Adopt the candidate if it is better on the held-back rows, refuse it if it is not; else keep training it."""
        assert self._candidate is not None
        rows = list(self._held)
        new = [row for row in rows if row not in self._served_scores]
        found = scores(self._candidate.served, new, self._lm_head, self._draft_length)
        known = {**self._served_scores, **dict(zip(new, found, strict=True))}
        self._served_scores = {row: known[row] for row in rows}
        own = np.stack(list(self._served_scores.values()))
        other = scores(self._candidate.drafter.eval(), rows, self._lm_head, self._draft_length)
        self._judgements += 1
        adopted = self.adopted
        self._weigh(judged(own, other, [row.block for row in rows], self.seed + self._judgements))
        if self.adopted > adopted:
            self._served_scores = dict(zip(rows, other, strict=True))

    def _weigh(self, verdict: Verdict) -> None:
        low, high = verdict.interval
        self._undecided = 0 if verdict.gain > self._best else self._undecided + 1
        self._best = max(self._best, verdict.gain)
        if low > 0:
            self._adopt(verdict)
        elif high < 0:
            self._refuse(verdict, "")
        elif self._undecided >= self.patience:
            self._refuse(verdict, "no clear gain")

    def _adopt(self, verdict: Verdict) -> None:
        assert self._candidate is not None
        self._candidate.adopt()
        self.adopted += 1
        self._pauses, self._undecided, self._best = 0, 0, 0.0
        effective = verdict if self._recall is None else verdict.diluted(self._recall.drafted_share)
        pays, cost = self._budget.pays(effective.gain, self.tokens), self._budget.cost()
        self._budget.adopted(effective, self.tokens)
        self._record(Update("adopted", self.tokens, self.steps, verdict))
        if not pays:
            self._pause(f"a gain of {verdict.gain:.1%} for {cost:.1%} of the time does not pay")
        self._awake_since = self.tokens

    def _refuse(self, verdict: Verdict | None, reason: str) -> None:
        assert self._candidate is not None
        self._candidate.roll_back()
        self.refused += 1
        self._steps.restart()
        self._begin_judging()
        self._record(Update("refused", self.tokens, self.steps, verdict, reason))
        self._pause("the last candidate was not better")

    # Results.

    @property
    def recalled(self) -> int:
        """Rounds whose draft came from the memory of decoded texts."""
        return 0 if self._recall is None else self._recall.recalled

    @property
    def provenance(self) -> dict[str, int]:
        """Numbers that a saved drafter carries; no text is among them."""
        return {"tokens": self.tokens, "steps": self.steps, "adopted": self.adopted, "refused": self.refused}

    def summary(self) -> str:
        """Return one line on what was learned."""
        asleep = ", paused" if self.tokens < self._asleep_until else ""
        recall = self._recall
        recalled = f"; {recall.recalled} of {recall.rounds} drafts from memory" if recall and recall.rounds else ""
        return (
            f"learned from {self.tokens} tokens: {self.steps} steps, {self.adopted} updates adopted, "
            f"{self.refused} refused{asleep}{recalled}"
        )

    def save(
        self,
        folder: Path,
        target: dict[str, Any],
        tokenizer: PreTrainedTokenizerBase | None = None,
        recipe: dict[str, Any] | None = None,
    ) -> None:
        """Atomically write the drafter in use as a checkpoint, with `provenance`.

        A later run that loads it continues to count; a candidate that was not adopted is lost.

        Args:
            target: from `describe_target`.
            recipe: of the checkpoint that the drafter was loaded from.
        """
        assert self._candidate is not None, "a decoder has attached it"
        drafter = self._candidate.served
        with atomic_folder(folder) as temporary:
            save_drafter(
                drafter,
                temporary,
                target=target,
                recipe=recipe,
                draft_length=self._draft_length,
                tokenizer=tokenizer,
                online=self.provenance,
            )
