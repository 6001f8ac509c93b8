"""From the cells of a journal to the rows and the series of `eval.json`."""

from collections.abc import Sequence
from statistics import median

import numpy as np

from draftsmith.eval.journal import Cell
from draftsmith.eval.prompts import OVERALL
from draftsmith.eval.results import DivergencePlace, Row
from draftsmith.metrics import Series, acceptance_at, alpha, as_series, intervals, speeds, speedups, summed, tau


def series_of(cells: Sequence[Cell]) -> Series:
    """Return the sums of the cells of one variant, temperature and batch size; every batch has every repeat."""
    groups, repeats = (sorted({getattr(cell, key) for cell in cells}) for key in ("group", "repeat"))
    units: list[list[str]] = [[] for _ in groups]
    sums = np.zeros((5, len(groups), len(repeats)))
    for cell in cells:
        u, r = groups.index(cell.group), repeats.index(cell.repeat)
        if cell.turn == 0:
            units[u] = [text.prompt for text in cell.texts]
        texts = ((text.decode_tokens, text.decode_rounds, 0.0, text.overlap, text.overlaps) for text in cell.texts)
        sums[:, u, r] += np.sum([*texts, (0, 0, cell.seconds, 0, 0)], axis=0)
    return as_series(cells[0].arm, cells[0].temperature, cells[0].batch_size, units, sums)


def row_of(
    baseline: Sequence[Cell],
    speculative: Sequence[Cell],
    *,
    category: str = OVERALL,
    drafter_type: str = "",
    draft_length: int | None = None,
    rule: str | None = None,
    lossless: bool = True,
    seed: int = 0,
) -> Row:
    """Return the row of one variant at one temperature and batch size; speeds and the speedup are medians over repeats.

    Args:
        baseline: cells of the target alone over the same batches of prompts.
        speculative: cells of the variant.
        category: of the prompts.
        seed: seed of the bootstrap.
    """
    base, spec = series_of(baseline), series_of(speculative)
    ratios = speedups(base, spec)
    seconds = sum(cell.seconds for cell in speculative) or 1.0
    draft = sum(cell.draft_seconds for cell in speculative) / seconds
    verify = sum(cell.verify_seconds for cell in speculative) / seconds
    texts = [text for cell in speculative for text in cell.texts]
    row: Row = {
        "drafter": spec["drafter"],
        "drafter_type": drafter_type,
        "policy": spec["policy"],
        "draft_length": draft_length,
        "rule": rule or "best lossless",
        "lossless": lossless or spec["temperature"] == 0,
        "temperature": spec["temperature"],
        "batch_size": spec["batch_size"],
        "category": category,
        "prompts": sum(map(len, spec["units"])),
        "alpha": alpha(spec["overlap"], spec["overlaps"]),
        "tau": tau(spec["tokens"], spec["rounds"]),
        "speedup": float(np.median(ratios)),
        **intervals(base, spec, seed),
        "acceptance_at": acceptance_at((text.tested, text.accepted) for text in texts),
        "tested_at": [int(count) for count in summed([text.tested for text in texts]) if count > 0],
        "baseline_tokens_per_second": float(np.median(speeds(base))),
        "tokens_per_second": float(np.median(speeds(spec))),
        "draft_share": draft,
        "verify_share": verify,
        "overhead_share": 1 - draft - verify,
        "speedup_repeats": [value for value in ratios.tolist() if value > 0],
        "prefill_seconds": median(cell.prefill_seconds for cell in speculative),
        "baseline_prefill_seconds": median(cell.prefill_seconds for cell in baseline),
        "decode_tokens": sum(text.decode_tokens for text in texts),
        "repeated_4grams": repeated_4grams([text.tokens for text in texts]),
    }
    if row["temperature"] == 0:
        row["greedy_identical"], row["first_divergence"] = greedy_identity(baseline, speculative)
    return row


def repeated_4grams(texts: list[list[int]]) -> float:
    """Return the share of 4-grams that occur earlier in the same text; repetitive text is easy to draft."""
    repeated = total = 0
    for tokens in texts:
        grams = list(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total if total else 0.0


def greedy_identity(baseline: Sequence[Cell], speculative: Sequence[Cell]) -> tuple[list[int], DivergencePlace | None]:
    """Return [greedy texts that equal the target's own, all texts], and the place of the first difference."""
    own = {(text.prompt, cell.repeat, cell.turn): text.tokens for cell in baseline for text in cell.texts}
    pairs = [
        (text.prompt, own[text.prompt, cell.repeat, cell.turn], text.tokens)
        for cell in speculative
        for text in cell.texts
    ]
    first: DivergencePlace | None = None
    for prompt, a, b in pairs:
        if a != b:
            place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            first = {"prompt": prompt, "position": place}
            break
    return [sum(a == b for _, a, b in pairs), len(pairs)], first
