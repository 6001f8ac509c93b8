"""The recipe's section `publish`: checked at the start, done at the end."""

import json
from pathlib import Path

import pytest
from hub_server import TOKEN, Hub
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM

from draftsmith import load_drafter
from draftsmith.distill.load_target import load_target
from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.train import trainer as loop
from draftsmith.train.recipe import load_recipe
from draftsmith.train.run_folder import read_metrics

REPO = "user/tiny"


def _train(recipe: Path, *overrides: str) -> Path:
    return loop.train(load_recipe(str(recipe), list(overrides)))


def _commits(hub: Hub) -> list[str]:
    return hub.repositories[REPO].messages[1:]


def test_at_the_end(hub: Hub, recipe_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    given = (f"publish.repo={REPO}", "publish.private=true", "publish.licence=mit", "publish.base_model=org/tiny")
    drafter = _train(recipe_file, *given)
    assert hub.repositories[REPO].private
    finished = json.loads((tmp_path / "run" / "finished.json").read_text())
    assert _commits(hub) == [f"tiny: finished, best at step {finished['best_step']}"]
    files = hub.repositories[REPO].files()
    assert {"plots/training.png", "model.safetensors", "tokenizer.json"} < files.keys()
    assert "\nlicense: mit\n" in files["README.md"].decode()
    assert files["model.safetensors"] == (drafter / "model.safetensors").read_bytes()
    assert "publish" not in files["config.json"].decode(), "who adapts it does not push to the same place"
    assert f"published at {hub.url}/{REPO}" in capfd.readouterr().err
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny-target")
    assert load_drafter(REPO, target).draft_length_hint == 3

    asked = len(hub.asked)
    assert _train(recipe_file, *given) == drafter
    assert len(hub.asked) == asked, "published already"
    assert _train(recipe_file) == drafter
    assert _train(recipe_file, *given, "publish.revision=again") == drafter
    assert "model.safetensors" in hub.repositories[REPO].files("again"), "the same run, published elsewhere too"
    for file in (tmp_path / "run").rglob("*"):
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes()


def test_refused_before_any_work(hub: Hub, recipe_file: Path, tmp_path: Path) -> None:
    for given, message in (
        ("other/name", r"has no write access to it \(403\)"),
        ("a/b/c", r"publish\.repo='a/b/c'; expected user/name"),
    ):
        with pytest.raises(ConfigError, match=message):
            _train(recipe_file, f"publish.repo={given}")
        assert not (tmp_path / "run").exists()
    hub.fail = {"POST .*/preupload/": 403}  # a repository that is there, and that others may write to
    with pytest.raises(ConfigError, match=r"has no write access to it \(403\)"):
        _train(recipe_file, f"publish.repo={REPO}")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="licence='A B'; expected"):
        _train(recipe_file, f"publish.repo={REPO}", "publish.licence=A B")
    with pytest.raises(ConfigError, match=r"publish\.repo is missing"):
        load_recipe(str(recipe_file), ["publish.private=true"])


def test_a_push_that_fails_at_the_end_loses_nothing(
    hub: Hub, recipe_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    hub.drop = lambda size: True
    with pytest.raises(DraftsmithError, match="the run is finished and its drafter is in") as failed:
        _train(recipe_file, f"publish.repo={REPO}")
    assert f"draftsmith push {tmp_path}/run/drafter {REPO}" in str(failed.value)
    assert (tmp_path / "run" / "finished.json").is_file()
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny-target")
    assert load_drafter(tmp_path / "run" / "drafter", target).draft_length_hint == 3
    assert not _commits(hub)
    steps = len(read_metrics(tmp_path / "run"))
    (tmp_path / "run" / "finished.json").unlink()
    hub.fail = {"POST /api/repos/create": 503}
    with pytest.raises(DraftsmithError, match="the run is finished and its drafter is in"):
        _train(recipe_file, f"publish.repo={REPO}")
    err = capfd.readouterr().err
    assert f"warning: push={REPO}: the Hub answered 503" in err, "a run that has begun does not wait for the Hub"
    with pytest.raises(DraftsmithError, match=r"^push="):
        _train(recipe_file, f"publish.repo={REPO}", f"output={tmp_path}/new")
    assert not (tmp_path / "new").exists()
    hub.fail = {}
    hub.drop = lambda size: False
    _train(recipe_file, f"publish.repo={REPO}")
    assert len(_commits(hub)) == 1, "the same command only publishes"
    assert len(read_metrics(tmp_path / "run")) == steps


def test_a_target_that_was_trained_too(
    hub: Hub, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its adapter goes along, and the drafter loads for the two together."""
    options = ("drafter.type=medusa", "cotrain.lora_rank=4", "cotrain.max_quality_kl=5", "cotrain.warmup_fraction=0")
    _train(recipe_file, f"publish.repo={REPO}", *options)
    files = hub.repositories[REPO].files()
    assert {"target/adapter_config.json", "target/adapter_model.safetensors", "target/tokenizer.json"} < files.keys()
    assert str(tmp_path).encode() not in files["target/adapter_config.json"] + files["config.json"]
    folder = Path(snapshot_download(REPO))
    config = json.loads((folder / "target" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny-target"
    monkeypatch.chdir(tmp_path)  # where a folder of that name lies
    target = load_target(str(folder / "target"))
    drafter = load_drafter(REPO, target.model, target.tokenizer)
    assert drafter.target_quality["kl"] >= 0
