"""Drafters in published layouts: training continues at their loss, and commands accept their folders."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from commands import run as command
from commands import write_prompts
from conftest import make_llama, make_tokenizer, mostly_slow
from parity.published_files import Tensors, six_layers, written
from parity.test_native_mtp import make_target
from parity.test_round_trips import (
    LAYOUTS,
    _within,
    angelslim_dflash,
    angelslim_eagle3,
    deepspec_eagle3,
    nvidia_dspark,
    specforge_dspark,
    zlab_dflash,
)
from run_results import losses_of
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.distill.load_target import load_target
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS
from draftsmith.heads.base import TrainableDrafter
from draftsmith.heads.checkpoint import describe_target, load_drafter, save_drafter
from draftsmith.hub.export import export_drafter
from draftsmith.train import trainer as loop
from draftsmith.train.models import with_rate, with_section
from draftsmith.train.recipe import load_recipe
from draftsmith.train.run_folder import read_metrics

QUICK = ("evaluation.count=2", "evaluation.max_new_tokens=4", "train.evaluate_every=30", "train.draft_length=2")
BLOCK = "layers: [1], block_size: 4, num_hidden_layers: 1, anchors: 8"
CONTINUED: dict[str, tuple[str, tuple[str, ...]]] = {
    "medusa": ("{type: medusa, num_heads: 2}", ("vllm",)),
    "eagle, hass": ("{type: eagle, train_steps: 2}", ("sglang",)),
    "eagle3": ("{type: eagle3, train_steps: 2}", ("vllm", "sglang")),
    "peagle": ("{type: peagle, layers: [1], num_tokens: 3}", ("vllm",)),
    "dflash": (f"{{type: dflash, {BLOCK}}}", ("vllm", "sglang")),
    "dspark": (
        f"{{type: dflash, {BLOCK}, sample_from_anchor: true, markov_rank: 4, confidence_head: true}}",
        ("vllm", "sglang"),
    ),
}
"""The section `drafter`, and the formats that its drafter is published in."""


def run(recipe: Path, *overrides: str) -> list[float]:
    """Return the losses of a run."""
    loaded = load_recipe(str(recipe), [*QUICK, *overrides])
    loop.train(loaded)
    return losses_of(Path(loaded.output))


def trained(recipe_file: Path, output: Path, *overrides: str) -> tuple[TrainableDrafter, list[float]]:
    """Return the drafter after 30 steps, whatever its tau, and the losses of all steps."""
    recipe = load_recipe(str(recipe_file), [*QUICK, "train.steps=30", f"output={output}", *overrides])
    first = loop.TrainingRun(recipe, Accelerator(cpu=True), output)
    first.train()
    first.record.close()
    drafter = first.drafter.eval()
    return drafter, losses_of(output)


def assert_continues(found: list[float], own: list[float], before: list[float]) -> None:
    """Assert that the first loss is the trained drafter's own on the same batch, not that of a fresh one."""
    assert found[0] == pytest.approx(own[0], rel=1e-5)
    assert found[0] < (before[0] + min(before)) / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTINUED)
def test_a_run_continues_a_published_drafter(name: str, recipe_file: Path, tmp_path: Path) -> None:
    section, formats = CONTINUED[name]
    if name == "eagle3":  # three layers to read
        make_llama(num_hidden_layers=7).save_pretrained(tmp_path / "tiny-target")
    drafter, before = trained(recipe_file, tmp_path / "first", f"drafter={section}")
    target = load_target(str(tmp_path / "tiny-target"))
    described = describe_target(target.model, target.tokenizer, "tiny")
    save_drafter(drafter, tmp_path / "ours", target=described, recipe=None, draft_length=2)
    start = (f"drafter={section}", "train.steps=1")
    own = run(recipe_file, *start, f"start_from={tmp_path}/ours", f"output={tmp_path}/own")
    for format in formats:
        folder = export_drafter(drafter, target.model, format, tmp_path / format, target_name="tiny").folder
        found = run(recipe_file, *start, f"start_from={folder}", f"output={tmp_path}/{format}-run")
        assert_continues(found, own, before)


@pytest.mark.slow
def test_a_run_continues_a_module_in_the_targets_files(
    recipe_file: Path, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Fine-tuned, written into a copy of the target, and trained on from there under both of its names."""
    model, copy = tmp_path / "with-module", tmp_path / "copy"
    make_target("MiMo", model)
    tiny_tokenizer.save_pretrained(model)
    first = ("drafter={type: mtp, init: native, train_steps: 2}", f"target.model={model}")
    drafter, before = trained(recipe_file, tmp_path / "first", *first)
    target = load_target(str(model))
    described = describe_target(target.model, target.tokenizer, "tiny")
    save_drafter(drafter, tmp_path / "ours", target=described, recipe=None, draft_length=2)
    own = run(recipe_file, *first, "train.steps=1", f"start_from={tmp_path}/ours", f"output={tmp_path}/own")
    out = export_drafter(drafter, target.model, "native", tmp_path / "native", target_name="tiny").folder
    shutil.copytree(model, copy)
    for file in out.glob("*.safetensors"):
        shutil.copy(file, copy)
    start = (first[0], f"target.model={copy}", "train.steps=1")
    assert_continues(run(recipe_file, *start, f"output={tmp_path}/init"), own, before)
    assert_continues(run(recipe_file, *start, "start_from=native-mtp", f"output={tmp_path}/named"), own, before)


# Published drafters whose options the recipe does not name.

PROJECTS = ("speculators", "zlab", "deepspec", "nemotron", "sglang")
PUBLISHED = {
    make.__name__: (make, format)
    for make, format in LAYOUTS
    if format in ("vllm", "sglang") and make.__name__.split("_")[0] in PROJECTS
}
CONVERTED = {"specforge_dspark": (specforge_dspark, "sglang"), "nvidia_dspark": (nvidia_dspark, "vllm")}
"""Layouts that are written back with other names."""
PUBLISHED |= CONVERTED


@pytest.mark.parametrize("name", mostly_slow(PUBLISHED, "deepspec_dspark"))
def test_one_command_continues_a_published_folder(
    name: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shipped recipe without a section: alpha is the imported drafter's, then rises; the layout returns."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    make, format = PUBLISHED[name]
    config, tensors = make(six_layers())
    folder, model = written(tmp_path / "published", config, tensors), load_target(str(target)).model
    prompts = write_prompts(tmp_path / "prompts.jsonl", *("abcdefgh"[i % 5 :] for i in range(24)))
    small = [f"target.model={target}", f"data.prompts={prompts}", "data.response_tokens=16", "train.seed=3"]
    small += ["train.batch_size=8", "train.learning_rate=3e-3", "train.gradient_accumulation=1"]
    small += [*QUICK, "train.evaluate_every=25"]
    assert command("import", folder, "--target", target, "--out", tmp_path / "ours", "--no-self-test") == 0
    alphas, drafters = [], []
    for start, steps in ((folder, 25), (tmp_path / "ours", 1)):
        output = tmp_path / f"from-{start.name}"
        given = [*small, f"start_from={start}", f"output={output}", f"train.steps={steps}"]
        recipe = with_section(with_rate(load_recipe("continue/any_prompts", given)))
        run = loop.TrainingRun(recipe, Accelerator(cpu=True), output)
        run.train()
        run.record.close()
        alphas.append([row["alpha"][0] for row in read_metrics(output) if "alpha" in row])
        drafters.append(run.drafter.eval())
    assert alphas[0][0] == alphas[1][0], "the drafter as it was imported"
    assert alphas[0][-1] > alphas[0][0]
    out = export_drafter(drafters[0], model, format, tmp_path / "out", target_name="org/target", dtype="float32").folder
    if name in CONVERTED:
        again = load_drafter(out, model)
        assert isinstance(again, TrainableDrafter)
        assert again.options() == drafters[0].options()
        return
    stored = load_file(next(out.glob("*.safetensors")))
    assert {key: value.shape for key, value in stored.items()} == {key: value.shape for key, value in tensors.items()}
    again, kept = json.loads((out / "config.json").read_text()), {"speculators_version", "speculators_config"}
    assert {key for key in config.keys() - kept - {"rope_theta"} if not _within(config[key], again[key])} == set()


CONTRADICTED = {
    "drafter={type: eagle3}": "drafter.type='eagle3'; expected 'dflash', as start_from=",
    "drafter={type: dflash, layers: [1, 4]}": "drafter.layers=[1, 4]; expected [2, 4], as start_from=",
}


@pytest.mark.parametrize("change", CONTRADICTED)
def test_keys_that_contradict_a_published_folder_are_refused(
    change: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the target's weights are loaded."""
    folder = written(tmp_path / "published", *zlab_dflash(six_layers()))
    given = [f"target.model={target}", f"start_from={folder}", f"output={tmp_path}/out", change]
    monkeypatch.setattr("draftsmith.distill.load_target.load_target", None)
    with pytest.raises(ConfigError, match=re.escape(CONTRADICTED[change])):
        loop.train(load_recipe("continue/any_prompts", [*given, f"data.prompts={__file__[:-3]}.nosuch"]))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("hidden_size", 64, "hidden_size=64 in config.json; expected 32"),
        ("vocab_size", 65, "vocab_size=65 in config.json; expected 64"),
        ("num_target_layers", 7, "num_target_layers=7 in config.json; expected 6"),
    ],
)
def test_a_drafter_of_another_target_is_not_continued(
    key: str, value: int, said: str, target: Path, tmp_path: Path
) -> None:
    config, tensors = zlab_dflash(six_layers())
    folder = written(tmp_path / "published", config | {key: value}, tensors)
    given = [f"target.model={target}", f"start_from={folder}", f"output={tmp_path}/out"]
    with pytest.raises(ConfigError, match=said):
        with_section(load_recipe("continue/any_prompts", given))


@pytest.mark.parametrize("kind", ["eagle3", "draft_model", "a plain model"])
def test_a_drafter_with_another_vocabulary_is_not_continued(kind: str, target: Path, tmp_path: Path) -> None:
    """Refused before its memory is estimated and the target is loaded."""
    other, folder = make_llama(num_hidden_layers=6, vocab_size=72), tmp_path / "drafter"
    if kind == "a plain model":
        make_llama(num_hidden_layers=1, vocab_size=72).save_pretrained(folder)
        said = "has a vocabulary of 72; expected the target's 64, or the target's tokenizer"
    else:
        drafter = HEADS[kind].from_target(other)
        save_drafter(drafter, folder, target=describe_target(other, None, "other"), recipe=None, draft_length=2)
        said = "was trained for other with vocab_size=72; expected the target's 64"
    with pytest.raises(ConfigError, match=said):
        with_section(load_recipe("continue/any_prompts", [f"target.model={target}", f"start_from={folder}"]))


def test_options_of_training_beside_a_published_drafter(target: Path, tmp_path: Path) -> None:
    """Without its type, which is read from the files; keys are checked as in a section with it."""
    folder = written(tmp_path / "published", *zlab_dflash(six_layers()))
    given = [f"target.model={target}", f"start_from={folder}", "output=out"]
    section = with_section(load_recipe("continue/any_prompts", [*given, "drafter.anchors=8"])).drafter
    assert (section.type, section.model_dump()["anchors"], section.model_dump()["block_size"]) == ("dflash", 8, 4)
    for key, said in {
        "anchors=0": "drafter.anchors=0; expected >= 1",
        "block_size=3": "drafter.block_size=3; expected 4, as start_from=",
        "train_steps=2": "unknown key drafter.train_steps=2; expected one of type, ",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(said)):
            with_section(load_recipe("continue/any_prompts", [*given, f"drafter.{key}"]))


def test_a_drafter_with_another_tokenizer_is_not_continued(target: Path, tmp_path: Path) -> None:
    """Before the target is loaded; a tokenizer with the target's tokens and one for the mask is accepted."""
    folder = written(tmp_path / "published", *zlab_dflash(six_layers()))
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|MASK|>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    given = load_recipe("continue/any_prompts", [f"target.model={target}", f"start_from={folder}", "output=out"])
    assert with_section(given).drafter.type == "dflash"
    stored = folder / "tokenizer.json"
    rules = json.loads(stored.read_text())
    vocabulary = rules["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    stored.write_text(json.dumps(rules))
    said = f"its tokenizer has 'b' for id {vocabulary['b']}; expected the target's 'a', or no tokenizer beside it"
    loaded = load_target(str(target))
    for read in (lambda: with_section(given), lambda: load_drafter(folder, loaded.model, loaded.tokenizer)):
        with pytest.raises(ConfigError, match=re.escape(said)):
            read()


# The commands that read a drafter.

Folder = tuple[dict[str, Any], Tensors]
FOLDERS: dict[str, tuple[Callable[[LlamaForCausalLM], Folder], str]] = {
    f"{make.__name__}-{format}": (make, format) for make, format in LAYOUTS
}
FOLDERS |= {
    "angelslim_eagle3": (angelslim_eagle3, "sglang"),
    "angelslim_dflash": (angelslim_dflash, "sglang"),
    "deepspec_eagle3": (deepspec_eagle3, "transformers"),
    "specforge_dspark": (specforge_dspark, "sglang"),
}
CHECKED = ("deepspec_dspark-sglang", "deepspec_eagle3", "speculators_peagle-vllm")
PROFILE = {
    "name": "a machine on paper",
    "alone": {1: 1.0},
    "verify": {1: {1: 1.0, 9: 1.0}},
    "drafters": {"*": {"draft": {1: {1: 0.1, 8: 0.2}}}},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    six_layers().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def assert_commands_accept(
    drafter: Path | str, format: str, target: Path, tmp_path: Path, *, check: bool = False
) -> None:
    """Run `eval`, `forecast` and `export`; with `check` also that, which samples 500 tokens twice at least."""
    write_prompts(tmp_path / "prompts.jsonl", "abcd")
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    given = ("--target", target, "--drafter", drafter, "--prompts", tmp_path / "prompts.jsonl", "--count", 1)
    short = ("--max-new-tokens", 3, "--temperature", 1)
    assert command("eval", *given, *short, "--repeats", 1, "--out", tmp_path / "eval") == 0
    assert command("forecast", *given, *short, "--profile", tmp_path / "profile.json", "--max-draft-length", 2) == 0
    assert command("export", drafter, "--format", format, "--target", target, "--out", tmp_path / "again") == 0
    if check:
        assert command("check", *given, "--temperature", 1, "--tokens", 500) == 0


@pytest.mark.parametrize("name", mostly_slow(FOLDERS, "deepspec_eagle3"))
def test_commands_accept_a_published_folder(
    name: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, format = FOLDERS[name]
    if name not in CHECKED:  # pictures show numbers, whatever the layout was
        monkeypatch.setattr("draftsmith.eval.plots.evaluation_plots", lambda rows: [])
    folder = written(tmp_path / "d", *make(six_layers()))
    assert_commands_accept(folder, format, target, tmp_path, check=name in CHECKED)


@pytest.mark.slow
def test_commands_accept_a_module_in_the_targets_files(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    make_target("MiMo", tmp_path / "t")
    tiny_tokenizer.save_pretrained(tmp_path / "t")
    assert_commands_accept("native-mtp", "native", tmp_path / "t", tmp_path, check=True)
