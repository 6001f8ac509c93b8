"""From decoded texts to the numbers of a report's row."""

from dataclasses import dataclass
from statistics import median
from typing import Any

from draftsmith.decode.output import DecodeOutput, acceptance_at
from draftsmith.eval.prompts import Prompt


@dataclass(frozen=True)
class Measured:
    """One prompt decoded by one arm at one temperature, in one repeat."""

    prompt: Prompt
    repeat: int
    output: DecodeOutput


def tokens_per_second(runs: list[Measured]) -> float:
    """All decode tokens over all decode seconds; the prefill, which both arms share, is left out."""
    seconds = sum(run.output.decode_seconds for run in runs)
    return sum(run.output.decode_tokens for run in runs) / seconds if seconds else 0.0


def by_repeat(runs: list[Measured]) -> dict[int, list[Measured]]:
    groups: dict[int, list[Measured]] = {}
    for run in runs:
        groups.setdefault(run.repeat, []).append(run)
    return groups


def row_numbers(baseline: list[Measured], speculative: list[Measured]) -> dict[str, Any]:
    """The measured part of an `eval.json` row. Speeds and the speedup are medians over repeats."""
    rounds = [record for run in speculative for record in run.output.rounds]
    overlaps = [value for record in rounds for value in record.overlap]
    seconds = sum(record.seconds for record in rounds) or 1.0
    draft = sum(record.draft_seconds for record in rounds) / seconds
    verify = sum(record.verify_seconds for record in rounds) / seconds
    base, spec = by_repeat(baseline), by_repeat(speculative)
    base_speed = {repeat: tokens_per_second(runs) for repeat, runs in base.items()}
    spec_speed = {repeat: tokens_per_second(runs) for repeat, runs in spec.items()}
    ratios = [spec_speed[repeat] / base_speed[repeat] for repeat in spec_speed if base_speed.get(repeat)]
    return {
        "prompts": len({run.prompt.id for run in speculative}),
        "alpha": sum(overlaps) / len(overlaps) if overlaps else 0.0,
        "tau": sum(run.output.decode_tokens for run in speculative) / max(1, len(rounds)),
        "acceptance_at": acceptance_at(rounds),
        "baseline_tokens_per_second": median(base_speed.values()),
        "tokens_per_second": median(spec_speed.values()),
        "speedup": median(ratios) if ratios else 0.0,
        "draft_share": draft,
        "verify_share": verify,
        "overhead_share": 1 - draft - verify,
        "speedup_repeats": ratios,
        "prefill_seconds": median(run.output.prefill_seconds for run in speculative),
        "baseline_prefill_seconds": median(run.output.prefill_seconds for run in baseline),
        "decode_tokens": sum(run.output.decode_tokens for run in speculative),
        "repeated_4grams": repeated_4grams([run.output.tokens for run in speculative]),
    }


def repeated_4grams(texts: list[list[int]]) -> float:
    """Share of 4-grams that their own text held before. Text that goes in circles is easy to draft."""
    repeated = total = 0
    for tokens in texts:
        grams = list(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total if total else 0.0


def greedy_identity(baseline: list[Measured], speculative: list[Measured]) -> dict[str, Any]:
    """How many greedy texts equal the target's own, token by token, and where the first one parts."""
    own = {(run.prompt.id, run.repeat): run.output.tokens for run in baseline}
    first, equal = None, 0
    for run in speculative:
        a, b = own[(run.prompt.id, run.repeat)], run.output.tokens
        if a == b:
            equal += 1
        elif first is None:
            place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            first = {"prompt": run.prompt.id, "position": place}
    return {"greedy_identical": [equal, len(speculative)], "first_divergence": first}
