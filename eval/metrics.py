"""From cells to the numbers of a report's row."""

from statistics import median
from typing import Any

import numpy as np

from draftsmith.eval.bootstrap import Series, alpha, intervals, ratio, speeds, speedups, tau
from draftsmith.eval.cells import Cell, TextRecord


def row_numbers(baseline: list[Cell], speculative: list[Cell], seed: int = 0) -> dict[str, Any]:
    """The measured part of an `eval.json` row. Speeds and the speedup are medians over repeats.

    Both lists hold the cells of one arm at one temperature and batch size, over the same batches of prompts.
    `seed`: of the bootstrap.
    """
    base, spec = Series.of(baseline), Series.of(speculative)
    ratios = speedups(base, spec)
    seconds = sum(cell.seconds for cell in speculative) or 1.0
    draft = sum(cell.draft_seconds for cell in speculative) / seconds
    verify = sum(cell.verify_seconds for cell in speculative) / seconds
    texts = [text for cell in speculative for text in cell.texts]
    return {
        "prompts": sum(map(len, spec.units)),
        "alpha": alpha(spec),
        "tau": tau(spec),
        "speedup": float(np.median(ratios)),
        **intervals(base, spec, seed),
        "acceptance_at": acceptance_at(texts),
        "baseline_tokens_per_second": float(np.median(speeds(base))),
        "tokens_per_second": float(np.median(speeds(spec))),
        "draft_share": draft,
        "verify_share": verify,
        "overhead_share": 1 - draft - verify,
        "speedup_repeats": [float(value) for value in ratios if value > 0],
        "prefill_seconds": median(cell.prefill_seconds for cell in speculative),
        "baseline_prefill_seconds": median(cell.prefill_seconds for cell in baseline),
        "decode_tokens": sum(text.decode_tokens for text in texts),
        "repeated_4grams": repeated_4grams([text.tokens for text in texts]),
    }


def acceptance_at(texts: list[TextRecord]) -> list[float]:
    """Measured acceptance by draft position, given that the positions before it were accepted."""
    deepest = max((len(text.tested) for text in texts), default=0)
    sums = np.zeros((2, deepest))
    for text in texts:
        sums[:, : len(text.tested)] += [text.accepted, text.tested]
    return [float(share) for share in ratio(*sums)[sums[1] > 0]]


def expected_tau(alpha: float, draft_length: int) -> float:
    """Tokens per target pass if every draft token were accepted with probability alpha, whatever came before it.

    E[tau] = (1 - alpha^(gamma + 1)) / (1 - alpha)   (Leviathan et al. 2023, arXiv:2211.17192, equation 1)
    """
    return draft_length + 1.0 if alpha >= 1 else (1 - alpha ** (draft_length + 1)) / (1 - alpha)


def repeated_4grams(texts: list[list[int]]) -> float:
    """Share of 4-grams that their own text held before. Text that goes in circles is easy to draft."""
    repeated = total = 0
    for tokens in texts:
        grams = list(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total if total else 0.0


def greedy_identity(baseline: list[Cell], speculative: list[Cell]) -> dict[str, Any]:
    """How many greedy texts equal the target's own, token by token, and where the first one parts."""
    own = {place: text.tokens for cell in baseline for place, text in _texts(cell)}
    first, equal, total = None, 0, 0
    for cell in speculative:
        for place, text in _texts(cell):
            total += 1
            a, b = own[place], text.tokens
            if a == b:
                equal += 1
            elif first is None:
                where = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
                first = {"prompt": text.prompt, "position": where}
    return {"greedy_identical": [equal, total], "first_divergence": first}


def _texts(cell: Cell) -> list[tuple[tuple[str, int, int], TextRecord]]:
    return [((text.prompt, cell.repeat, cell.turn), text) for text in cell.texts]
