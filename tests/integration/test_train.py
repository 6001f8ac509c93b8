"""Recipe to checkpoint to decoder on a tiny target: learning, resuming, several processes."""

import json
import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from commands import write_rows
from conftest import LETTERS, mostly_slow
from forked import Processes, Server
from run_results import as_if_killed, finished, losses_of, metrics_of, taus_of
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from draftsmith import SpeculativeDecoder, load_drafter
from draftsmith.distill.load_target import load_target
from draftsmith.errors import ConfigError
from draftsmith.train import models
from draftsmith.train import trainer as loop
from draftsmith.train.estimate.memory import announce_memory
from draftsmith.train.placement import placement_of
from draftsmith.train.recipe import load_recipe
from draftsmith.train.run_folder import read_metrics


@pytest.fixture(scope="module")
def forked(run_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Processes:
    """Starts runs that import nothing anew, with one cache of samples for all of them."""
    return Processes(run_server, {"DRAFTSMITH_CACHE": str(tmp_path_factory.mktemp("cache"))})


LEARNERS = {
    "draft_model": [],
    "draft_model with lora": ["drafter.init=target_layers", "drafter.lora_rank=8"],
    "medusa": [],
    "medusa of 20 tokens": ["drafter.draft_vocab_size=20"],
    "eagle": ["objective.feature_weight=0.1"],
    "hass": ["objective.top_k_weight=1.0"],
    "eagle of 20 tokens": ["drafter.draft_vocab_size=20", "objective.feature_weight=0.1"],
    "eagle3": ["drafter.layers=[1,2]"],
    "eagle3 of 20 tokens": ["drafter.layers=[1,2]", "drafter.draft_vocab_size=20", "train.optimizer=muon"],
    "mtp": [],
    "mtp of 20 tokens": ["drafter.draft_vocab_size=20"],
    "peagle": ["drafter.layers=[1,2]"],
    "dflash": ["drafter.layers=[1,2]", "drafter.block_size=4"],
    "dflash with all of it": ["drafter.layers=[2]", "drafter.markov_rank=4", "drafter.confidence_head=true"],
}


RARELY = ("train.evaluate_every=15", "train.checkpoint_every=15")


@pytest.mark.parametrize("drafter", mostly_slow(LEARNERS, "draft_model", "eagle3"))
def test_a_drafter_learns_to_agree(drafter: str, recipe_file: Path, tmp_path: Path) -> None:
    # These begin near the loss of the tokens' frequencies, and entropies are a large part of their terms.
    steps = 120 if drafter in ("hass", "dflash with all of it") else 30
    overrides = [f"drafter.type={drafter.split()[0]}", f"train.steps={steps}", "train.learning_rate=1e-2"]
    folder = loop.train(load_recipe(str(recipe_file), [*overrides, *RARELY, *LEARNERS[drafter]]))
    losses = losses_of(tmp_path / "run")
    assert len(losses) == steps
    # With 20 of 64 tokens much of the target's mass is out of reach, and pruned layers begin near their goal.
    assert sum(losses[-5:]) < (0.97 if "tokens" in drafter or "lora" in drafter else 0.9) * sum(losses[:5])
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny-target")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny-target")
    decoder = SpeculativeDecoder(target, load_drafter(folder, target, tokenizer))
    assert decoder.policy.draft_length == 3
    prompt = [5, 6, 7, 8]
    out = decoder.generate(prompt, max_new_tokens=30)
    assert out.tokens == SpeculativeDecoder(target).generate(prompt, max_new_tokens=30).tokens
    assert finished(tmp_path / "run")["best_tau"] == max(taus_of(tmp_path / "run"))
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2


def test_of_equal_taus_the_last_is_kept(recipe_file: Path, tmp_path: Path) -> None:
    # One token comes from the prompt's pass and one from the only round, whose draft has no room: tau is 1.
    settings = ["train.steps=2", "train.evaluate_every=1", "evaluation.max_new_tokens=2"]
    loop.train(load_recipe(str(recipe_file), settings))
    assert taus_of(tmp_path / "run") == [1.0, 1.0, 1.0]
    assert finished(tmp_path / "run")["best_step"] == 2


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="random", marks=pytest.mark.slow),
        pytest.param(["drafter.init=target_layers", "drafter.keep=first"], id="pruned"),
    ],
)
def test_an_encoder_decoder_draft_model_learns(
    options: list[str], recipe_file: Path, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """A small T5 for a T5: the prompt goes to both encoders, the response is drafted."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "relative_attention_num_buckets": 8}
    torch.manual_seed(0)
    config = T5Config(vocab_size=64, **sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    target = T5ForConditionalGeneration(config).eval()
    for parameter in target.parameters():
        parameter.data *= 3
    target.save_pretrained(tmp_path / "t5")
    tiny_tokenizer.save_pretrained(tmp_path / "t5")
    overrides = [f"target.model={tmp_path / 't5'}", "train.steps=40", "train.learning_rate=1e-2", *RARELY, *options]
    with pytest.raises(ConfigError, match=r"data\.train_on='all' with a target of model_type='t5'; expected 'answers'"):
        loop.train(load_recipe(str(recipe_file), [*overrides, "data.train_on=all"]))
    folder = loop.train(load_recipe(str(recipe_file), overrides))
    losses = losses_of(tmp_path / "run")
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    target = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "t5")
    drafter = load_drafter(folder, target, AutoTokenizer.from_pretrained(tmp_path / "t5"))
    out = SpeculativeDecoder(target, drafter).generate([5, 6, 7, 8], max_new_tokens=20)
    assert out.tokens == SpeculativeDecoder(target).generate([5, 6, 7, 8], max_new_tokens=20).tokens


@pytest.mark.parametrize(
    "drafter", mostly_slow(["eagle", "eagle3 of 20 tokens", "dflash with all of it"], "dflash with all of it")
)
def test_a_killed_run_of_any_drafter_resumes_exactly(drafter: str, recipe_file: Path, tmp_path: Path) -> None:
    """Feature noise, random anchors, Muon's momentum and the last alpha are functions of the step or saved with it."""
    overrides = [f"drafter.type={drafter.split()[0]}", *LEARNERS[drafter], "objective.kind=lk_lambda"]
    recipe, run = load_recipe(str(recipe_file), overrides), tmp_path / "run"
    weights = loop.train(recipe) / "model.safetensors"
    whole = metrics_of(run), weights.read_bytes()
    as_if_killed(run, 8)
    loop.train(recipe)
    assert (metrics_of(run), weights.read_bytes()) == whole


@pytest.mark.parametrize("drafter", mostly_slow(["medusa", "eagle3"], "medusa"))
def test_drafter_and_target_are_trained_together(drafter: str, recipe_file: Path, tmp_path: Path) -> None:
    """Medusa-2 and its like: the adapters stay within their bound, and the adapted target is loaded by its folder."""
    overrides = [f"drafter.type={drafter}", "train.steps=60", "train.learning_rate=1e-2", *RARELY]
    overrides += ["cotrain.lora_rank=4"]
    overrides += ["cotrain.drafter_weight=1", "cotrain.max_quality_kl=0.1", "cotrain.learning_rate_ratio=0.5"]
    overrides += ["drafter.layers=[1,2]"] * (drafter == "eagle3")
    folder = loop.train(load_recipe(str(recipe_file), overrides))
    rows = read_metrics(tmp_path / "run")
    moved = [row["quality_kl"] for row in rows if "quality_kl" in row]
    assert max(moved[:18]) == 0 < moved[-1] < 0.1, "adapters move after the warm-up, and not past the bound"
    quality = json.loads((tmp_path / "run" / "target" / "quality.json").read_text())
    assert 0 <= quality["kl"] <= 0.1  # the best drafter may be an early one
    adapted = load_target(str(tmp_path / "run" / "target"))
    plain = load_target(str(tmp_path / "tiny-target"))
    loaded = load_drafter(folder, adapted.model, adapted.tokenizer)
    assert loaded.target_quality == quality
    halved = load_target(str(tmp_path / "run" / "target"), dtype="float16")
    assert load_drafter(folder, halved.model).target_quality == quality
    ids = torch.arange(2, 30)[None]
    p_log, q_log = (one.model(ids).logits.log_softmax(-1) for one in (plain, adapted))
    assert 0 <= float((p_log.exp() * (p_log - q_log)).sum(-1).mean()) < 0.5
    with pytest.raises(ConfigError, match="the target's weights are different"):
        load_drafter(folder, plain.model)


def test_a_target_that_moved_too_far_keeps_no_drafter(recipe_file: Path, tmp_path: Path) -> None:
    overrides = ["drafter.type=medusa", "train.learning_rate=3e-2", "cotrain.drafter_weight=100", "train.steps=30"]
    overrides += RARELY
    overrides += ["cotrain.warmup_fraction=0.2", "cotrain.max_quality_kl=1e-6"]
    loop.train(load_recipe(str(recipe_file), overrides))
    rows = [row["evaluation"] for row in read_metrics(tmp_path / "run") if "evaluation" in row]
    assert rows[-1]["target_quality"]["kl"] > 1e-6
    saved = json.loads((tmp_path / "run" / "target" / "quality.json").read_text())
    assert saved["kl"] <= 1e-6


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["drafter.type=eagle3"], "target has 2 layers; expected at least 4"),
        (["drafter.type=eagle3", "drafter.layers=[1,3]"], r"layers=\[1, 3\]; expected 1 to 2"),
        (["drafter.type=medusa", "drafter.draft_vocab_size=65"], r"draft_vocab_size=65; expected 1 to 64"),
        (["drafter.type=medusa", "drafter.num_heads=200"], r"num_heads=200; expected >= 1 and below the target"),
        (["drafter.keep=[0,2]", "drafter.init=target_layers"], r"drafter\.keep=\[0, 2\]; expected rising layers"),
        (["drafter.type=medusa", "train.draft_length=4"], r"train\.draft_length=4; expected at most 3"),
        (["cotrain.modules=[q_proj, embed_tokens]"], r"cotrain\.modules=\['embed_tokens'\]; expected layers inside"),
        (["cotrain.lora_rank=99"], r"cotrain\.lora_rank=99; expected at most 32"),
        (["drafter.model=OTHER"], "has another tokenizer than the target"),
    ],
)
def test_what_fits_no_target_is_refused_before_any_sampling(
    overrides: list[str],
    message: str,
    recipe_file: Path,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "prepare_data", lambda *arguments: pytest.fail("work began"))
    other = tmp_path / "other"
    AutoModelForCausalLM.from_pretrained(tmp_path / "tiny-target").save_pretrained(other)
    tiny_tokenizer.add_tokens(["<extra>"])
    tiny_tokenizer.save_pretrained(other)
    with pytest.raises(ConfigError, match=message):
        loop.train(load_recipe(str(recipe_file), [entry.replace("OTHER", str(other)) for entry in overrides]))


ONCE = ("train.evaluate_every=12", "evaluation.count=1")


def test_accumulation_and_a_cached_teacher_give_the_same_losses(recipe_file: Path, tmp_path: Path) -> None:
    """tests/integration/test_engines.py has several processes."""
    curves = []
    cached = ("teacher.kind=cached", "teacher.dtype=float32", "teacher.shard_rows=8")
    for name, overrides in {"one": (), "accumulated": ("train.gradient_accumulation=2",), "cached": cached}.items():
        loop.train(load_recipe(str(recipe_file), [f"output={tmp_path / name}", *ONCE, *overrides]))
        curves.append(losses_of(tmp_path / name))
    assert len(curves[0]) == 12
    assert curves[1] == pytest.approx(curves[0], abs=1e-5)
    assert curves[2] == pytest.approx(curves[0], abs=1e-5)


@pytest.mark.slow
def test_two_processes_train_drafter_and_target_as_one_does(
    recipe_file: Path, tmp_path: Path, forked: Processes
) -> None:
    curves, log = [], tmp_path / "log"
    overrides = ["drafter={type: medusa}", "cotrain.warmup_fraction=0.1", "cotrain.lora_rank=4", *ONCE]
    for count, environment in ((1, {}), (2, {"ACCELERATE_USE_CPU": "true"})):
        started = forked.start([str(recipe_file), *overrides, f"output={tmp_path}/{count}"], log, count, environment)
        assert forked.wait(started) == [0] * count, log.read_text()[-2000:]
        curves.append(losses_of(tmp_path / str(count)))
    assert curves[1] == pytest.approx(curves[0], abs=1e-5)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    recipe_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(str(recipe_file))
    loop.train(recipe)
    expected, drafter = metrics_of(tmp_path / "run"), tmp_path / "run" / "drafter" / "model.safetensors"
    before = drafter.read_bytes()
    as_if_killed(tmp_path / "run", 12)
    checkpoints = tmp_path / "run" / "checkpoints"
    weights = max(checkpoints.iterdir()) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8] + bytes([whole[-8] ^ 1]) + whole[-7:])
    loop.train(recipe)
    said = " ".join(capfd.readouterr().err.split())
    assert "checkpoint step-000012 cannot be read" in said
    assert "resuming after step 8" in said
    assert metrics_of(tmp_path / "run") == expected
    assert drafter.read_bytes() == before
    as_if_killed(tmp_path / "run", 12)
    shutil.copytree(checkpoints / "step-000008", checkpoints / "step-000002")  # a kill came before its deletion
    loop.train(recipe)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000008", "step-000012"]


def test_a_finished_run_is_left_alone(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(str(recipe_file), ["train.steps=2"])
    folder = loop.train(recipe)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*")}
    assert loop.train(recipe) == folder
    assert before == {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*")}


@pytest.mark.parametrize("ended", [False, True])
def test_a_drafter_that_is_gone_is_measured_and_saved_again(
    ended: bool,
    recipe_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """No later evaluation is as good as the best one before; a finished run is measured at its last step."""
    taus = {0: 1.5, 6: 3.0, 8: 1.2, 12: 1.1}
    measured: list[int] = []
    evaluate = loop.TrainingRun._measure

    def worse(run: loop.TrainingRun, step: int, validation: Any) -> Any:
        measured.append(step)
        monkeypatch.setattr(loop, "evaluate_drafter", lambda *_, **__: {**result, "tau": taus[step]})
        return evaluate(run, step, validation)

    recipe = load_recipe(str(recipe_file))
    data = loop.evaluate_drafter
    result: dict[str, Any] = {}
    monkeypatch.setattr(loop, "evaluate_drafter", lambda *given, **more: result.update(data(*given, **more)) or result)
    loop.train(load_recipe(str(recipe_file), ["train.steps=1", f"output={tmp_path}/other"]))
    monkeypatch.setattr(loop.TrainingRun, "_measure", worse)
    drafter = loop.train(recipe)
    assert finished(tmp_path / "run")["best_step"] == 6
    shutil.rmtree(drafter)
    if not ended:
        as_if_killed(tmp_path / "run", 8)
    measured.clear()
    assert loop.train(recipe) == drafter
    assert measured == ([12] if ended else [8, 12])
    assert load_file(drafter / "model.safetensors")
    summary = finished(tmp_path / "run")
    assert (summary["best_step"], summary["best_tau"]) == ((12, 1.1) if ended else (8, 1.2))
    assert f"{drafter} is gone" in " ".join(capfd.readouterr().err.split())
    shutil.rmtree(drafter)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    loop.train(recipe)
    assert f"there is no {drafter}" in " ".join(capfd.readouterr().err.split())


SMALL = (
    "drafter.draft_vocab_size=20",
    "train.schedule=constant",
    "train.evaluate_every=2",
    "train.checkpoint_every=2",
    "evaluation.count=1",
)


@pytest.mark.parametrize("place", ["output", "continue_from", "start_from"])
def test_a_run_with_another_draft_vocabulary_is_not_continued(place: str, recipe_file: Path, tmp_path: Path) -> None:
    """Its rows of the lm_head are trained for the tokens of the vocabulary that the run began with."""

    def answers(text: str) -> None:
        write_rows(tmp_path / "answers.jsonl", [{"prompt": LETTERS[i : i + 4], "response": text} for i in range(20)])

    def recipe(output: str, *more: str) -> Any:
        file = [f"data.prompts={tmp_path}/answers.jsonl", "data.response=text", f"output={tmp_path}/{output}"]
        return load_recipe(str(recipe_file), ["drafter={type: mtp, train_steps: 1}", *SMALL, *file, *more])

    more: list[str] = []
    answers("abcdefghijklm")
    if place == "start_from":
        loop.train(recipe("source", "train.steps=2"))
        more = [f"start_from={tmp_path}/source/drafter"]
    loop.train(recipe("run", "train.steps=2", *more))
    loop.train(recipe("run", "train.steps=4", *more))
    answers("nopqrstuvwxyz")
    if place == "start_from":
        shutil.rmtree(tmp_path / "source")
        loop.train(recipe("source", "train.steps=2"))
        said = f"output={tmp_path}/run holds a checkpoint of step 4 with another draft vocabulary than the one that "
        said += f"start_from={tmp_path}/source/drafter gives now"
    elif place == "continue_from":
        checkpoint = tmp_path / "run" / "checkpoints" / "step-000004"
        more, said = [f"continue_from={checkpoint}"], f"continue_from={checkpoint} is a checkpoint of step 4 with"
    else:
        said = f"output={tmp_path}/run holds a checkpoint of step 4 with another draft vocabulary"
    before = (tmp_path / "run" / "drafter" / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match=re.escape(said)):
        loop.train(recipe("further" if place == "continue_from" else "run", "train.steps=6", *more))
    assert (tmp_path / "run" / "drafter" / "model.safetensors").read_bytes() == before
    answers("abcdefghijklm")
    if place != "start_from":
        loop.train(recipe("further" if place == "continue_from" else "run", "train.steps=6", *more))


@pytest.mark.slow
def test_variables_of_an_ended_launch_are_named(recipe_file: Path, tmp_path: Path, forked: Processes) -> None:
    log, soon = tmp_path / "log", {"announce_after": {"seconds": 0.1}}
    (waiting,) = forked.start([str(recipe_file)], log, 1, {"WORLD_SIZE": "2"}, soon)
    deadline = time.monotonic() + 60
    while not log.exists() or "waiting for all of WORLD_SIZE=2 processes at 127.0.0.1:" not in log.read_text():
        assert time.monotonic() < deadline, "no line"
        time.sleep(0.05)
    os.kill(waiting, signal.SIGINT)
    assert forked.wait([waiting]) == [-signal.SIGINT], "torch itself would wait for a day"
    with socket.create_server(("127.0.0.1", 0)) as other:  # as of a run that has not ended
        port = str(other.getsockname()[1])
        started = forked.start([str(recipe_file)], log, 1, {"WORLD_SIZE": "2", "MASTER_PORT": port})
        assert forked.wait(started) == [2], log.read_text()
    assert f"ConfigError: MASTER_ADDR:MASTER_PORT=127.0.0.1:{port}: processes cannot connect there" in log.read_text()
    assert not (tmp_path / "run").exists()


def test_bad_files_stop_a_run_before_the_target_is_loaded(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = "draftsmith.distill.load_target.load_target"
    monkeypatch.setattr(loaded, lambda *_, **__: pytest.fail("loaded the target first"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "ab"}\n{"prompt": 3}\n{"prompt": 3}\n')
    with pytest.raises(ConfigError, match=r"2 of 3 rows cannot be used, such as .*prompts\.jsonl:3"):
        loop.train(load_recipe(str(recipe_file)))
    with pytest.raises(ConfigError, match="there is none"):
        loop.train(load_recipe(str(recipe_file), [f"data.prompts={tmp_path / 'absent.jsonl'}"]))
    prompts.write_text('{"prompt": "ab"}\n')
    with pytest.raises(ConfigError, match=r"data.chat_template=vicunna; expected a file, or one of vicuna"):
        loop.train(load_recipe(str(recipe_file), ["data.chat_template=vicunna"]))
    assert not (tmp_path / "run").exists()


def test_the_first_drafter_is_kept_where_no_evaluation_has_a_round(recipe_file: Path, tmp_path: Path) -> None:
    """Every token ends a text, so that the target's first one, which no draft precedes, is the last."""
    file = write_rows(tmp_path / "texts.jsonl", ({"text": LETTERS[i % 9 :]} for i in range(20)))
    target = tmp_path / "ending"
    shutil.copytree(load_recipe(str(recipe_file)).target.model, target)
    ending = GenerationConfig(eos_token_id=list(range(64)))
    ending.save_pretrained(target)
    overrides = [f"target.model={target}", f"data.prompts={file}", "data.response=text", "train.steps=2"]
    folder = loop.train(load_recipe(str(recipe_file), overrides))
    evaluations = [row["evaluation"] for row in read_metrics(tmp_path / "run") if "evaluation" in row]
    assert [row["rounds"] for row in evaluations] == [[0] * 4] * 2
    assert (folder / "model.safetensors").is_file()


@pytest.mark.slow  # it builds kernels
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler on a CPU")
def test_compiled_blocks_train_the_same(recipe_file: Path, tmp_path: Path) -> None:
    for name, value in (("plain", "false"), ("compiled", "true")):
        overrides = [f"train.compile={value}", "train.steps=3", "evaluation.count=1", f"output={tmp_path / name}"]
        loop.train(load_recipe(str(recipe_file), overrides))
    assert losses_of(tmp_path / "compiled") == pytest.approx(losses_of(tmp_path / "plain"), rel=1e-4)


DRAFTERS = {"draft_model": ["drafter.num_hidden_layers=2"], "eagle": ["drafter.train_steps=2"], "medusa": []}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_what_saves_memory_changes_no_number(kind: str, recipe_file: Path, tmp_path: Path) -> None:
    # With the target's own seed a random draft model of its shapes would be the target: a loss of rounding alone.
    overrides = [f"drafter.type={kind}", *DRAFTERS[kind], "train.steps=3", "train.seed=1", "evaluation.count=1"]
    saving = ["target.offload=true", "train.activation_checkpointing=true", "objective.chunk_tokens=7"]
    curves = []
    for name, more in (("plain", []), ("saving", saving)):
        output = [f"output={tmp_path / name}"]
        loop.train(load_recipe(str(recipe_file), [*overrides, *more, *output]))
        curves.append(losses_of(tmp_path / name))
    # Chunks are summed in another order; nothing else differs, bit by bit.
    assert curves[1] == pytest.approx(curves[0], rel=1e-5, abs=1e-6)


def test_an_offloaded_layer_is_on_the_device_while_it_computes(tiny_target_folder: Path, recipe_file: Path) -> None:
    recipe = load_recipe(str(recipe_file), ["target.offload=true"])
    target, whole = (load_target(str(tiny_target_folder), device="cpu") for _ in range(2))
    placement_of(recipe.target, Accelerator(cpu=True)).place(target.model)
    for layer in target.model.base_model.layers:
        assert all(weight.device.type == "meta" for weight in layer.parameters())
    rest = (target.model.get_input_embeddings(), target.model.base_model.norm, target.model.get_output_embeddings())
    assert all(weight.device.type == "cpu" for module in rest for weight in module.parameters())
    ids = torch.arange(3, 9)[None]
    assert torch.equal(target.model(ids).logits, whole.model(ids).logits)


def test_compiling_needs_a_compiler(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"train\.compile=True without a C\+\+ compiler"):
        loop.train(load_recipe(str(recipe_file), ["train.compile=true"]))
    assert not (tmp_path / "run").exists()


def test_a_run_says_what_memory_it_will_take_and_took(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftsmith.train.estimate.memory.announce_memory", announce_memory)
    loop.train(load_recipe(str(recipe_file), ["train.steps=2", "evaluation.count=1"]))
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(r"memory: about \d+ MiB a process while sampling \(target \d+ MiB, drafter .*; \d+ MiB a ", said)
    estimated = r"\d+ MiB estimated while sampling, \d+ MiB estimated in training"
    assert re.search(rf"peak memory \d+ MiB \({estimated}\)", said)
    stored = finished(tmp_path / "run")["memory"]
    assert stored["estimated_bytes"] > 0
    assert all(row["memory_bytes"] <= stored["peak_bytes"] for row in read_metrics(tmp_path / "run") if "loss" in row)
