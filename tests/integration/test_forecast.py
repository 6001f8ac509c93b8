"""`draftsmith forecast` on tiny models: what it writes, profiles of other machines, and every refusal."""

import json
import os
from pathlib import Path

import pytest
import yaml
from commands import run, write_prompts
from conftest import make_llama

from draftsmith.errors import ConfigError
from draftsmith.eval.forecast.profile import costs_of, read_profile

PROFILE = {
    "name": "a machine on paper",
    "alone": {1: 1.0, 8: 1.0},
    "verify": {1: {1: 1.0, 9: 1.0}, 8: {1: 1.0, 9: 17.0}},
    "drafters": {"self": {"draft": {1: {1: 0.1, 2: 0.2}}}, "*": {"draft": {1: {1: 0.5}}, "round": {1: 0.25}}},
}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    file = tmp_path / "profile.yaml"
    file.write_text(yaml.safe_dump(PROFILE))
    return file


def test_a_whole_forecast(
    tmp_path: Path,
    tiny_target_folder: Path,
    medusa_folder: Path,
    prompts: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for place, value in {"hardware.TURNS": 3, "hardware.ROUNDS": 1}.items():
        monkeypatch.setattr(f"draftsmith.eval.forecast.{place}", value)
    monkeypatch.setattr("draftsmith.decode.profiling.WIDTHS", (1, 4))
    out, saved = tmp_path / "out", tmp_path / "profile.json"
    call = ["forecast", "--target", tiny_target_folder, "--drafter", medusa_folder, "--drafter", "prompt-lookup"]
    call += ["--drafter", f"self={tiny_target_folder}", "--prompts", prompts, "--max-new-tokens", 16, "--out", out]
    call += ["--temperature", 0, "--max-draft-length", 3, "--batch-size", 1, "--batch-size", 2]
    assert run(*call, "--policy", "best-first:size=4,depth=2", "--policy", "adaptive", "--save-profile", saved) == 0
    written = json.loads((out / "forecast.json").read_text())
    assert written["schema"] == 1
    policies = {(row["drafter"], row["policy"]) for row in written["rows"]}
    chains = {f"chain:draft_length={n}" for n in (1, 2, 3)}
    assert {policy for drafter, policy in policies if drafter == "self"} == {
        *chains,
        "best-first:size=4,depth=2",
        "chain:draft_length=4",
    }
    assert {policy for drafter, policy in policies if drafter == "medusa"} == {
        "chain:draft_length=1",
        "chain:draft_length=2",
        "best-first:size=4,depth=2",
    }
    assert ("prompt-lookup", "copies") in policies
    for row in written["rows"]:
        assert row["tau_interval"][0] <= row["tau"] <= row["tau_interval"][1]
        assert [entry["batch_size"] for entry in row["speed"]] == [1, 2]
    own = next(r for r in written["rows"] if (r["drafter"], r["policy"]) == ("self", "chain:draft_length=3"))
    assert own["acceptance_at"] == [1.0, 1.0, 1.0], "a target that drafts for itself is always accepted"
    assert any("adaptive" in note and "learns" in note for note in written["notes"])
    assert not any("no seconds of rounds of" in note for note in written["notes"]), "policies besides chains are timed"
    assert [best["batch_size"] for best in written["best"]] == [1, 2]
    shown, said = capsys.readouterr()
    stages = ["generating texts with the target", "reading the texts with each drafter", "timing rounds"]
    assert said.index("loading the target") < said.index(f"T=0: {stages[0]}") < said.index(f"T=0: {stages[1]}")
    assert said.index(f"T=0: {stages[1]}") < said.index(f"T=0: {stages[2]}")
    assert "best at T=0, batch size 1:" in shown
    assert "of speedups also over 3 timings" in " ".join(shown.split())
    assert all(entry["timings"] == 3 for row in written["rows"] for entry in row["speed"])

    again = tmp_path / "again"
    call += ["--profile", saved, "--out", again]
    assert run(*call, "--policy", "best-first:size=4,depth=2") == 0
    rows = json.loads((again / "forecast.json").read_text())["rows"]
    assert rows == written["rows"], "the same texts on the same machine"
    capsys.readouterr()
    assert run(*call, "--policy", "best-first:size=4,depth=2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"] == rows


def test_a_profile_decides_what_is_best(
    tmp_path: Path, tiny_target_folder: Path, prompts: Path, profile: Path, capsys: pytest.CaptureFixture
) -> None:
    """The target drafts for itself: gamma + 1 tokens a round, which costs gamma tenths beside a pass at batch 1."""
    out = tmp_path / "out"
    call = ["forecast", "--target", tiny_target_folder, "--drafter", f"self={tiny_target_folder}", "--prompts", prompts]
    call += ["--max-new-tokens", 17, "--temperature", 0, "--max-draft-length", 3, "--policy", "chain:draft_length=3"]
    assert run(*call, "--batch-size", 1, "--batch-size", 8, "--profile", profile, "--out", out) == 0
    written = json.loads((out / "forecast.json").read_text())
    row = next(row for row in written["rows"] if row["policy"] == "chain:draft_length=3")
    by_batch = {entry["batch_size"]: entry["speedup"] for entry in row["speed"]}
    assert row["tau"] == 4.0, "16 tokens after the prefill's, in rounds of four"
    assert by_batch[1] == pytest.approx(4 / 1.3)
    assert by_batch[8] == pytest.approx(4 / (7.0 + 0.3))
    assert by_batch[8] < 1 < by_batch[1]
    assert written["best"][0]["policy"] == "chain:draft_length=3", "with four the last round drafts in vain"
    assert written["best"][1]["drafter"] is None
    assert "At T=0 speculation stops paying at batch size 8." in written["notes"]
    assert any("over texts alone: the profile holds no repeated timings" in note for note in written["notes"])
    printed = capsys.readouterr().out
    chosen = "--policy chain:draft_length=3"
    expected = f"next: draftsmith eval --target {tiny_target_folder} --drafter {tiny_target_folder} --prompts {prompts}"
    assert printed.splitlines()[-1] == f"{expected} {chosen}"
    shown = " ".join(printed.split())
    nearest = "self with chain:draft_length=1 is the nearest, 0.65x: a round commits 2.00 tokens and takes as long as"
    assert f"batch size 8: the target alone; no drafter is forecast to be faster: {nearest} 3.10 passes" in shown
    assert "verification, relative to one target forward pass at T=0, batch size 1: 9 tokens 1.00" in shown
    assert "verification, relative to one target forward pass at T=0, batch size 8: 9 tokens 17.00" in shown


def test_seconds_between_and_beyond_what_a_profile_knows(profile: Path) -> None:
    known = read_profile(profile)
    own, another = costs_of(known, "self"), costs_of(known, "another")
    assert own.round_seconds(3, 3, 1) == pytest.approx(1.0 + 0.3)
    assert own.round_seconds(4, 1, 8) == pytest.approx(9.0 + 0.1)
    assert another.round_seconds(2, 1, 1) == pytest.approx(1.0 + 0.5 + 0.25)
    assert another.round_seconds(2, 0, 1) == pytest.approx(1.0 + 0.25), "a copy costs no pass"
    between = (own.round_seconds(4, 1, 1) + own.round_seconds(4, 1, 8)) / 2
    assert own.round_seconds(4, 1, 4.5) == pytest.approx(between)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alone": {1: 0}}, "alone.1=0; expected greater than 0"),
        ({"verify": {1: {1: float("inf")}}}, "verify.1.1=inf; expected a finite number"),
        ({"speed": 3}, "unknown key speed; expected name, alone, verify or drafters"),
        ({"drafters": {"self": {"round": {1: 0.1}}}}, "drafters.self.draft is missing; expected seconds"),
        ("alone: [", "expected YAML or JSON"),
        ("- 1", "expected"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused(changes: dict[str, object] | str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.yaml"
    file.write_text(changes if isinstance(changes, str) else yaml.safe_dump({**PROFILE, **changes}))
    with pytest.raises(ConfigError) as refusal:
        read_profile(file)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_refusals_that_need_the_models(
    tmp_path: Path, tiny_target_folder: Path, prompts: Path, profile: Path, capsys: pytest.CaptureFixture
) -> None:
    short, out = tmp_path / "short", tmp_path / "out"
    make_llama(max_position_embeddings=16).save_pretrained(short)
    call = ["forecast", "--target", tiny_target_folder, "--prompts", prompts, "--out", out, "--temperature", 0]
    assert run(*call, "--drafter", short, "--max-new-tokens", 32, "--profile", profile) == 2
    assert "expected at most the draft_model drafter's context of 16" in capsys.readouterr().err
    profile.write_text(yaml.safe_dump({**PROFILE, "drafters": {"other": PROFILE["drafters"]["self"]}}))
    assert run(*call, "--drafter", f"mine={tiny_target_folder}", "--profile", profile) == 2
    assert "profile has no drafters.mine; expected its seconds, or `*` (there are: other)" in capsys.readouterr().err
    assert not out.exists()


ASSETS = Path(os.environ.get("DRAFTSMITH_ASSETS") or Path(__file__).parents[3] / "shared" / "assets")


@pytest.mark.slow
@pytest.mark.skipif(not (ASSETS / "models").is_dir(), reason="no pretrained models: set DRAFTSMITH_ASSETS")
def test_a_pretrained_pair_that_nobody_here_made(tmp_path: Path, profile: Path) -> None:
    """Greedily the forecast is of the very texts that are decoded: tau agrees to the last digit."""
    texts = ["Once upon a time, there was a", "Lily went to the park", "The dog was very", "One day, a boy named Tim"]
    prompts = write_prompts(tmp_path / "stories.jsonl", *texts)
    models, common = ASSETS / "models", ["--prompts", prompts, "--max-new-tokens", 48, "--temperature", 0]
    pair = ["--target", models / "stories260K", "--drafter", f"qat={models / 'stories260K-qat-polish256'}"]
    plan = ["--policy", "chain:draft_length=4", "--policy", "best-first:size=9,depth=3"]
    assert run("forecast", *pair, *common, *plan, "--profile", profile, "--out", tmp_path / "forecast") == 0
    assert run("eval", *pair, *common, *plan, "--repeats", 1, "--out", tmp_path / "eval") == 0
    predicted = json.loads((tmp_path / "forecast" / "forecast.json").read_text())["rows"]
    measured = json.loads((tmp_path / "eval" / "eval.json").read_text())["rows"]
    taus = {row["policy"]: row["tau"] for row in predicted}
    assert {row["policy"]: row["tau"] for row in measured if row["category"] == "all"} == pytest.approx(
        {policy: taus[policy] for policy in ("chain:draft_length=4", "best-first:size=9,depth=3")}
    )
