"""The target's distribution, by plain forward passes, and what a text becomes under it: uniform numbers and cells.

The randomised probability integral transform: u = F(x-) + v p(x) with an independent v ~ U(0, 1) is uniform iff x ~ p,
whatever p is (Rosenblatt 1952; for discrete variables Brockwell 2007). The u of the next token is uniform given all
earlier tokens, so the u of a text are independent.

F sums tokens in some order. Any order that is fixed before the token is drawn leaves u uniform; the order decides which
wrong rules are detected. In order of falling p, tokens that occur too often because the target assigns them a high
probability move u towards 0. In order of falling q/p, tokens do that occur too often because the drafter assigns them a
high probability: the error of most wrong rules is a function of q/p, which would average out in vocabulary order.

Short continuations of a prompt are tested against their exact probabilities, jointly.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.eval.lossless.greedy import read, widened
from draftsmith.eval.lossless.hypotheses import (
    ALL_TOKENS,
    JOINT,
    LEAST,
    Drawn,
    RuleSample,
    String,
    Terms,
    apply_tests,
    chi_square,
)
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.teacher_forced import vocabulary_size

# Shapes: B texts of one prompt, T tokens of each, N tokens, n strings, V vocabulary, C cells.

DEPTH = 4
"""Tokens of a continuation: the prefill's and the first three of a round, which one verification decides."""
CELLS = 100
"""Approximate maximum; more cells reduce the power."""
Rows = Callable[[Sequence[String]], Tensor]
"""Returns p [n, V] after each of the strings, all of one length."""


def transform(p_NV: Tensor, tokens_N: Tensor, v_N: Tensor, score_NV: Tensor | None = None) -> Tensor:
    """Return u [N] in fp64 of tokens under p [N, V], in order of falling score (None: p itself), ties by token id.

    A token of probability zero gets a u, too; `SampledTarget.transformed` tells those.
    """
    p_NV = p_NV.double()
    p_NV = p_NV / p_NV.sum(-1, keepdim=True)
    score_NV = p_NV if score_NV is None else score_NV
    own_N1 = tokens_N[:, None]
    score_N1 = score_NV.gather(1, own_N1)
    ids_V = torch.arange(p_NV.shape[1], device=p_NV.device)
    before_NV = (score_NV > score_N1) | ((score_NV == score_N1) & (ids_V < own_N1))
    return (p_NV * before_NV).sum(-1) + v_N * p_NV.gather(1, own_N1)[:, 0]


def chunks(count: int, vocabulary: int, *, numbers: int = 2**25) -> Iterator[slice]:
    """Yield slices of `count` texts or tokens whose tables over the vocabulary have at most `numbers` entries."""
    size = max(1, numbers // vocabulary)
    for start in range(0, count, size):
        yield slice(start, start + size)


class SampledTarget:
    """Computes the target's p, after every processor, by plain forward passes.

    Every statistic is computed from one reading of p; a second reading bounds its error by rounding.

    Args:
        ends: end tokens, of which servers do not return which one was chosen: they are one, and nothing follows it.
        wide: the first reading is in twice the precision of the weights, and the second in their own; otherwise the
            first is one pass, and the second token by token.
    """

    def __init__(
        self, model: PreTrainedModel, sampling: Sampling, ends: frozenset[int] = frozenset(), *, wide: bool = False
    ) -> None:
        self.model, self._ends, self._wide = model, sorted(ends), wide
        self._processors, self._again = Processors(sampling), None if wide else 1

    def p(self, prompt: Prompt, texts_BT: Tensor, *, width: int | None = None) -> Tensor:
        """Return the distribution [B, T, V] of each token."""
        logits_BTV = read(self.model, prompt, texts_BT, width=width)
        p_BTV = self._processors.scores(logits_BTV.flatten(0, 1)).softmax(-1).view(logits_BTV.shape)
        if not self._ends:
            return p_BTV
        end, ending_BT = self._ends[0], p_BTV[..., self._ends].sum(-1)
        p_BTV[..., self._ends] = 0.0
        p_BTV[..., end] = ending_BT
        before_BT = (texts_BT == end).cumsum(1).roll(1, 1)
        before_BT[:, 0] = 0
        over_BT = (before_BT > 0).to(p_BTV.device)
        p_BTV[over_BT] = 0.0
        p_BTV[..., end][over_BT] = 1.0
        return p_BTV

    def _first_reading(self) -> AbstractContextManager[None]:
        return widened(self.model) if self._wide else nullcontext()

    def _padded(self, texts: Sequence[String], length: int) -> Tensor:
        """Return texts [B, T] of `length` tokens: one that has ended continues with its end."""
        end = self._ends[0] if self._ends else 0
        return torch.tensor([[*text, *[end] * (length - len(text))] for text in texts])

    def p_after(self, prompt: Prompt, strings: Sequence[String], *, width: int | None = None) -> Tensor:
        """Return p [n, V] after the prompt and each of `strings`, which have one length."""
        vocabulary = vocabulary_size(self.model)
        rows = []
        for part in chunks(len(strings), vocabulary * DEPTH):
            texts_nT = torch.tensor([[*string, 0] for string in strings[part]])  # the last token is not read
            rows.append(self.p(prompt, texts_nT, width=width)[:, -1])
        return torch.cat(rows)

    def rounding(self, prompt: Prompt, texts: Sequence[String], length: int) -> float:
        """Return the mean total variation between both readings of p, over texts of at most `length` tokens."""
        texts_BT = self._padded(texts, length)
        with self._first_reading():
            p_BTV = self.p(prompt, texts_BT).double()
        again_BTV = self.p(prompt, texts_BT, width=self._again).double()
        return float((p_BTV - again_BTV).abs().sum(-1).mean() / 2)

    def transformed(
        self, prompt: Prompt, texts: Sequence[String], length: int, v: torch.Generator
    ) -> tuple[list[Tensor], int]:
        """Return u of the tokens of each text, in order of falling p, and the number of tokens where p is zero."""
        u, impossible = list[Tensor](), 0
        with self._first_reading():
            for part in chunks(len(texts), vocabulary_size(self.model) * length):
                texts_BT = self._padded(texts[part], length)
                p_NV, own_N = self.p(prompt, texts_BT).flatten(0, 1), texts_BT.flatten()
                own_N = own_N.to(p_NV.device)
                v_N = torch.rand(len(own_N), generator=v, dtype=torch.float64).to(p_NV.device)
                none_BT = (p_NV.gather(1, own_N[:, None])[:, 0] == 0).cpu().view(texts_BT.shape)
                u_BT = transform(p_NV, own_N, v_N).cpu().view(texts_BT.shape)
                for text, u_T, none_T in zip(texts[part], u_BT, none_BT, strict=True):
                    u.append(u_T[: len(text)])
                    impossible += int(none_T[: len(text)].sum())
        return u, impossible

    def compared(self, prompt: Prompt, texts: Sequence[String]) -> Terms:
        """Return the statistic of the first `DEPTH` tokens of texts after a prompt, against their probabilities."""
        with self._first_reading():
            cells = partition(partial(self.p_after, prompt), len(texts))
        strings = self._padded([text[:DEPTH] for text in texts], DEPTH).tolist()
        return cells.compared(strings, partial(self.p_after, prompt, width=self._again))


@dataclass(frozen=True, eq=False)
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

    def compared(self, strings: Sequence[Sequence[int]], again: Rows) -> Terms:
        """Return the chi-squared statistic of strings of `DEPTH` tokens, its degrees of freedom, and a noncentrality.

        Rounding may cause the last one: it follows from twice the difference to the probabilities of a second reading.
        """
        counts_C = torch.zeros_like(self.probabilities_C)
        for string in strings:
            counts_C[self.cell(string)] += 1
        again_C = _masses(self.levels, self.cells, self.others, [again(level) for level in self.levels])
        expected_C = len(strings) * self.probabilities_C
        moved_C, possible = 2 * len(strings) * (again_C - self.probabilities_C), expected_C > 0
        return *chi_square(counts_C, expected_C), float((moved_C[possible] ** 2 / expected_C[possible]).sum())


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


PLACES = ("first token", "second token", "third token")


@dataclass(frozen=True)
class AgainstTarget:
    """Tests of continuations against p, which is computed in twice the precision of the weights.

    Args:
        contexts: the prompts.
        greedy: by context, the continuation on which the rounding of p is measured.
        length: the tokens of a continuation that has not ended.
    """

    target: SampledTarget
    contexts: list[Prompt]
    greedy: Sequence[String]
    length: int
    seed: int

    @cached_property
    def tolerance(self) -> float:
        """Twice the mean total variation between p in the target's own precision and in the wider one."""
        texts = zip(self.contexts, self.greedy, strict=True)
        return 2 * fmean(self.target.rounding(context, [text], self.length) for context, text in texts)

    def __call__(self, drawn: Drawn, level: float) -> RuleSample:
        """Return the tests of continuations by context."""
        v, u, impossible = torch.Generator().manual_seed(self.seed), list[Tensor](), 0
        statistic, freedom, shift = 0.0, 0, 0.0
        for context, texts in zip(self.contexts, drawn, strict=True):
            of_context, none = self.target.transformed(context, texts, self.length, v)
            u, impossible = [*u, *of_context], impossible + none
            terms = self.target.compared(context, texts)
            statistic, freedom, shift = statistic + terms[0], freedom + terms[1], shift + terms[2]
        values = {ALL_TOKENS: torch.cat(u)}
        values |= {name: torch.cat([u_T[place : place + 1] for u_T in u]) for place, name in enumerate(PLACES)}
        uniform = {name: (u_N, self.tolerance) for name, u_N in values.items()}
        joint = {JOINT: ((statistic, freedom, shift), sum(map(len, drawn)))}
        return apply_tests(level, len(values[ALL_TOKENS]), uniform, joint, impossible, self.tolerance)
