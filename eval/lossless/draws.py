"""Samples for the sampling check: texts and short continuations of one rule, reduced to the tested numbers.

Short continuations of one prompt are tested against their exact probabilities, jointly, with a chi-squared test.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, groupby
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.sequence import DecodeOutput
from draftsmith.errors import ConfigError
from draftsmith.eval.lossless.greedy import read
from draftsmith.eval.lossless.pit import chunks, pairs, round_starts, transform
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.teacher_forced import vocabulary_size
from draftsmith.heads.model_config import context_limit

# Shapes: n nodes, V vocabulary, C cells.

DEPTH = 4
"""Tokens of a continuation: the prefill's and the first three of a round, which one verification decides."""
CELLS = 100
"""Approximate maximum; more cells reduce the power."""
LEAST = 10
"""Minimum of expected draws in a cell, for the chi-squared approximation (Cochran 1954 requires 5)."""

String = tuple[int, ...]
Rows = Callable[[Sequence[String]], Tensor]
"""Returns p [n, V] after each of the strings, all of one length."""


@dataclass(frozen=True)
class Partition:
    """A partition of all strings of `DEPTH` tokens: likely prefixes are cells, unlikely ones are pooled."""

    levels: list[list[String]]
    """By length, the prefixes whose next token is distinguished."""
    cells: dict[String, int]
    """Prefixes that are a cell."""
    others: dict[String, int]
    """For each prefix in `levels`, the cell of its unlikely continuations."""
    probabilities_C: Tensor

    def cell(self, string: Sequence[int]) -> int:
        """Return the cell of a string of `DEPTH` tokens."""
        for length in range(1, len(string) + 1):
            beginning = tuple(string[:length])
            if beginning in self.cells:
                return self.cells[beginning]
            if beginning not in self.others:
                return self.others[beginning[:-1]]
        raise ValueError(f"a string of {len(string)} tokens ends within the tree; expected {DEPTH}")

    def again(self, rows: Rows) -> Tensor:
        """Return the cells' probabilities [C] under other `rows`."""
        return _masses(self.levels, self.cells, self.others, [rows(level) for level in self.levels])


def partition(rows: Rows, count: int) -> Partition:
    """Return cells that expect at least max(`LEAST`, count / `CELLS`) of `count` draws each."""
    least = max(LEAST / count, 1 / CELLS)
    weights: dict[String, float] = {(): 1.0}
    levels: list[list[String]] = []
    tables: list[Tensor] = []
    cells: dict[String, int] = {}
    others: dict[String, int] = {}
    pool = 0
    names = 1
    for length in range(DEPTH):
        level = list(weights)
        if not level:
            break
        table_nV = rows(level)
        levels.append(level)
        tables.append(table_nV)
        inner: dict[String, float] = {}
        for node, row_V in zip(level, table_nV, strict=True):
            mass_V = weights[node] * row_V.double()
            likely = (mass_V >= least).nonzero()[:, 0].tolist()
            rest = float(mass_V.sum() - mass_V[likely].sum())
            others[node] = pool
            if rest >= least:
                others[node], names = names, names + 1
            for token in likely:
                child, mass = (*node, token), float(mass_V[token])
                # A prefix that cannot be split into two cells remains one cell.
                if length + 1 < DEPTH and mass >= 2 * least:
                    inner[child] = mass
                else:
                    cells[child], names = names, names + 1
        weights = inner
    masses_C = _masses(levels, cells, others, tables)
    if masses_C[pool] < least and names > 1:  # a pool too small for a cell is merged with the smallest cell
        smallest = 1 + int(masses_C[1:].argmin())
        cells = {name: smallest if cell == pool else cell for name, cell in cells.items()}
        others = {name: smallest if cell == pool else cell for name, cell in others.items()}
        masses_C = _masses(levels, cells, others, tables)
    return Partition(levels, cells, others, masses_C)


def _masses(
    levels: list[list[String]], cells: dict[String, int], others: dict[String, int], tables: list[Tensor]
) -> Tensor:
    """Return probabilities [C] of the cells, from p after every prefix in `levels`."""
    masses_C = torch.zeros(1 + max([*cells.values(), *others.values()]), dtype=torch.float64)
    inner = {name for level in levels for name in level}
    weights: dict[String, float] = {(): 1.0}
    for level, table_nV in zip(levels, tables, strict=True):
        for node, row_V in zip(level, table_nV.double().cpu(), strict=True):
            mass_V = weights[node] * row_V / row_V.sum()
            children = [name for name in (*inner, *cells) if len(name) == len(node) + 1 and name[:-1] == node]
            for child in children:
                mass = float(mass_V[child[-1]])
                weights[child] = mass
                if child in cells:
                    masses_C[cells[child]] += mass
            own = float(mass_V[[child[-1] for child in children]].sum())
            masses_C[others[node]] += max(0.0, float(mass_V.sum()) - own)
    return masses_C


def chi_square(counts_C: Tensor, expected_C: Tensor) -> tuple[float, int]:
    """Return Pearson's statistic and its degrees of freedom, without cells of expectation 0."""
    possible = expected_C > 0
    terms = (counts_C[possible] - expected_C[possible]) ** 2 / expected_C[possible]
    return float(terms.sum()), max(0, int(possible.sum()) - 1)


# Shapes: B texts of one prompt, T tokens of each, n strings, V vocabulary, C cells.

BATCH = 64
TEXT_TOKENS = 64
OPEN_TOKENS = 16
"""Most tokens of the prompt of short continuations."""
TOLERANCE_TEXTS = 8
"""Texts that are also read token by token, to measure the rounding of p."""
SEEDS = 10_000_000
"""Distance between the seeds of runs: neighbouring seeds share no random numbers."""
Done = Callable[[int], None]


@dataclass(frozen=True)
class Plan:
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


class SampledTarget:
    """Computes the target's p, after every processor, by plain forward passes."""

    def __init__(self, model: PreTrainedModel, sampling: Sampling) -> None:
        self.model = model
        self._processors = Processors(sampling)

    def p(self, prompt: Prompt, texts_BT: Tensor, *, width: int | None = None) -> Tensor:
        """Return the distribution [B, T, V] of each token."""
        logits_BTV = read(self.model, prompt, texts_BT, width=width)
        return self._processors.probabilities(logits_BTV.flatten(0, 1), list).view(logits_BTV.shape)

    def p_after(self, prompt: Prompt, strings: Sequence[String], *, width: int | None = None) -> Tensor:
        """Return p [n, V] after the prompt and each of `strings`, which have one length."""
        vocabulary = vocabulary_size(self.model)
        rows = []
        for part in chunks(len(strings), vocabulary * DEPTH):
            texts_nT = torch.tensor([[*string, 0] for string in strings[part]])  # the last token is not read
            rows.append(self.p(prompt, texts_nT, width=width)[:, -1])
        return torch.cat(rows)


@dataclass
class Texts:
    """Numbers of the texts of one rule: u of every token in order of falling p, and counts."""

    u: list[Tensor] = field(default_factory=list)
    pairs: list[Tensor] = field(default_factory=list)
    impossible: int = 0
    """Tokens to which the target assigns probability 0."""
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tolerance: float = 0.0
    """Mean total variation between p read in one pass and p read token by token."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.u))

    def add(self, output: DecodeOutput, u_T: Tensor) -> None:
        """Add one text and the u of its tokens."""
        self.u.append(u_T)
        self.pairs.append(pairs(u_T, round_starts(output)))
        self.rounds += len(output.rounds)
        self.drafted += sum(record.drafted for record in output.rounds)
        self.accepted += sum(record.accepted for record in output.rounds)


def draw_texts(target: SampledTarget, decoder: SpeculativeDecoder, plan: Plan, done: Done) -> Texts:
    """Sample at least `plan.tokens` tokens in texts of up to 64, cycling through the prompts, and transform them."""
    texts, v = Texts(), torch.Generator().manual_seed(plan.seed)
    jobs = _jobs(target.model, plan)
    for start in range(0, len(jobs), BATCH):
        batch = jobs[start : start + BATCH]
        prompts, seeds = [prompt for prompt, _ in batch], [seed for _, seed in batch]
        rows, inputs = [prompt.input_ids for prompt in prompts], [prompt.inputs for prompt in prompts]
        outputs = decoder.generate_batch(rows, inputs=inputs, seeds=seeds, **plan.settings(TEXT_TOKENS))
        decoded = zip(prompts, outputs, strict=True)
        for _, same in groupby(decoded, key=lambda pair: id(pair[0])):
            of_prompt = list(same)
            _transform(target, of_prompt[0][0], [output for _, output in of_prompt], texts, v)
        done(sum(len(output.tokens) for output in outputs))
    return texts


def _jobs(model: PreTrainedModel, plan: Plan) -> list[tuple[Prompt, int]]:
    """Return prompts with a seed each, grouped by prompt, so that one pass reads a group."""
    limit, tokens, jobs = context_limit(model.config), 0, []
    for number, place in enumerate(cycle(range(len(plan.prompts)))):
        prompt = plan.prompts[place]
        jobs.append((place, plan.seed * SEEDS + number))
        read_before = 1 if model.config.is_encoder_decoder else len(prompt.input_ids)
        tokens += TEXT_TOKENS if limit is None else max(1, min(TEXT_TOKENS, limit - read_before))
        if tokens >= plan.tokens:
            return [(plan.prompts[place], seed) for place, seed in sorted(jobs)]
    raise AssertionError("unreachable: `cycle` does not end")


def _transform(
    target: SampledTarget, prompt: Prompt, outputs: list[DecodeOutput], texts: Texts, v: torch.Generator
) -> None:
    """Transform texts of one prompt by the target's p, and add their u to `texts`."""
    tokens_BT = torch.tensor([output.tokens for output in outputs])
    if not texts.u:
        sample = tokens_BT[:TOLERANCE_TEXTS]
        p_BTV, again_BTV = (target.p(prompt, sample, width=width) for width in (None, 1))
        texts.tolerance = float((p_BTV.double() - again_BTV.double()).abs().sum(-1).mean() / 2)
    vocabulary = vocabulary_size(target.model)
    for part in chunks(len(outputs), vocabulary * tokens_BT.shape[1]):
        p_BTV = target.p(prompt, tokens_BT[part])
        own_N = tokens_BT[part].flatten().to(p_BTV.device)
        p_NV = p_BTV.flatten(0, 1)
        v_N = torch.rand(len(own_N), generator=v, dtype=torch.float64).to(p_NV.device)
        u_BT = transform(p_NV, own_N, v_N).view(p_BTV.shape[:2]).cpu()
        texts.impossible += int((p_NV.gather(1, own_N[:, None]) == 0).sum())
        for output, u_T in zip(outputs[part], u_BT, strict=True):
            texts.add(output, u_T)


@dataclass(frozen=True)
class Continuations:
    """Observed and expected numbers of short continuations of one prompt in each cell."""

    prompt: str
    counts_C: Tensor
    expected_C: Tensor
    shift: float
    """Noncentrality that rounding may cause, from twice the difference between two readings of the target."""


def draw_continuations(target: SampledTarget, decoder: SpeculativeDecoder, plan: Plan, done: Done) -> Continuations:
    """Sample the first `DEPTH` tokens after one prompt many times.

    A stopping criterion ends the texts, so that drafts have their full length: the decoder expects longer texts.
    """
    prompt = _open_end(target, plan.prompts)
    count = plan.continuations
    cells = partition(lambda strings: target.p_after(prompt, strings), count)
    again_C = cells.again(lambda strings: target.p_after(prompt, strings, width=1))
    counts_C = torch.zeros_like(cells.probabilities_C)
    read_before = 1 if target.model.config.is_encoder_decoder else len(prompt.input_ids)
    criteria = [_After(read_before + DEPTH)]
    first = plan.seed * SEEDS + SEEDS // 2  # after all seeds of the texts
    for start in range(0, count, BATCH):
        rows = [prompt.input_ids] * min(BATCH, count - start)
        settings = {**plan.settings(TEXT_TOKENS), "stopping_criteria": criteria}
        for output in decoder.generate_batch(rows, inputs=[prompt.inputs] * len(rows), seeds=first + start, **settings):
            counts_C[cells.cell(output.tokens)] += 1
        done(DEPTH * len(rows))
    expected_C = count * cells.probabilities_C
    shift_C = 2 * count * (again_C - cells.probabilities_C)
    shift = float((shift_C[expected_C > 0] ** 2 / expected_C[expected_C > 0]).sum())
    return Continuations(prompt.id, counts_C, expected_C, shift)


class _After(StoppingCriteria):
    """Ends a text at a length that the decoder does not know in advance."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> torch.BoolTensor:
        ended = torch.full((len(input_ids),), input_ids.shape[1] >= self._length)
        return cast(torch.BoolTensor, ended)  # the dtype, which the type of a tensor does not show


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
