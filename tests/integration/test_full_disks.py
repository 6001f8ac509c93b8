"""Full and read-only disks: one line before the work; in the middle of it, what is known is kept or shown."""

import errno
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import run

from draftsmith.distill import dataset as examples
from draftsmith.distill import regeneration as samples
from draftsmith.eval import evaluation as measure
from draftsmith.eval.forecast import command as forecast
from draftsmith.eval.journal import Journal
from draftsmith.train import trainer as loop
from draftsmith.train.recipe import load_recipe

SMALL = ["--max-new-tokens", "6", "--temperature", "0"]


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Files end there, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refuse_to_write(*_: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def asked(recipe_file: Path, prompts: Path, tmp_path: Path) -> dict[str, list[str]]:
    """Command lines, by what they do; each writes into `out` alone."""
    target = ["--target", str(tmp_path / "tiny-target")]
    pair = [*target, "--drafter", "prompt-lookup", "--prompts", str(prompts)]
    out = ["--out", str(tmp_path / "out")]
    return {
        "eval": ["eval", *pair, *out, "--repeats", "2", *SMALL],
        "forecast": ["forecast", *pair, *out, "--max-draft-length", "2", *SMALL],
    }


def test_a_complete_cache_is_read_where_nothing_can_be_written(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["train.steps=1", "evaluation.count=1"]
    loop.train(load_recipe(str(recipe_file), overrides))
    for module in (examples, samples):
        monkeypatch.setattr(module, "hold_cache", None)
    assert loop.train(load_recipe(str(recipe_file), [*overrides, f"output={tmp_path}/again"])).is_dir()


def test_a_measurement_continues_where_the_disk_was_full(
    asked: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Full in the middle of a cell, which leaves half a line; then while the report is written."""
    file, original, added = tmp_path / "out" / "cells.jsonl", Journal.add, []

    def add(self: Journal, cell: Any) -> None:
        added.append(cell.key)
        with no_file_beyond(file.stat().st_size + 20 if len(added) == 4 else resource.RLIM_INFINITY):
            original(self, cell)

    def write_report(*arguments: Any, **options: Any) -> None:
        with no_file_beyond(100):
            report(*arguments, **options)

    report = measure.write_report
    monkeypatch.setattr(Journal, "add", add)
    with monkeypatch.context() as patched:
        patched.setattr(measure, "write_report", write_report)
        for place in (file, tmp_path / "out"):
            assert run(*asked["eval"]) == 2
            line = capsys.readouterr().err.splitlines()[-1]
            assert line == (
                f"DraftsmithError: {place} cannot be written (File too large); earlier results are kept; with "
                "enough space, the same command continues from them"
            )
    everything = len(added)
    assert run(*asked["eval"]) == 0
    assert len(added) == everything, "nothing is measured again"
    assert len(added) - 1 == len(set(added)) == 12, "the cell in hand alone was lost"
    assert json.loads((tmp_path / "out" / "eval.json").read_text())["rows"]


def test_a_forecast_that_cannot_be_kept_is_shown(
    asked: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forecast, "write_json", refuse_to_write)
    assert run(*asked["forecast"]) == 2
    printed = capsys.readouterr()
    assert "best at T=0, batch size 1:" in " ".join(printed.out.split())
    assert printed.err.splitlines()[-1] == (
        f"DraftsmithError: {tmp_path / 'out'}/forecast.json cannot be written (No space left on device); the results "
        "are printed above"
    )
