"""Tests of continuations that a server sampled: against the target's exact probabilities, or against other samples.

The same tests are applied to a control of the same size: of the server's own answers, one in four is replaced by the
greedy one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.sampling import Sampling
from draftsmith.eval.lossless.draws import DEPTH, LEAST, SampledTarget, String, chi_square, partition
from draftsmith.eval.lossless.greedy import widened
from draftsmith.eval.lossless.pit import chunks, transform
from draftsmith.eval.lossless.sampling import (
    ALL_TOKENS,
    JOINT,
    Sample,
    SamplingCheck,
    Test,
    adjusted,
    impossible_test,
    judged,
    summed_test,
    uniform_test,
)
from draftsmith.eval.prompts import Prompt

# Shapes: B texts after one prompt, T tokens of each, V vocabulary, C cells.

CONTROL = 4
"""One in so many of the control's answers is the greedy one."""
PLACES = ("first token", "second token", "third token")
NAMES = ("first token", "first two tokens", "first three tokens")
Drawn = list[list[String]]
"""By context, the continuations that were sampled after it."""
Tests = Callable[[Drawn, float], list[Test]]
"""Returns the tests of a sample at a level for all of them together."""


def check_samples(
    drawn: Drawn, greedy: Sequence[String], level: float, tests: Tests, tolerance: float
) -> SamplingCheck:
    """Apply the tests to a sample and to its control.

    Args:
        greedy: by context, its greedy continuation.
    """
    control = [
        [own if number % CONTROL == 0 else text for number, text in enumerate(texts)]
        for texts, own in zip(drawn, greedy, strict=True)
    ]
    honest, control = (
        Sample(
            adjusted(tests(texts, level)),
            sum(len(text) for of_context in texts for text in of_context),
            rounds=None,
            drafted=None,
            accepted=None,
            tolerance=tolerance,
            continued=f"{len(drawn)} prompts",
        )
        for texts in (drawn, control)
    )
    return judged(honest, control, level)


class EndingTarget(SampledTarget):
    """The target's p where a text may end: its end tokens are one, and nothing else follows it.

    Servers do not return which of its end tokens a model chose.
    """

    def __init__(self, model: PreTrainedModel, sampling: Sampling, ends: frozenset[int]) -> None:
        super().__init__(model, sampling)
        self._ends = sorted(ends)

    @property
    def end(self) -> int | None:
        """The token that stands for all end tokens."""
        return self._ends[0] if self._ends else None

    def p(self, prompt: Prompt, texts_BT: Tensor, *, width: int | None = None) -> Tensor:
        p_BTV = super().p(prompt, texts_BT, width=width)
        if self.end is None:
            return p_BTV
        ending_BT = p_BTV[..., self._ends].sum(-1)
        p_BTV[..., self._ends] = 0.0
        p_BTV[..., self.end] = ending_BT
        before_BT = (texts_BT == self.end).cumsum(1).roll(1, 1)
        before_BT[:, 0] = 0
        over_BT = (before_BT > 0).to(p_BTV.device)
        p_BTV[over_BT] = 0.0
        p_BTV[..., self.end][over_BT] = 1.0
        return p_BTV


@dataclass
class ExactTests:
    """Tests against p of the loaded target, which is computed in twice the precision of its weights.

    Args:
        contexts: the prompts.
        length: the tokens of a continuation that has not ended.
    """

    target: EndingTarget
    contexts: list[Prompt]
    length: int
    seed: int

    def __post_init__(self) -> None:
        self.tolerance = 0.0
        """Twice the mean total variation between p in the target's own precision and in the wider one."""

    def measure(self, greedy: Sequence[String]) -> None:
        """Measure the tolerance on one text of each context."""
        found = []
        for context, text in zip(self.contexts, greedy, strict=True):
            texts_1T = torch.tensor([self._padded(text)])
            own_TV = self.target.p(context, texts_1T)[0].double()
            with widened(self.target.model):
                found.append((self.target.p(context, texts_1T)[0].double() - own_TV).abs().sum(-1).mean() / 2)
        self.tolerance = 2 * float(torch.stack(found).mean())

    def __call__(self, drawn: Drawn, level: float) -> list[Test]:
        level = level / (len(PLACES) + 3)
        u: list[list[float]] = [[] for _ in range(self.length)]
        v, impossible, statistic, freedom, shift = torch.Generator().manual_seed(self.seed), 0, 0.0, 0, 0.0
        for context, texts in zip(self.contexts, drawn, strict=True):
            with widened(self.target.model):
                impossible += self._transform(context, texts, v, u)
            terms = self._joint(context, texts)
            statistic, freedom, shift = statistic + terms[0], freedom + terms[1], shift + terms[2]
        every = torch.tensor([value for place in u for value in place], dtype=torch.float64)
        return [
            uniform_test(ALL_TOKENS, every, level, self.tolerance),
            *(
                uniform_test(name, torch.tensor(values, dtype=torch.float64), level, self.tolerance)
                for name, values in zip(PLACES, u, strict=False)
            ),
            summed_test(JOINT, statistic, freedom, sum(map(len, drawn)), level, shift),
            impossible_test(impossible, len(every), self.tolerance, level),
        ]

    def _padded(self, text: String) -> list[int]:
        """Return a text of `length` tokens: one that has ended continues with its end."""
        return [*text, *[self.target.end or 0] * (self.length - len(text))]

    def _transform(self, context: Prompt, texts: list[String], v: torch.Generator, u: list[list[float]]) -> int:
        """Append u of each token by its place, and return the number of tokens of probability zero."""
        texts_BT, impossible = torch.tensor([self._padded(text) for text in texts]), 0
        vocabulary = self.target.p(context, texts_BT[:1, :1]).shape[-1]
        for part in chunks(len(texts), vocabulary * self.length):
            p_NV = self.target.p(context, texts_BT[part]).flatten(0, 1)
            own_N = texts_BT[part].flatten().to(p_NV.device)
            v_N = torch.rand(len(own_N), generator=v, dtype=torch.float64).to(p_NV.device)
            u_BT = transform(p_NV, own_N, v_N).view(-1, self.length).tolist()
            none_BT = (p_NV.gather(1, own_N[:, None]) == 0).view(-1, self.length).tolist()
            for text, u_T, none_T in zip(texts[part], u_BT, none_BT, strict=True):
                impossible += sum(none_T[: len(text)])
                for place in range(len(text)):
                    u[place].append(u_T[place])
        return impossible

    def _joint(self, context: Prompt, texts: list[String]) -> tuple[float, int, float]:
        """Return the chi-squared statistic of the first tokens, its degrees of freedom, and what rounding may add."""
        with widened(self.target.model):
            cells = partition(lambda strings: self.target.p_after(context, strings), len(texts))
        again_C = cells.again(lambda strings: self.target.p_after(context, strings))
        counts_C = torch.zeros_like(cells.probabilities_C)
        for text in texts:
            counts_C[cells.cell(self._padded(text)[:DEPTH])] += 1
        expected_C = len(texts) * cells.probabilities_C
        moved_C = 2 * len(texts) * (again_C - cells.probabilities_C)
        possible = expected_C > 0
        return *chi_square(counts_C, expected_C), float((moved_C[possible] ** 2 / expected_C[possible]).sum())


@dataclass(frozen=True)
class SampleTests:
    """Tests against continuations that another server sampled, or the target itself where only texts are known.

    Args:
        others: by context, as many as the tested ones, or more.
        by_place: the first one, two and three tokens are tested, too; for texts, characters are no tokens.
    """

    others: Drawn
    by_place: bool

    def __call__(self, drawn: Drawn, level: float) -> list[Test]:
        depths = {JOINT: None, **({name: depth for depth, name in enumerate(NAMES, 1)} if self.by_place else {})}
        tests = []
        for name, depth in depths.items():
            statistic, freedom, count = 0.0, 0, 0.0
            for ours, theirs in zip(drawn, self.others, strict=True):
                terms = homogeneity(ours, theirs, depth)
                statistic, freedom = statistic + terms[0], freedom + terms[1]
                # n sum d^2 / p of one sample becomes n m / (n + m) sum d^2 / p of two.
                count += len(ours) * len(theirs) / (len(ours) + len(theirs))
            tests.append(summed_test(name, statistic, freedom, count, level / len(depths), 0.0))
        return tests


END = -1
"""The element after the last one of a text."""


def homogeneity(ours: Sequence[String], theirs: Sequence[String], depth: int | None = None) -> tuple[float, int]:
    """Return the chi-squared statistic of two samples of texts, and its degrees of freedom.

    Cells are prefixes that occur often in both samples taken together: given those, each text is equally likely to be
    in either sample if both have one distribution.

    Args:
        depth: the first elements of each text that are compared; None: all.
    """
    both = [(*text[:depth], END) for text in (*ours, *theirs)]
    tables = torch.tensor(
        [[sum(i < len(ours) for i in cell), sum(i >= len(ours) for i in cell)] for cell in _cells(both)],
        dtype=torch.float64,
    )
    expected = tables.sum(1, keepdim=True) * tables.sum(0, keepdim=True) / tables.sum()
    return float(((tables - expected) ** 2 / expected).sum()), len(tables) - 1


def _cells(texts: Sequence[String]) -> list[list[int]]:
    """Return the indices of texts in each cell; a cell expects `LEAST` of each sample, if both are of one size."""
    cells, waiting = [], [(list(range(len(texts))), 0)]
    while waiting:
        members, depth = waiting.pop()
        groups: dict[int, list[int]] = {}
        for index in members:
            groups.setdefault(texts[index][depth], []).append(index)
        large = {first: group for first, group in groups.items() if len(group) >= 2 * LEAST}
        rest = [index for first, group in groups.items() if first not in large for index in group]
        if len(rest) >= 2 * LEAST or not large:
            cells += [rest] if rest else []
        elif rest:  # too few for a cell of their own
            smallest = min(large, key=lambda first: len(large[first]))
            cells.append([*large.pop(smallest), *rest])
        for first, group in large.items():
            if first == END:
                cells.append(group)
            else:
                waiting.append((group, depth + 1))
    return cells
