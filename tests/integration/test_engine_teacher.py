"""Training on the hidden states of a running engine: the run of an online teacher, faults, restarts and resumption."""

import gc
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import run as run_command
from conftest import LETTERS, make_llama, make_tokenizer
from engine_server import TEMPLATE, Engine, model_answers
from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig
from mooncake.store import MooncakeDistributedStore
from safetensors.torch import load_file, save_file
from states_server import STORE_FAULTS, StatesEngine, running
from transformers import LlamaForCausalLM

from draftsmith.distill.data_section import TeacherServerSection
from draftsmith.distill.dataset import HeldOut
from draftsmith.distill.server.answers import AnswerJournal
from draftsmith.distill.server.transport import swept
from draftsmith.distill.state_files import texts_of
from draftsmith.errors import ConfigError, DraftsmithError, EngineLost
from draftsmith.train.launch import make_accelerator
from draftsmith.train.recipe import Recipe, load_recipe
from draftsmith.train.run_folder import read_metrics
from draftsmith.train.step import batch_indices
from draftsmith.train.trainer import TrainingRun, train
from draftsmith.train.validation import estimate_acceptance, evaluate_drafter

LAYERS = (1, 2)
DEPTH = 2


@pytest.fixture
def engine(tiny_target: LlamaForCausalLM, tmp_path: Path) -> StatesEngine:
    (tmp_path / "states").mkdir()
    return StatesEngine(tiny_target, tmp_path / "states", LAYERS)


@pytest.fixture
def address(engine: StatesEngine) -> Iterator[str]:
    with running(engine) as address:
        yield address


@pytest.fixture
def recipe_file(
    tiny_target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_estimate: None
) -> Path:
    """EAGLE-3 on given answers."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": LETTERS[i % 20 :][:4], "response": LETTERS[(3 * i) % 26 :][: 5 + i % 9]} for i in range(30)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train = {"steps": 6, "batch_size": 4, "learning_rate": 3e-3, "mixed_precision": "no", "evaluate_every": 3}
    recipe = {
        "name": "tiny",
        "target": {"model": str(tiny_target_folder)},
        "drafter": {"type": "eagle3", "layers": list(LAYERS), "train_steps": 3},
        "data": {"prompts": str(tmp_path / "prompts.jsonl"), "response": "text", "validation": 5},
        "train": {**train, "checkpoint_every": 2, "optimizer": "adamw", "draft_length": 3},
        "evaluation": {"count": 4, "max_new_tokens": 8, "prompts": "embedded"},
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


def recipe_of(file: Path, output: Path, *more: str) -> Recipe:
    return load_recipe(str(file), [f"output={output}", *more])


def served(folder: Path | None, *addresses: str, **settings: Any) -> list[str]:
    """Return the overrides of a run whose states come from engines."""
    place = {"folder": None if folder is None else str(folder)}
    values = {"urls": list(addresses), **place, "timeout_seconds": 2, **settings}
    return ["teacher.kind=server", *(f"teacher.server.{key}={json.dumps(value)}" for key, value in values.items())]


def launched(recipe: Path, *overrides: str, processes: int) -> subprocess.CompletedProcess[str]:
    """Run a recipe in several processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launch = ["--multi_gpu", "--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no"]
    launch += ["--dynamo_backend", "no", "--main_process_port", port, "-m", "draftsmith.train"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *launch, str(recipe), *overrides]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)


def losses_of(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


def assert_equal_runs(one: Path, other: Path, **tolerance: float) -> None:
    torch.testing.assert_close(losses_of(one), losses_of(other), **{"rtol": 1e-5, "atol": 1e-5, **tolerance})
    weights = (load_file(folder / "drafter" / "model.safetensors") for folder in (one, other))
    torch.testing.assert_close(*weights, **{"rtol": 1e-4, "atol": 1e-5, **tolerance})


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("drafter.draft_vocab_size=20", "train.gradient_accumulation=2"),
        ("data.pack=true", "data.prompt_tokens=20", "data.response_tokens=20"),
        ("drafter={type: mtp}", "train.steps=12", "train.batch_size=2"),
    ],
    ids=["plain", "draft vocabulary", "packed", "many batches at the start"],
)
def test_a_run_is_that_of_an_online_teacher(
    more: tuple[str, ...], recipe_file: Path, engine: StatesEngine, address: str, tmp_path: Path
) -> None:
    if "drafter={type: mtp}" in more:  # reads no other layer
        engine.layers = (DEPTH,)
    online = recipe_of(recipe_file, tmp_path / "online", "train.evaluate_every=99", *more)
    train(online)
    train(
        recipe_of(recipe_file, tmp_path / "served", "train.evaluate_every=99", *more, *served(engine.folder, address))
    )
    torch.testing.assert_close(losses_of(tmp_path / "served"), losses_of(tmp_path / "online"), rtol=1e-5, atol=1e-5)
    assert not list(engine.folder.iterdir())


def test_faults_are_asked_again(recipe_file: Path, engine: StatesEngine, address: str, tmp_path: Path) -> None:
    """Each fault hits one text at its first request; nothing of it reaches the loss, and no file stays."""
    train(recipe_of(recipe_file, tmp_path / "plain", *served(engine.folder, address)))
    texts = list(dict.fromkeys(engine.asked))[8:]  # those of the comparison before the first step come first
    faults = ["nan", "other tokens", "other layers", "no path", "torn", "late", 503, "no file"]
    engine.faults = {text: [fault] for text, fault in zip(texts, faults, strict=False)}
    train(recipe_of(recipe_file, tmp_path / "faults", *served(engine.folder, address, timeout_seconds=1.5)))
    assert not any(engine.faults.values()), "every fault was met"
    assert losses_of(tmp_path / "faults") == losses_of(tmp_path / "plain")
    assert not list(engine.folder.glob("*.safetensors"))


@pytest.mark.parametrize("parts", [1, 4], ids=["beside others", "alone"])
def test_a_lost_row_leaves_its_step(
    parts: int, recipe_file: Path, engine: StatesEngine, address: str, tmp_path: Path
) -> None:
    start = [f"start_from={tmp_path / 'first' / 'drafter'}"]  # an untrained one would be fitted to other rows
    train(recipe_of(recipe_file, tmp_path / "first", "train.steps=2"))
    whole = run_of(recipe_file, tmp_path / "online", *start)
    lost, *kept = batch_indices(0, 0, 4, whole.data.trained)
    tokens = sum(end - start for row in kept for start, end in whole.data.rows[row]["spans"])
    expected = whole.engine.module(whole.batch(kept), 0.0, whole.last).loss.item() / tokens
    engine.faults, engine.for_good = {tuple(whole.data.rows[lost]["input_ids"]): ["nan"]}, True
    short = ["train.steps=1", f"train.gradient_accumulation={parts}"]
    train(recipe_of(recipe_file, tmp_path / "served", *start, *short, *served(engine.folder, address)))
    assert losses_of(tmp_path / "served") == pytest.approx([expected], rel=1e-5)


def test_too_many_lost_rows_end_the_run_with_a_checkpoint(
    recipe_file: Path, engine: StatesEngine, address: str, tmp_path: Path
) -> None:
    overrides = served(engine.folder, address, failures=0)
    run = recipe_of(recipe_file, tmp_path / "run", *overrides)
    train(recipe_of(recipe_file, tmp_path / "plain", *overrides))
    seen = list(dict.fromkeys(engine.asked))
    engine.faults, engine.for_good = {seen[-1]: ["nan"]}, True
    with pytest.raises(
        EngineLost, match=r"1 rows have no usable states, more than teacher.server.failures=0; .*finite"
    ):
        train(run)
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    engine.faults = {}
    train(run)
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "plain")


def test_a_restarted_engine_is_waited_for(
    recipe_file: Path, engine: StatesEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("draftsmith.distill.server.states.AGAIN_SECONDS", 0.2)
    monkeypatch.setattr("draftsmith.distill.server.states.RETRIES", 0)
    with running(engine) as address:
        train(recipe_of(recipe_file, tmp_path / "plain", *served(engine.folder, address)))
    count, port = len(engine.asked), int(address.rpartition(":")[2])
    engine.asked.clear()
    stopped, back = threading.Event(), threading.Event()

    def serve() -> None:
        with running(engine, port):
            while len(engine.asked) < count // 2:
                stopped.wait(0.01)
        stopped.set()
        back.wait(1.0)
        with running(engine, port):
            done.wait()

    done = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        train(recipe_of(recipe_file, tmp_path / "run", *served(engine.folder, address)))
    finally:
        done.set()
        stopped.set()
        thread.join()
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "plain")
    assert "asking it again later" in capsys.readouterr().err


def test_without_an_engine_the_run_ends_after_its_patience(
    recipe_file: Path, engine: StatesEngine, address: str, tmp_path: Path
) -> None:
    run = run_of(recipe_file, tmp_path / "run", *served(engine.folder, address, patience_minutes=0.002))
    assert run.served is not None
    for server in run.served._servers:
        server.down_until = float("inf")
    run.served._alive -= 1
    with pytest.raises(DraftsmithError, match="no server answers for"):
        run.train()


def run_of(file: Path, output: Path, *more: str) -> TrainingRun:
    recipe = recipe_of(file, output, *more)
    output.mkdir(parents=True, exist_ok=True)
    return TrainingRun(recipe, make_accelerator(recipe, output), output)


def test_two_engines_share_the_requests(recipe_file: Path, engine: StatesEngine, address: str, tmp_path: Path) -> None:
    other = StatesEngine(deepcopy(engine.target), engine.folder, LAYERS)  # hooks are those of a thread
    train(recipe_of(recipe_file, tmp_path / "plain", *served(engine.folder, address)))
    engine.asked.clear()
    with running(other) as second:
        train(recipe_of(recipe_file, tmp_path / "both", *served(engine.folder, address, second, in_flight=1)))
    assert engine.asked
    assert other.asked
    assert losses_of(tmp_path / "both") == losses_of(tmp_path / "plain")


def test_layers_are_compared_with_those_of_the_whole_target(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two engines the second one returns another layer, which its log-probabilities do not show."""
    model, folder, states = make_llama(num_hidden_layers=4), tmp_path / "deep", tmp_path / "states"
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    states.mkdir()
    deep = [f"target.model={folder}", "drafter.layers=[1, 3]"]
    with (
        running(StatesEngine(model, states, (1, 3, 4))) as right,
        running(StatesEngine(deepcopy(model), states, (1, 2, 4))) as other,
    ):
        train(recipe_of(recipe_file, tmp_path / "plain", *deep, *served(states, right)))
        assert "layers compared" not in capsys.readouterr().err
        train(recipe_of(recipe_file, tmp_path / "compared", *deep, *served(states, right, compare=True)))
        assert "; all layers compared with the target's, at most 0.00% off; " in capsys.readouterr().err
        train(recipe_of(recipe_file, tmp_path / "compared", *deep, *served(states, right)))  # is the same run
        run_of(recipe_file, tmp_path / "other", *deep, *served(states, right, other))
        with pytest.raises(ConfigError) as refused:
            train(recipe_of(recipe_file, tmp_path / "wrong", *deep, *served(states, right, other, compare=True)))
    assert losses_of(tmp_path / "compared") == losses_of(tmp_path / "plain")
    held = "layer 1 (0.0% off), layer 2 (0.0% off), layer 4 (0.0% off)"
    assert f"{other}/v1 returns {held} as layers [1, 3, 4]; expected these, less than 10% off" in str(refused.value)
    assert not list(states.iterdir())


def test_the_whole_target_is_released_after_the_comparison(
    recipe_file: Path, engine: StatesEngine, address: str, tmp_path: Path
) -> None:
    def models() -> list[LlamaForCausalLM]:
        return [it for it in gc.get_objects() if type(it) is LlamaForCausalLM]

    before = models()
    run = run_of(recipe_file, tmp_path / "run", *served(engine.folder, address, compare=True))
    assert [it for it in models() if not any(it is other for other in before)] == [run.target.model]


def test_a_target_that_cannot_be_loaded_whole_is_refused_before_anything_is_requested(
    recipe_file: Path, engine: StatesEngine, address: str, tiny_target_folder: Path, tmp_path: Path
) -> None:
    file = tiny_target_folder / "model.safetensors"
    outside = {name: tensor for name, tensor in load_file(file).items() if ".layers." not in name}
    save_file(outside, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError) as refused:
        train(recipe_of(recipe_file, tmp_path / "run", *served(engine.folder, address, compare=True)))
    assert "model.layers.0." in str(refused.value)
    assert not engine.asked
    train(recipe_of(recipe_file, tmp_path / "run", *served(engine.folder, address)))


@pytest.mark.slow
def test_two_processes_request_rows_of_their_own(
    recipe_file: Path, engine: StatesEngine, address: str, tmp_path: Path
) -> None:
    """Two engines and two processes give the losses of one process, also where one of them loses a row."""
    other = StatesEngine(deepcopy(engine.target), engine.folder, LAYERS)  # hooks are those of a thread
    alone = recipe_of(recipe_file, tmp_path / "alone", *served(engine.folder, address))
    run = run_of(recipe_file, tmp_path / "rows", *served(engine.folder, address))
    lost = tuple(run.data.rows[batch_indices(0, 3, 4, run.data.trained)[0]]["input_ids"])
    for one in (engine, other):
        one.faults, one.for_good = {lost: ["nan"]}, True
    train(alone)
    with running(other) as second:
        overrides = [f"output={tmp_path / 'both'}", *served(engine.folder, address, second, compare=True)]
        ended = launched(recipe_file, *overrides, processes=2)
    assert ended.returncode == 0, ended.stderr[-2000:]
    torch.testing.assert_close(losses_of(tmp_path / "both"), losses_of(tmp_path / "alone"), rtol=1e-5, atol=1e-5)
    assert not list(engine.folder.iterdir())


def test_nothing_is_requested_after_the_last_step(
    recipe_file: Path, engine: StatesEngine, address: str, tmp_path: Path
) -> None:
    run = run_of(recipe_file, tmp_path / "run", "train.steps=2", *served(engine.folder, address, ahead=3))
    begun, late = len(engine.asked), engine.folder / "cmpl-late-0.safetensors"
    late.write_bytes(b"")  # of a request that was given up
    run.train()
    assert not late.exists()
    read = {row for step in range(2) for row in batch_indices(0, step, 4, run.data.trained)}
    read.update(range(run.data.trained, len(run.data.rows)))
    assert set(engine.asked[begun:]) == {tuple(run.data.rows[row]["input_ids"]) for row in read}


def test_a_killed_run_continues_with_an_engine_elsewhere(
    recipe_file: Path, engine: StatesEngine, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = served(engine.folder, address)
    train(recipe_of(recipe_file, tmp_path / "whole", *overrides))
    step = TrainingRun.step

    def killed(run: TrainingRun, at: int) -> dict[str, Any]:
        if at == 3:
            raise KeyboardInterrupt
        return step(run, at)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            train(recipe_of(recipe_file, tmp_path / "run", *overrides))
    with running(engine) as elsewhere:
        train(recipe_of(recipe_file, tmp_path / "run", *served(engine.folder, elsewhere, in_flight=3, ahead=1)))
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "whole")
    assert not list(engine.folder.iterdir())


def test_evaluations_are_estimates_that_choose_the_best_drafter(
    recipe_file: Path, engine: StatesEngine, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe_of(recipe_file, tmp_path / "run", *served(engine.folder, address)))
    evaluations = [row["evaluation"] for row in read_metrics(tmp_path / "run") if "evaluation" in row]
    assert [row["estimated"] for row in evaluations] == [True] * 3
    assert all(1 <= row["tau"] <= 4 for row in evaluations)
    said = capsys.readouterr().err
    assert "estimated alpha" in said
    finished = json.loads((tmp_path / "run" / "finished.json").read_text())
    assert finished["best_tau"] == max(row["tau"] for row in evaluations)


def test_its_drafter_is_published_with_estimate_and_command(
    recipe_file: Path, engine: StatesEngine, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The card has the estimate of the saved drafter; the layers are those of the engine; no address is published."""
    train(recipe_of(recipe_file, tmp_path / "run", "evaluation.temperature=0.5", *served(engine.folder, address)))
    section = json.loads((tmp_path / "run" / "drafter" / "config.json").read_text())["draftsmith"]
    assert '"eagle_aux_hidden_state_layer_ids": [1, 2]' in section["target"]["engine"]
    assert run_command("push", tmp_path / "run" / "drafter", "u/d", "--dry-run", "--out", tmp_path / "out") == 0
    assert "give --eval (see `draftsmith eval server`)" in capsys.readouterr().err
    card = (tmp_path / "out" / "README.md").read_text()
    evaluations = [row for row in read_metrics(tmp_path / "run") if "evaluation" in row]
    tau, step = max((row["evaluation"]["tau"], row["step"]) for row in evaluations)
    assert step == json.loads((tmp_path / "run" / "finished.json").read_text())["best_step"]
    assert f"| 0.5 | *estimated* | {tau:.2f} | " in card
    assert f"along 4 held-out answers after step {step}, where" in card
    assert "Not measured yet: `draftsmith eval server http://localhost:8000 --target" in card
    assert "states came from a running engine. Saved is the drafter with the highest estimated tau" in card
    assert "and estimated tau](plots/training.png)" in card
    assert '"shared_storage_path": "STATES"' in card
    words = shlex.split(card.partition("```sh\nvllm serve ")[2].partition("\n```")[0])
    assert words[words.index("--max-model-len") + 1] == "177"
    private = [address.rpartition("/")[2].partition(":")[0], str(engine.folder), str(tmp_path)]
    for file in (file for file in (tmp_path / "out").rglob("*") if file.is_file()):
        assert not [name for name in private if name.encode() in file.read_bytes()], file


@pytest.mark.parametrize(
    ("fault", "overrides", "message"),
    [
        ("weights", [], "nats from the server's"),
        ("layers", [], "the engine was started with other layers than [1, 2]"),
        ("context", [], "max_model_len=9, and the longest text has"),
        ("no log-probabilities", [], "no prompt_logprobs of the text"),
        ("no connector", [], "the engine has no connector for hidden states"),
        ("", ['teacher.server.folder="/nowhere"'], "teacher.server.folder='/nowhere'; expected a folder"),
        ("", ['teacher.server.model="other"'], "does not serve other; expected one of target"),
        ("", ["target.offload=true"], "target.offload with teacher.kind='server'"),
        ("", ["data.validation=null"], "data.validation=null with teacher.kind='server'"),
        ("", ["teacher.kind=online"], "teacher.server with teacher.kind='online'; expected 'server'"),
        ("", ["drafter={type: draft_model, init: target_layers}"], "no list of 2 layers to copy from"),
    ],
)
def test_bad_input_is_one_line_before_the_first_step(
    fault: str, overrides: list[str], message: str, recipe_file: Path, engine: StatesEngine, tmp_path: Path
) -> None:
    if fault == "weights":
        engine.target = other_target()
    if fault == "layers":
        engine.layers = (2,)
    if fault == "context":
        engine.context = 9
    if fault == "no log-probabilities":
        answer = engine.answer
        engine.answer = lambda body, fault: {**answer(body, fault), "choices": [{"text": "x"}]}
    if fault == "no connector":
        engine.faults = NoPath()
    with running(engine) as address, pytest.raises(ConfigError) as refused:
        train(recipe_of(recipe_file, tmp_path / "run", *served(engine.folder, address), *overrides))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("more", [[], ["data.pack=true"], ["drafter.draft_vocab_size=30"]])
def test_the_estimate_on_greedy_answers_is_what_is_decoded(more: list[str], recipe_file: Path, tmp_path: Path) -> None:
    greedy = ["data.response=target", "data.temperature=0", "data.response_tokens=24", "data.prompt_tokens=16"]
    run = run_of(recipe_file, tmp_path / "run", *greedy, *more)
    run.train()
    rows = run.data.rows.select(range(run.data.trained, len(run.data.rows)))
    starts = [HeldOut(row["input_ids"][: row["spans"][0][0]]) for row in rows][:4]
    settings = run.recipe.evaluation.model_copy(update={"max_new_tokens": 24})
    found = estimate_acceptance(run.teacher, run.drafter, run.data, settings, run.draft_length, run.batch)
    decoded = evaluate_drafter(run.target.model, run.drafter, starts, settings, run.draft_length)
    assert decoded is not None
    assert found["tokens"] == decoded["tokens"]
    assert found["rounds"] == pytest.approx(decoded["rounds"])
    assert found["tau"] == pytest.approx(decoded["tau"])
    assert found["acceptance_at"] == pytest.approx(decoded["acceptance_at"], abs=0.02)  # drafts beyond the end


class NoPath(dict[tuple[int, ...], list[Any]]):
    def get(self, *_: Any) -> list[Any]:
        return ["no path"]


def other_target() -> LlamaForCausalLM:
    other = make_llama()
    with torch.no_grad():
        other.lm_head.weight.add_(torch.randn_like(other.lm_head.weight) * 3)
    return other


def test_a_file_outside_of_the_folder_is_neither_read_nor_deleted(
    recipe_file: Path, engine: StatesEngine, tmp_path: Path
) -> None:
    outside = tmp_path / "cmpl-1.safetensors"
    outside.write_bytes(b"x")
    answer = engine.answer

    def elsewhere(body: dict[str, Any], fault: Any) -> dict[str, Any]:
        return {**answer(body, fault), "kv_transfer_params": {"hidden_states_path": str(outside)}}

    engine.answer = elsewhere  # pyright: ignore[reportAttributeAccessIssue]
    with running(engine) as address, pytest.raises(ConfigError, match=r"which is no file of teacher.server.folder"):
        train(recipe_of(recipe_file, tmp_path / "run", *served(engine.folder, address)))
    assert outside.exists()


@pytest.fixture
def store(engine: StatesEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the address of a store in memory, to which the engine writes."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "stand_ins"), prepend=os.pathsep)
    MooncakeDistributedStore.objects.clear()
    monkeypatch.setattr("draftsmith.distill.server.state_store.PAUSE_SECONDS", 0.01)
    engine.store = MooncakeHiddenStatesStore(MooncakeStoreConfig()).setup()
    with socket.create_server(("127.0.0.1", 0)) as master:
        yield f"127.0.0.1:{master.getsockname()[1]}"


def from_store(store: str, *addresses: str, **settings: Any) -> list[str]:
    return served(None, *addresses, transfer="mooncake", store=store, **settings)


def test_a_store_gives_the_run_of_a_folder(
    recipe_file: Path, engine: StatesEngine, address: str, store: str, tmp_path: Path
) -> None:
    """Nothing stays in it, and faults of each kind are asked again."""
    train(recipe_of(recipe_file, tmp_path / "store", *from_store(store, address)))
    assert not MooncakeDistributedStore.objects
    assert not list(engine.folder.iterdir())
    host, _, segment, _, _, _, master = MooncakeDistributedStore.set_up[-1]
    assert (host, segment, master) == ("127.0.0.1", 0, store)
    texts = list(dict.fromkeys(engine.asked))[8:]  # those of the comparison before the first step come first
    engine.faults = {text: [fault] for text, fault in zip(texts, STORE_FAULTS, strict=False)}
    train(recipe_of(recipe_file, tmp_path / "faults", *from_store(store, address, timeout_seconds=1.5)))
    assert not any(engine.faults.values()), "every fault was met"
    assert not MooncakeDistributedStore.objects
    engine.store = None
    train(recipe_of(recipe_file, tmp_path / "folder", *served(engine.folder, address)))
    assert losses_of(tmp_path / "store") == losses_of(tmp_path / "faults") == losses_of(tmp_path / "folder")


def test_a_restarted_master_is_waited_for(
    recipe_file: Path, engine: StatesEngine, address: str, store: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Its keys are lost, and no row is, though more requests fail than a row has."""
    monkeypatch.setattr("draftsmith.distill.server.states.AGAIN_SECONDS", 0.05)
    train(recipe_of(recipe_file, tmp_path / "plain", *from_store(store, address)))
    is_exist, count = MooncakeDistributedStore.is_exist, 0

    def away(self: MooncakeDistributedStore, key: str) -> int:
        nonlocal count
        count += 1
        return -900 if 40 < count < 80 else is_exist(self, key)

    monkeypatch.setattr(MooncakeDistributedStore, "is_exist", away)
    train(recipe_of(recipe_file, tmp_path / "run", *from_store(store, address, failures=0)))
    assert count > 80
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "plain")
    assert "with status=-900; asking it again later" in capsys.readouterr().err


def test_states_written_after_their_time_are_deleted_at_the_end(
    recipe_file: Path, engine: StatesEngine, address: str, store: str, tmp_path: Path
) -> None:
    run = run_of(recipe_file, tmp_path / "run", *from_store(store, address, timeout_seconds=0.5))
    assert run.served is not None
    engine.late_seconds = 1.0
    engine.faults, engine.for_good = {tuple(run.data.rows[0]["input_ids"]): ["late"]}, True
    assert run.served.missing([0]) == [0]
    deadline = threading.Event()
    while len(MooncakeDistributedStore.objects) < 3:
        deadline.wait(0.01)
    run.served.close()
    assert not MooncakeDistributedStore.objects


def test_states_of_answers_and_of_earlier_runs_are_deleted(
    recipe_file: Path, engine: StatesEngine, address: str, store: str, tmp_path: Path
) -> None:
    MooncakeDistributedStore.objects |= {"chatcmpl-1": b"x", "cmpl-1:error": b"x", "kv-cache-1": b"x"}
    with swept(TeacherServerSection(urls=address, transfer="mooncake", store=store)):
        assert len(MooncakeDistributedStore.objects) == 3
    assert list(MooncakeDistributedStore.objects) == ["kv-cache-1"]
    MooncakeDistributedStore.objects["cmpl-2"] = b"x"
    run_of(recipe_file, tmp_path / "run", *from_store(store, address))
    assert list(MooncakeDistributedStore.objects) == ["kv-cache-1"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("blocked", "no answer for 0.1 s; expected a running mooncake_master"),
        ("no master", "no answer ([Errno 111] Connection refused); expected a running mooncake_master"),
        ("no package", "expected the package mooncake-transfer-engine, and the system's libibverbs1"),
        ("too small", "teacher.server.store_gib=1e-06 of 1 engines: states in flight take up to"),
        ("folder", "no kv_transfer_params.handle: the engine has no connector for hidden states of Mooncake"),
    ],
)
def test_a_store_that_cannot_be_used_is_one_line(
    fault: str, message: str, recipe_file: Path, engine: StatesEngine, address: str, store: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if fault == "blocked":
        monkeypatch.setattr("draftsmith.distill.server.state_store.SETUP_SECONDS", 0.1)
        monkeypatch.setenv("BLOCKED_SECONDS", "60")
    if fault == "no master":
        with socket.create_server(("127.0.0.1", 0)) as closed:
            store = f"127.0.0.1:{closed.getsockname()[1]}"
    if fault == "no package":
        monkeypatch.setitem(sys.modules, "mooncake.store", None)
    if fault == "folder":
        engine.store = None
    given = from_store(store, address, **({"store_gib": 1e-6} if fault == "too small" else {}))
    with pytest.raises(ConfigError) as refused:
        train(recipe_of(recipe_file, tmp_path / "run", *given))
    assert message in str(refused.value)


ANSWERED = ("data.response=target", "data.temperature=0", "data.prompt_tokens=16", "data.response_tokens=12")
EPOCH = ("train.steps=5", "train.batch_size=5", "train.evaluate_every=99")
"""Of the 25 rows that are trained on."""


@pytest.fixture
def questions(recipe_file: Path, tmp_path: Path) -> Path:
    """Return the recipe with 30 different prompts, which the engine answers greedily."""
    rows = [{"prompt": LETTERS[i % 13 :][: 3 + i // 13]} for i in range(30)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return recipe_file


def trained_texts(run: TrainingRun) -> list[tuple[int, ...]]:
    assert run.served is not None
    return [tuple(ids) for row in range(run.data.trained) for ids in texts_of(run.served.rows, row)]


def asked_in(run: TrainingRun, engine: StatesEngine) -> list[int]:
    """Train, and return how often each text was requested meanwhile."""
    begun = len(engine.asked)
    run.train()
    assert run.served is not None
    run.served.close()
    return [engine.asked[begun:].count(text) for text in trained_texts(run)]


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ((), {"answers_gib": 1}),
        (("drafter={type: dflash, layers: [1], block_size: 4}",), {"answers_gib": 1, "transfer": "fp8"}),
        (("data.pack=true", "data.prompt_tokens=40", "train.batch_size=2", "train.steps=8"), {"answers_gib": 1}),
    ],
    ids=["plain", "dflash", "packed"],
)
def test_the_states_of_answers_are_those_of_a_request(
    more: tuple[str, ...], kept: dict[str, Any], questions: Path, engine: StatesEngine, address: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """In the first epoch no text is requested, in the second each is, and the losses are the same."""
    overrides = [*ANSWERED, *EPOCH, "train.steps=10", *more]
    one = run_of(questions, tmp_path / "kept", *overrides, *served(engine.folder, address, **kept))
    assert "the states of 30 of 30 texts were written with their answers" in capsys.readouterr().err
    assert len(list(engine.folder.iterdir())) == 30
    assert set(asked_in(one, engine)) == {1}
    assert not list(engine.folder.iterdir())
    again = run_of(questions, tmp_path / "plain", *overrides, *served(engine.folder, address))
    assert set(asked_in(again, engine)) == {2}
    assert_equal_runs(tmp_path / "kept", tmp_path / "plain", rtol=1e-6, atol=1e-6)
    taus = [
        [row["evaluation"]["tau"] for row in read_metrics(run.folder) if "evaluation" in row] for run in (one, again)
    ]
    assert taus[0] == pytest.approx(taus[1])


def test_a_killed_run_uses_the_states_of_answers_that_are_left(
    questions: Path, engine: StatesEngine, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Killed while answers are sampled, and in the third step; in the end no file is left."""
    overrides = [*ANSWERED, *EPOCH, *served(engine.folder, address, answers_gib=1, ahead=1)]
    add, step = AnswerJournal.add, TrainingRun.step

    def killed(journal: AnswerJournal, *arguments: Any) -> None:
        if len(journal) == 12:
            raise KeyboardInterrupt
        add(journal, *arguments)

    def stopped(run: TrainingRun, at: int) -> dict[str, Any]:
        if at == 2:
            raise KeyboardInterrupt
        return step(run, at)

    with monkeypatch.context() as patch:
        patch.setattr(AnswerJournal, "add", killed)
        with pytest.raises(KeyboardInterrupt):
            train(recipe_of(questions, tmp_path / "run", *overrides))
    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "step", stopped)
        with pytest.raises(KeyboardInterrupt):
            train(recipe_of(questions, tmp_path / "run", *overrides))
    assert "the states of 30 of 30 texts were written" in capsys.readouterr().err
    run = run_of(questions, tmp_path / "run", *overrides)
    requested = {row for row, count in enumerate(asked_in(run, engine)) if count}
    assert requested <= set(batch_indices(0, 2, 5, run.data.trained)), "what was read ahead"
    assert not list(engine.folder.iterdir())
    train(recipe_of(questions, tmp_path / "plain", *ANSWERED, *EPOCH, *served(engine.folder, address)))
    assert_equal_runs(tmp_path / "run", tmp_path / "plain", rtol=1e-6, atol=1e-6)


def test_states_of_answers_that_cannot_be_used_are_requested(
    questions: Path, engine: StatesEngine, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Damaged files, also those that are lost or replaced after they were found; what lies elsewhere stays."""
    overrides = [*ANSWERED, *EPOCH, *served(engine.folder, address, timeout_seconds=30)]
    train(recipe_of(questions, tmp_path / "plain", *overrides))
    assert not any("kv_transfer_params" in body for body in engine.answering.asked)
    overrides.append("teacher.server.answers_gib=1")
    (tmp_path / "cache").rename(tmp_path / "earlier")
    first = run_of(questions, tmp_path / "run", *overrides)
    files = {tuple(load_file(file)["token_ids"].tolist()): file for file in engine.folder.iterdir()}
    cut, *spoilt = [text for text in dict.fromkeys(trained_texts(first))][:8]
    cut_file, *files_of = [files[text[:-1]] for text in (cut, *spoilt)]
    outside = Path(shutil.copy(files_of[0], tmp_path / "cmpl-1.safetensors"))
    cut_file.write_bytes(cut_file.read_bytes()[:-9])
    cut_file.with_name("cmpl-x.safetensors").symlink_to(outside)
    os.utime(shutil.copy(outside, cut_file.with_name("cmpl-w.safetensors")), (1, 1))  # another of the same text
    cut_file.with_name("cmpl-v.safetensors.lock").touch()
    save_file({"token_ids": torch.ones(2, 2)}, cut_file.with_name("cmpl-y.safetensors"))
    save_file({"token_ids": torch.ones(2)}, cut_file.with_name("cmpl-z.safetensors"))
    capsys.readouterr()
    run = run_of(questions, tmp_path / "run", *overrides)
    assert "the states of 29 of 30 texts were written" in capsys.readouterr().err
    assert len(list(engine.folder.iterdir())) == 29
    good = load_file(files_of[0])
    states, tokens = good["hidden_states"], good["token_ids"]
    others = [
        {"hidden_states": states * torch.nan}, {"hidden_states": states[:, :1].contiguous()},
        {"hidden_states": states[:, :, 1:].contiguous()}, {"token_ids": tokens + 1},
    ]  # fmt: skip
    for file, other in zip(files_of, others, strict=False):
        save_file({**load_file(file), **other}, file)
    *_, lost, torn, linked = files_of

    async def written(path: Path) -> None:
        assert path.exists(), "a missing file is not waited for"

    monkeypatch.setattr("draftsmith.distill.server.state_folder.written", written)
    lost.unlink()
    torn.write_bytes(b"x")
    linked.unlink()
    linked.symlink_to(outside)
    counts = dict(zip(trained_texts(run), asked_in(run, engine), strict=True))
    assert {text for text, count in counts.items() if count} == {cut, *spoilt}
    assert outside.exists()
    assert not list(engine.folder.iterdir())
    assert_equal_runs(tmp_path / "run", tmp_path / "plain", rtol=1e-6, atol=1e-6)


def test_states_of_answers_that_are_still_written_are_waited_for(
    questions: Path, engine: StatesEngine, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = json.loads((tmp_path / "prompts.jsonl").read_text().splitlines()[-1])["prompt"]
    engine.faults = {tuple(engine.answering.tokenizer(last)["input_ids"]): ["late"]}
    engine.late_seconds = 3.0
    kept = served(engine.folder, address, answers_gib=1, timeout_seconds=60)
    run_of(questions, tmp_path / "run", *ANSWERED, *EPOCH, *kept)
    assert "the states of 30 of 30 texts were written" in capsys.readouterr().err
    assert not any(engine.faults.values())
    assert len(list(engine.folder.iterdir())) == 30


def test_states_of_answers_are_deleted_with_their_run(
    questions: Path, engine: StatesEngine, address: str, tmp_path: Path
) -> None:
    """Those of rows that no step had, and those that an interrupted run of other data has left."""
    overrides = [*ANSWERED, *EPOCH, *served(engine.folder, address, answers_gib=1)]
    run_of(questions, tmp_path / "interrupted", *overrides)
    assert len(list(engine.folder.iterdir())) == 30
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i:03}"}) for i in range(12)))
    run = run_of(questions, tmp_path / "run", *overrides, "train.steps=1", "train.batch_size=2")
    assert len(list(engine.folder.iterdir())) == 12
    run.train()
    assert not list(engine.folder.iterdir())


def test_conversations_have_the_states_of_their_last_answer(
    questions: Path, engine: StatesEngine, address: str, tmp_path: Path
) -> None:
    """The files of earlier turns are deleted."""
    users = [[{"role": "user", "content": LETTERS[i + turn :][:2]} for turn in (0, 5)] for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in users))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    overrides = [*ANSWERED, "data.turns=all", f"data.chat_template={tmp_path / 'template.jinja'}", "train.steps=1"]
    run = run_of(questions, tmp_path / "run", *overrides, *served(engine.folder, address, answers_gib=1))
    kept = {tuple(load_file(file)["token_ids"].tolist()) for file in engine.folder.glob("chatcmpl-*")}
    assert kept == {tuple(ids[:-1]) for ids in run.data.rows["input_ids"]}
    assert len(list(engine.folder.iterdir())) == 12
    assert [len(spans) for spans in run.data.rows["spans"]] == [2] * 12
    assert not any(asked_in(run, engine))


def test_answers_of_another_server_have_no_states(
    questions: Path, engine: StatesEngine, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [*ANSWERED, *EPOCH, *served(engine.folder, address, answers_gib=1)]
    with Engine(model="target", answer=model_answers(deepcopy(engine.target))).running() as other:
        run = run_of(questions, tmp_path / "run", *overrides, f"data.server={{url: '{other.url}', model: target}}")
    assert len(other.asked) > 30
    assert not any("kv_transfer_params" in body for body in other.asked)
    assert "the states of 0 of 30 texts were written" in capsys.readouterr().err
    assert set(asked_in(run, engine)) == {1}


def test_patience_begins_after_the_states_of_answers_are_read(
    questions: Path, engine: StatesEngine, address: str, tmp_path: Path
) -> None:
    """An epoch may pass without a request."""
    overrides = [*ANSWERED, *served(engine.folder, address, answers_gib=1, patience_minutes=0.002)]
    run = run_of(questions, tmp_path / "run", *overrides)
    assert run.served is not None
    for server in run.served._servers:
        server.down_until = float("inf")
    run.served._alive -= 3600
    run.served.read([0])
    assert len(list(engine.folder.iterdir())) == 29, "it is read once"
    with pytest.raises(EngineLost, match="no server answers for 0 minutes"):
        run.served.read([0])


def test_a_folder_without_room_for_the_states_of_answers_is_refused_before_they_are_sampled(
    questions: Path, engine: StatesEngine, address: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"GiB are free, .*, those of answers 1000000.0 GiB; .*answers_gib"):
        train(recipe_of(questions, tmp_path / "run", *ANSWERED, *served(engine.folder, address, answers_gib=1e6)))
    assert not engine.asked


@pytest.mark.slow
def test_two_processes_share_the_states_of_answers(
    questions: Path, engine: StatesEngine, address: str, tmp_path: Path
) -> None:
    overrides = [*ANSWERED, "train.steps=10", "train.batch_size=6", "train.evaluate_every=4"]
    alone = run_of(questions, tmp_path / "alone", *overrides, *served(engine.folder, address))
    alone.train()
    engine.asked.clear()
    (tmp_path / "cache").rename(tmp_path / "earlier")
    both = [f"output={tmp_path / 'both'}", *overrides, *served(engine.folder, address, answers_gib=1)]
    ended = launched(questions, *both, processes=2)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "the states of 30 of 30 texts were written" in ended.stderr
    requests = sum(engine.asked.count(text) for text in trained_texts(alone))
    compared, start, later = 2 * 8, 6, 10 * 6 - 25
    assert 0 <= compared + start + later - requests < 4, "both may read a text at the same time"
    torch.testing.assert_close(losses_of(tmp_path / "both"), losses_of(tmp_path / "alone"), rtol=1e-5, atol=1e-5)
    assert not list(engine.folder.iterdir())
