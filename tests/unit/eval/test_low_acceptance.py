"""Likely causes of a served drafter's lower acceptance, from made-up measurements that the real writer has written."""

import re
from pathlib import Path
from typing import Any

import pytest
from unit.eval.made import measured, row

from draftsmith.eval.compare import Comparison, compare_evaluations, comparison_table
from draftsmith.eval.results import EVALUATION, read_evaluation
from draftsmith.storage import write_json

POLICY = "chain:draft_length=4"
Rates = dict[float, list[float]]


def pair(
    tmp_path: Path, local: Rates, served: Rates, *, kind: str = "eagle3", name: str = "a", **changes: Any
) -> list[dict[str, Any]]:
    """A local and a served measurement with acceptance by temperature; `changes`: of the local drafter's config."""
    a, b = measured(name, 1.5), measured(name, 1.2, seed=1)
    (tmp_path / "drafter").mkdir()
    write_json(tmp_path / "drafter" / "config.json", changes)
    a["settings"] |= {"drafters": {name: str(tmp_path / "drafter")}}
    a["rows"] = [
        row(drafter=name, policy=POLICY, drafter_type=kind, temperature=t, acceptance_at=at) for t, at in local.items()
    ]
    b["identity"], b["environment"] = {**b["identity"], "target": "unknown"}, {**b["environment"], "cpu": "other"}
    entries = {True: a["measurements"], False: [e for e in b["measurements"] if e["drafter"] == name]}
    a["measurements"] = [{**entry, "temperature": t} for t in local for entry in entries[True]]
    b["measurements"] = [{**entry, "temperature": t, "policy": "engine"} for t in served for entry in entries[False]]
    b["rows"] = []
    b["server"] = [
        {
            **dict.fromkeys(("alpha", "tau", "tau_interval", "baseline_tokens_per_second", "speedup"), None),
            **{"temperature": t, "concurrency": 1, "prompts": 30, "tokens_per_second": 1.0, "speedup_interval": None},
            **{"milliseconds_per_token": 1.0, "acceptance_at": at},
        }
        for t, at in served.items()
    ]
    return [a, b]


def compared(tmp_path: Path, sides: list[dict[str, Any]], temperature: float) -> Comparison:
    read = []
    for name, content in zip("ab", sides, strict=True):
        (tmp_path / name).mkdir(exist_ok=True)
        write_json(tmp_path / name / EVALUATION, content)
        read.append(read_evaluation(tmp_path / name))
    return next(each for each in compare_evaluations(*read) if each.temperature == temperature)


GOOD, LOW, LATER, NEAR = [0.8, 0.7], [0.3, 0.2], [0.78, 0.4], [0.77, 0.65]


@pytest.mark.parametrize(
    ("local", "served", "options", "causes"),
    [
        ({0.0: GOOD}, {0.0: LOW}, {}, ["layer ids", "the prompt template"]),
        ({0.0: GOOD}, {0.0: LOW}, {"kind": "draft_model"}, ["the prompt template"]),
        (
            {0.0: GOOD},
            {0.0: LOW},
            {"draftsmith": {"draft_vocabulary": "x"}},
            ["layer ids", "the draft vocabulary", "the prompt template"],
        ),
        ({0.0: GOOD}, {0.0: LATER}, {"kind": "dflash"}, ["causality"]),
        ({0.0: GOOD}, {0.0: LATER}, {"rope_scaling": {"rope_type": "yarn"}}, ["the norms", "rotary scaling"]),
        ({0.0: [*GOOD, 0.6]}, {0.0: GOOD}, {}, ["the draft length"]),
        ({0.0: GOOD}, {0.0: NEAR}, {"name": "model-AWQ"}, ["the target is quantised", "dtype"]),
        ({0.0: GOOD}, {0.0: []}, {}, []),
        ({0.0: GOOD, 1.0: GOOD}, {0.0: NEAR, 1.0: LOW}, {}, ["drafts are the most likely"]),
        ({1.0: GOOD}, {1.0: LOW}, {}, ["layer ids", "the prompt template", "drafts are the most likely"]),
    ],
)
def test_the_causes_with_evidence_in_order(
    tmp_path: Path, local: Rates, served: Rates, options: dict[str, Any], causes: list[str]
) -> None:
    sides, temperature = pair(tmp_path, local, served, **options), max(local)
    found = compared(tmp_path, sides, temperature)
    named = re.split(r" \(\d\) ", found.cause)[1:]
    assert len(named) == len(causes)
    assert all(name.startswith(cause) for name, cause in zip(named, causes, strict=True)), named
    assert found.cause == compared(tmp_path, sides[::-1], temperature).cause, "in either order"
    shown = "does not count" if not served[temperature] else f"Acceptance by position: {local[temperature][0]:.2f} "
    assert shown in found.sentence
    assert comparison_table([found]).row_count == 1


@pytest.mark.parametrize(
    ("more", "cause"), [([5.0, 0.0], "(1) tokens after the end"), ([5.0, -5.0], "(1) the prompt template, or another")]
)
def test_greedy_texts_of_other_lengths(tmp_path: Path, more: list[float], cause: str) -> None:
    sides = pair(tmp_path, {0.0: GOOD}, {0.0: NEAR})
    (series,) = sides[1]["measurements"]
    series["tokens"] = [[count + more[place % 2] for count in counts] for place, counts in enumerate(series["tokens"])]
    assert cause in compared(tmp_path, sides, 0.0).cause


def test_no_cause_without_a_difference_or_of_two_local_measurements(tmp_path: Path) -> None:
    a, b = pair(tmp_path, {0.0: GOOD}, {0.0: LOW})
    b["measurements"] = [{**a["measurements"][1], "policy": "engine"}]
    assert not compared(tmp_path, [a, b], 0.0).cause
    assert not compared(tmp_path, [measured("a", 1.5), measured("a", 1.8, seed=1)], 0.0).cause
