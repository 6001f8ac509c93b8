"""The whole quickstart, as a user runs it. Minutes long: it builds and trains for real."""

import importlib
import json
from pathlib import Path

import pytest
import yaml
from commands import run


@pytest.mark.slow
def test_quickstart_writes_everything_and_reuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    quickstart_module = importlib.import_module("draftsmith.cli.quickstart")  # the package has a command of that name
    monkeypatch.setattr(quickstart_module, "PROMPTS", 5)
    monkeypatch.setattr(quickstart_module, "NEW_TOKENS", 24)
    monkeypatch.setattr(quickstart_module, "REPEATS", 1)
    monkeypatch.setattr(quickstart_module, "FORECAST_PROMPTS", 2)
    out = tmp_path / "runs: all #1"
    for policies in ("adaptive", None):  # the second call may choose others
        assert run("quickstart", "--out", out) == 0
        if policies is not None:
            stored = json.loads((out / "eval.json").read_text())
            stored["settings"]["policies"] = [policies]
            (out / "eval.json").write_text(json.dumps(stored))
    rows = json.loads((out / "eval.json").read_text())["rows"]
    overall = [(row["drafter"], row["temperature"]) for row in rows if row["category"] == "all"]
    assert overall == [(name, temperature) for name in ("draft_model", "mtp", "hybrid") for temperature in (0.0, 1.0)]
    assert json.loads((out / "forecast" / "forecast.json").read_text())["best"]
    for name in ("report.md", "speedup.png", "acceptance.png", "training.png"):
        assert (out / name).stat().st_size > 500
    for name in ("draft_model", "mtp"):
        card = (out / name / "drafter" / "README.md").read_text()
        library = {"draft_model": "transformers", "mtp": "draftsmith"}[name]
        assert yaml.safe_load(card.split("---")[1])["library_name"] == library
    said = capfd.readouterr().err
    assert "already finished" in said, "the second call trained again"
    stages, *_ = said.split("The quickstart took")
    assert "next: " not in stages, "the quickstart is not over"
    measured = {row["drafter"]: row["policy"] for row in rows}
    for name, policy in measured.items():
        assert f"  {name}: {policy}, " in said.split("3/4")[-1], "announced and measured policies differ"
