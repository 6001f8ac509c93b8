"""Cells, rows and evaluations made by hand."""

import random
from typing import Any

from draftsmith.decode.sequence import DecodeOutput, Round
from draftsmith.eval.journal import Cell, Place
from draftsmith.eval.results import Evaluation
from draftsmith.eval.settings import BASELINE, Settings
from draftsmith.provenance import environment


def output(rounds: list[Round], tokens: list[int] | None = None) -> DecodeOutput:
    count = 1 + sum(record.committed for record in rounds)
    return DecodeOutput([1], tokens or list(range(count)), rounds, 0.5, "length")


def cell(*outputs: DecodeOutput, repeat: int = 0, group: int = 0, **place: Any) -> Cell:
    arm = (place.pop("drafter", "d"), place.pop("policy", "chain:draft_length=2"))
    key = {"temperature": 0.0, "batch_size": len(outputs), "group": group, "repeat": repeat, "turn": 0, **place}
    return Cell.of(arm, Place(**key), [f"{group}.{number}" for number in range(len(outputs))], list(outputs))


def row(**changes: Any) -> dict[str, Any]:
    """A row that nothing is wrong with."""
    values = {
        "drafter": "d",
        "drafter_type": "draft_model",
        "policy": "chain:draft_length=2",
        "draft_length": 2,
        "rule": "best lossless",
        "lossless": True,
        "temperature": 0.0,
        "batch_size": 1,
        "category": "all",
        "prompts": 2,
        "alpha": 0.8,
        "alpha_interval": [0.7, 0.9],
        "tau": 2.4,
        "tau_interval": [2.2, 2.6],
        "speedup": 1.5,
        "speedup_interval": [1.4, 1.6],
        "acceptance_at": [0.8, 0.75],
        "baseline_tokens_per_second": 100.0,
        "tokens_per_second": 150.0,
        "draft_share": 0.3,
        "verify_share": 0.6,
        "overhead_share": 0.1,
        "speedup_repeats": [1.5],
        "prefill_seconds": 0.1,
        "baseline_prefill_seconds": 0.1,
        "decode_tokens": 100,
        "repeated_4grams": 0.0,
        "greedy_identical": [2, 2],
    }
    return {**values, **changes}


PLAIN = {
    "prompts": 4,
    "identical": 4,
    "generate_tokens_per_second": 90.0,
    "baseline_tokens_per_second": 100.0,
    "ratio": 1.1,
    "ratio_interval": [1.05, 1.2],
}


def evaluation(rows: list[dict[str, Any]] | None = None, **changes: Any) -> Evaluation:
    settings = Settings(target="t", drafters={"d": "folder"}, prompts="p.jsonl")
    values = {"rows": rows or [row()], "environment": environment(), "plain": PLAIN, **changes}
    return Evaluation(settings, **{"identity": {"target": "t0", "prompts": "p0"}, **values})


def measured(
    name: str,
    speed: float,
    *,
    prompts: int = 30,
    noise: float = 0.05,
    seed: int = 0,
    policy: str = "chain:draft_length=4",
) -> dict[str, Any]:
    """The content of an `eval.json` of one drafter that is `speed` times as fast as the target alone, more or less.

    Prompts differ widely, and alike for every seed: only the noise is another one.
    """
    chance, found = random.Random(f"{name}{seed}"), []
    hard = random.Random(0)
    difficulty = [hard.uniform(0.6, 1.4) for _ in range(prompts)]
    for arm in (BASELINE, (name, policy)):
        alone = arm == BASELINE
        factors = [1.0 if alone else speed * d for d in difficulty]
        seconds = [[100 / f * chance.gauss(1, noise) for _ in range(3)] for f in factors]
        rounds = [[100 / (1.0 if alone else 1.3 * f * chance.gauss(1, noise / 2)) for _ in range(3)] for f in factors]
        tokens, nothing = [[100.0] * 3] * prompts, [[0.0] * 3] * prompts
        series = {"tokens": tokens, "rounds": rounds, "seconds": seconds, "overlap": nothing, "overlaps": nothing}
        head = {"drafter": arm[0], "policy": arm[1], "temperature": 0.0, "batch_size": 1}
        found.append({**head, "units": [[str(u)] for u in range(prompts)], **series})
    return evaluation(measurements=found).as_json()
