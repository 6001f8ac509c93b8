"""Short continuations of one prompt against their exact probabilities: a chi-squared test that sees tokens jointly."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Shapes: n nodes, V vocabulary, C cells.

DEPTH = 4
"""Tokens: the prefill's and the first three of a round, which the rule decides about together."""
CELLS = 100
"""At most about so many: more of them find less."""
LEAST = 10
"""Expected draws in a cell, so that the chi-squared distribution is a good approximation (Cochran 1954 asks for 5)."""

String = tuple[int, ...]
Rows = Callable[[Sequence[String]], Tensor]
"""p [n, V] behind each of the strings, all of one length."""


@dataclass(frozen=True)
class Partition:
    """All strings of `DEPTH` tokens in cells: a likely beginning is a cell, what is unlikely is pooled."""

    levels: list[list[String]]
    """By length, the beginnings whose next token is told apart."""
    cells: dict[String, int]
    """Beginnings that are a cell of their own."""
    others: dict[String, int]
    """For each beginning in `levels` the cell of what goes on in an unlikely way."""
    probabilities_C: Tensor

    def cell(self, string: Sequence[int]) -> int:
        """The cell of a string of `DEPTH` tokens."""
        for length in range(1, len(string) + 1):
            beginning = tuple(string[:length])
            if beginning in self.cells:
                return self.cells[beginning]
            if beginning not in self.others:
                return self.others[beginning[:-1]]
        raise ValueError(f"a string of {len(string)} tokens ends within the tree; expected {DEPTH}")

    def again(self, rows: Rows) -> Tensor:
        """The cells' probabilities [C] by another reading of the target."""
        return _masses(self.levels, self.cells, self.others, [rows(level) for level in self.levels])


def partition(rows: Rows, count: int) -> Partition:
    """Cells in which `count` draws are expected at least max(`LEAST`, count / `CELLS`) times each."""
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
                # What cannot be split into two cells stays one.
                if length + 1 < DEPTH and mass >= 2 * least:
                    inner[child] = mass
                else:
                    cells[child], names = names, names + 1
        weights = inner
    masses_C = _masses(levels, cells, others, tables)
    if masses_C[pool] < least and names > 1:  # the pool is too small for a cell: it joins the smallest
        smallest = 1 + int(masses_C[1:].argmin())
        cells = {name: smallest if cell == pool else cell for name, cell in cells.items()}
        others = {name: smallest if cell == pool else cell for name, cell in others.items()}
        masses_C = _masses(levels, cells, others, tables)
    return Partition(levels, cells, others, masses_C)


def _masses(
    levels: list[list[String]], cells: dict[String, int], others: dict[String, int], tables: list[Tensor]
) -> Tensor:
    """Probabilities [C] of the cells, from p behind every beginning in `levels`."""
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
    """Pearson's statistic and its degrees of freedom; cells in which nothing is expected are left out."""
    possible = expected_C > 0
    terms = (counts_C[possible] - expected_C[possible]) ** 2 / expected_C[possible]
    return float(terms.sum()), max(0, int(possible.sum()) - 1)
