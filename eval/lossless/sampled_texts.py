"""Sample texts with the decoder's rule and with a control, and test both against the target's distribution.

The control is a deliberately lossy rule: a check that does not detect it has no power.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.drafts.batch import DraftBatch
from draftsmith.decode.draws import Draws
from draftsmith.decode.rules import RULES, Rule, VerifyBatch
from draftsmith.decode.rules.outcome import Decided, VerifyResult
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.sequence import DecodeOutput
from draftsmith.decode.verification import verify
from draftsmith.errors import ConfigError
from draftsmith.eval.lossless.hypotheses import (
    ALL_TOKENS,
    JOINT,
    RuleSample,
    SamplingCheck,
    String,
    Terms,
    apply_tests,
    chi_square,
    judged,
)
from draftsmith.eval.lossless.probabilities import DEPTH, SampledTarget, transform
from draftsmith.eval.prompts import Prompt
from draftsmith.heads.draft_tree import ROOT, Draft
from draftsmith.heads.model_config import context_limit

# Shapes: B texts of one prompt, T tokens of each, N tokens, P positions of a draft, V vocabulary.

SHARE = 0.5
"""Share of rounds in which the control verifies wrongly: a rule that is half right is harder to detect."""
GRID = 4
"""Pairs of u are counted in 4 x 4 cells."""
PLACES = tuple(f"  after {number} accepted" for number in (0, 1, 2, 3, "4 or more"))
"""Positions of a round that are tested separately."""
AT_ONCE = 2**20
"""Largest number of entries of a table over the vocabulary that are transformed at once."""
BATCH = 64
TEXT_TOKENS = 64
OPEN_TOKENS = 16
"""Most tokens of the prompt of short continuations."""
TOLERANCE_TEXTS = 8
"""Texts that are also read token by token, to measure the rounding of p."""
SEEDS = 10_000_000
"""Distance between the seeds of runs: neighbouring seeds share no random numbers."""
Done = Callable[[int], None]


def lossy(rule: Rule | None, seed: int = 0) -> VerifyBatch:
    """Return `rule` with typical acceptance, which is lossy, in half of all rounds."""
    coin = torch.Generator().manual_seed(seed)

    def verify_wrongly(p_BPV: Tensor, draft: DraftBatch, draws: Draws) -> Decided:
        wrong = torch.rand((), generator=coin) < SHARE
        return verify(RULES["typical"] if wrong else rule, p_BPV, draft, draws)

    return verify_wrongly


@dataclass(frozen=True)
class SamplingJob:
    """Settings of one sampling job: prompts, sampling settings, number of tokens, and seed."""

    prompts: list[Prompt]
    sampling: Sampling
    tokens: int
    seed: int

    @property
    def continuations(self) -> int:
        """Number of draws of the chi-squared test."""
        return max(200, self.tokens // 6)

    @property
    def work(self) -> int:
        """Tokens that `draw_texts` and `draw_continuations` report as done."""
        return self.tokens + DEPTH * self.continuations

    def settings(self, tokens: int) -> dict[str, Any]:
        """Return arguments of `generate_batch`, without EOS: the number of tokens must not depend on the tokens."""
        cuts = {"top_k": self.sampling.top_k, "top_p": self.sampling.top_p}
        return {"temperature": self.sampling.temperature, **cuts, "max_new_tokens": tokens, "eos_token_id": None}


def check_sampling(
    target: PreTrainedModel, decoder: SpeculativeDecoder, job: SamplingJob, level: float, done: Done
) -> SamplingCheck:
    """Sample with the decoder's rule and with the control, and apply the same tests to both."""
    honest = sample(target, decoder, job, level, done)
    control = sample(target, decoder, replace(job, seed=job.seed + 1), level, done, lossy(decoder.rule))
    return judged(honest, control, level, lossless=decoder.lossless)


def sample(
    target: PreTrainedModel,
    decoder: SpeculativeDecoder,
    job: SamplingJob,
    level: float,
    done: Done,
    change: VerifyBatch | None = None,
) -> RuleSample:
    """Sample with the decoder's rule, or with `change` instead, and apply every test."""
    rule, p = decoder.rule, SampledTarget(target, job.sampling)
    watch = Watch(rule, job.seed)
    decoder.rule = watch.watched(change)
    try:
        texts = draw_texts(p, decoder, job, done)
        prompt, continuations = draw_continuations(p, decoder, job, done)
    finally:
        decoder.rule = rule
    u_N, by_place, tolerance = torch.cat(texts.u), watch.by_place(), texts.tolerance
    # Relative to the p that the rule received: without rounding differences.
    watched = {"drafted rounds, by q/p": torch.cat(by_place)} | dict(zip(PLACES, by_place, strict=True))
    uniform = {ALL_TOKENS: (u_N, tolerance)} | {name: (u, 0.0) for name, u in watched.items()}
    pairs_n2 = torch.cat(texts.pairs)
    summed = {"first two of a round": (_independence(pairs_n2, tolerance), len(pairs_n2))}
    summed[JOINT] = p.compared(prompt, continuations), len(continuations)
    return apply_tests(level, len(u_N), uniform, summed, texts.impossible, tolerance, texts.drafted)


def _independence(pairs_n2: Tensor, tolerance: float) -> Terms:
    """Return the statistic of pairs of u, counted in a grid.

    Rounding moves up to 2 `tolerance` of probability between cells: at worst from one cell to another, a noncentrality
    of 2 n (2 tolerance)^2 GRID^2.
    """
    cells = (pairs_n2 * GRID).long().clamp(0, GRID - 1)
    counts = torch.bincount(cells[:, 0] * GRID + cells[:, 1], minlength=GRID**2).double()
    shift = 8 * len(pairs_n2) * (tolerance * GRID) ** 2
    return *chi_square(counts, torch.full_like(counts, len(pairs_n2) / GRID**2)), shift


@dataclass(eq=False)
class Texts:
    """Numbers of the texts of one rule: u of every token in order of falling p, and counts."""

    u: list[Tensor] = field(default_factory=list)
    pairs: list[Tensor] = field(default_factory=list)
    impossible: int = 0
    """Tokens to which the target assigns probability 0."""
    drafted: int = 0
    tolerance: float = 0.0
    """Mean total variation between p read in one pass and p read token by token."""

    def add(self, target: SampledTarget, prompt: Prompt, outputs: list[DecodeOutput], v: torch.Generator) -> None:
        """Add texts of one prompt, which are of one length, transformed by the target's p."""
        strings, length = [tuple(output.tokens) for output in outputs], len(outputs[0].tokens)
        if not self.u:
            self.tolerance = target.rounding(prompt, strings[:TOLERANCE_TEXTS], length)
        u, impossible = target.transformed(prompt, strings, length, v)
        self.u += u
        self.pairs += map(pairs, u, outputs)
        self.impossible += impossible
        self.drafted += sum(record.drafted for output in outputs for record in output.rounds)


def draw_texts(target: SampledTarget, decoder: SpeculativeDecoder, job: SamplingJob, done: Done) -> Texts:
    """Sample at least `job.tokens` tokens in texts of up to 64, cycling through the prompts, and transform them."""
    texts, v = Texts(), torch.Generator().manual_seed(job.seed)
    jobs = _jobs(target.model, job)
    for start in range(0, len(jobs), BATCH):
        batch = jobs[start : start + BATCH]
        prompts, seeds = [prompt for prompt, _ in batch], [seed for _, seed in batch]
        rows, inputs = [prompt.input_ids for prompt in prompts], [prompt.inputs for prompt in prompts]
        outputs = decoder.generate_batch(rows, inputs=inputs, seeds=seeds, **job.settings(TEXT_TOKENS))
        decoded = zip(prompts, outputs, strict=True)
        for _, same in groupby(decoded, key=lambda pair: id(pair[0])):
            of_prompt, of_same = zip(*same, strict=True)
            texts.add(target, of_prompt[0], list(of_same), v)
        done(sum(len(output.tokens) for output in outputs))
    return texts


def _jobs(model: PreTrainedModel, job: SamplingJob) -> list[tuple[Prompt, int]]:
    """Return prompts with a seed each, grouped by prompt, so that one pass reads a group."""
    limit, tokens, jobs = context_limit(model.config), 0, []
    for number, place in enumerate(cycle(range(len(job.prompts)))):
        prompt = job.prompts[place]
        jobs.append((place, job.seed * SEEDS + number))
        read_before = 1 if model.config.is_encoder_decoder else len(prompt.input_ids)
        tokens += TEXT_TOKENS if limit is None else max(1, min(TEXT_TOKENS, limit - read_before))
        if tokens >= job.tokens:
            return [(job.prompts[place], seed) for place, seed in sorted(jobs)]
    raise AssertionError("unreachable: `cycle` does not end")


def pairs(u_T: Tensor, output: DecodeOutput) -> Tensor:
    """Return [n, 2]: the first two u from each round on, even if the round has only one token; without overlaps.

    After a pair, the next pair begins with the next round. The start of a round is known before its tokens are drawn,
    so pairs are independent and uniform on the square. (Their number is a stopping time, which makes no difference for
    large numbers, Anscombe 1952.) The test detects random numbers that are used twice.
    """
    taken, free, start = [], 0, 1  # token 0 comes from the prefill
    for record in output.rounds:
        if start >= free and start + 1 < len(u_T):
            taken.append(start)
            free = start + 2
        start += record.committed
    return torch.stack([u_T[taken], u_T[[start + 1 for start in taken]]], -1)


def draw_continuations(
    target: SampledTarget, decoder: SpeculativeDecoder, job: SamplingJob, done: Done
) -> tuple[Prompt, list[String]]:
    """Return one prompt, and many samples of the first `DEPTH` tokens after it.

    A stopping criterion ends the texts, so that drafts have their full length: the decoder expects longer texts.
    """
    prompt = _open_end(target, job.prompts)
    read_before = 1 if target.model.config.is_encoder_decoder else len(prompt.input_ids)
    length = read_before + DEPTH
    criteria = [lambda ids, *_: torch.full((len(ids),), ids.shape[1] >= length)]
    first, drawn = job.seed * SEEDS + SEEDS // 2, list[String]()  # after all seeds of the texts
    for start in range(0, job.continuations, BATCH):
        rows = [prompt.input_ids] * min(BATCH, job.continuations - start)
        settings = {**job.settings(TEXT_TOKENS), "stopping_criteria": criteria}
        outputs = decoder.generate_batch(rows, inputs=[prompt.inputs] * len(rows), seeds=first + start, **settings)
        drawn += [tuple(output.tokens) for output in outputs]
        done(DEPTH * len(rows))
    return prompt, drawn


def _open_end(target: SampledTarget, prompts: list[Prompt]) -> Prompt:
    """Return the end of a prompt after which the next token has the highest entropy: the test sees most there.

    It is short because every draw reads it again.
    """
    limit = None if target.model.config.is_encoder_decoder else context_limit(target.model.config)
    if limit is not None and limit <= DEPTH:
        raise ConfigError(f"target with a context of {limit}; expected more than {DEPTH}, for a short continuation")
    length = OPEN_TOKENS if limit is None else min(OPEN_TOKENS, limit - DEPTH)
    # A prompt with images stays whole.
    ends = [prompt if prompt.inputs else replace(prompt, input_ids=prompt.input_ids[-length:]) for prompt in prompts]
    entropies = [float(torch.special.entr(target.p_after(end, [()]).double()).sum()) for end in ends]
    return ends[max(range(len(ends)), key=entropies.__getitem__)]


@dataclass(eq=False)
class Watch:
    """Wraps a rule and records u of every token that it emits, by q/p, under the p that it received.

    The u are stored by the token's place in its round, so that an error in the bonus token alone is not averaged out.
    Splitting by place is valid; splitting by outcome is not, since accepted tokens are more often tokens with a high q.
    A token has place i if its round had accepted i tokens before it. If the round ended earlier, the token was drawn in
    a later round, from p given all earlier tokens; over both cases it is drawn from p, because the decoder is lossless;
    hence it is also drawn from p in the first case. And q after the accepted tokens, or the candidates chosen there,
    are determined by these tokens before the next one is drawn. So u is uniform at every place for any lossless rule.
    (A separate test checks that p is the target's own.)
    """

    rule: Rule | None
    seed: int
    _u: list[list[float]] = field(default_factory=lambda: [[] for _ in PLACES])
    _waiting: list[tuple[Tensor, Tensor, int, int]] = field(default_factory=list)
    """p, q, token and place of tokens that are not transformed yet; a batch is much cheaper than single tokens."""

    def __post_init__(self) -> None:
        self._v = torch.Generator().manual_seed(self.seed)

    def watched(self, change: VerifyBatch | None = None) -> Rule:
        """Return the rule to use in a decoder; `change` replaces the verification."""
        change = partial(verify, self.rule) if change is None else change
        return Rule("watched", partial(self._watch, change))

    def _watch(self, verify: VerifyBatch, p_BPV: Tensor, draft: DraftBatch, draws: Draws) -> Decided:
        outcome = verify(p_BPV, draft, draws)
        for row, values in enumerate(outcome.packed().tolist()):
            shape, q = draft.row(row)
            whole = Draft(tuple(draft.tokens_BN[row, : len(shape)].tolist()), shape)  # paths have no invalid nodes
            self._add(p_BPV[row], whole, q, outcome.result(values))
        return outcome

    def _add(self, p_PV: Tensor, draft: Draft, q: Sequence[Tensor] | None, result: VerifyResult) -> None:
        """Keep the emitted tokens with their p and q; `q`: that of each drawn node."""
        tokens = [*(draft.tokens[node] for node in result.path), result.next_token]
        for place, (node, token) in enumerate(zip([ROOT, *result.path], tokens, strict=True)):
            p_V = p_PV[node + 1]
            self._waiting.append((p_V, _q(p_V, draft, q, node), token, min(place, len(PLACES) - 1)))
        if len(self._waiting) * p_PV.shape[1] >= AT_ONCE:
            self._transform()

    def by_place(self) -> list[Tensor]:
        """Return u by place, in fp64; the last place includes all later ones."""
        self._transform()
        return [torch.tensor(u, dtype=torch.float64) for u in self._u]

    def _transform(self) -> None:
        if not self._waiting:
            return
        rows_p, rows_q, tokens, places = zip(*self._waiting, strict=True)
        self._waiting = []
        p_NV, q_NV = torch.stack(rows_p).double(), torch.stack(rows_q).double()
        score_NV = (q_NV / p_NV).nan_to_num(0.0, posinf=0.0)
        v_N = torch.rand(len(tokens), generator=self._v, dtype=torch.float64).to(p_NV.device)
        u_N = transform(p_NV, torch.tensor(tokens, device=p_NV.device), v_N, score_NV)
        for place, u in zip(places, u_N.tolist(), strict=True):
            self._u[place].append(u)


def _q(p_V: Tensor, draft: Draft, q: Sequence[Tensor] | None, node: int) -> Tensor:
    """Return the numerator [V] of the score q/p after `node`.

    For chosen draft tokens, candidates come before all other tokens; without draft tokens, the order is that of p.
    """
    below = draft.children[node + 1]
    if not below:
        return p_V * p_V
    if q is not None:
        return q[below[0]]
    q_V = torch.zeros_like(p_V)
    candidates = [draft.tokens[child] for child in below]
    q_V[candidates] = p_V[candidates]
    return q_V
