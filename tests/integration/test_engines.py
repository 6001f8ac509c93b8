"""One recipe under all engines, in one and two processes on a CPU: the same numbers, and one checkpoint for all."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import write_rows
from conftest import LETTERS, make_llama, mostly_slow, write_recipe
from forked import Processes, Runs, Server, free_port
from run_results import as_if_killed, finished, metrics_of
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from draftsmith.train.run_folder import read_metrics

ENGINES = {
    "one": (1, {}),
    # The loop accumulates, whatever accelerate was told.
    "ddp": (2, {"ACCELERATE_USE_CPU": "true", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}),
    "fsdp2": (2, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}),
    "zero2": (2, {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}),
    "zero3": (2, {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}),
}
ESTIMATED = ("fsdp2", "zero3")
SEVERAL = [name for name, (processes, _) in ENGINES.items() if processes > 1]
LOSS = {"rtol": 1e-5, "atol": 0.0}
"""float32 sums over a batch in another order: 1e-7 a step, which a handful of steps multiplies."""
WEIGHTS = {"rtol": 1e-4, "atol": 1e-5}
"""AdamW divides by the root of a moment, so that a small gradient's rounding moves its weight by more."""


class EngineRuns(Runs):
    def start(self, name: str, engine: str, *overrides: str) -> list[int]:
        """Of some runs with the recipe as it stands, which are called as their engine, memory is estimated first."""
        count, environment = ENGINES[engine]
        how = {"processes": count, "environment": environment, "estimate": name == engine in ESTIMATED}
        return super().start(name, *overrides, **how)

    def train(self, name: str, engine: str, *overrides: str, code: int = 0) -> None:
        assert self.run(name, engine, *overrides) == [code] * ENGINES[engine][0], self.said(name)[-4000:]

    def require(self, name: str) -> None:
        """Do the run of an engine with the recipe as it stands, unless it has been done."""
        if name in ENGINES and not (self.place / name).exists():
            self.train(name, name)

    def copied(self, name: str, copy: str) -> str:
        """A copy of a run, as if killed after the checkpoint before the last."""
        self.require(name)
        shutil.copytree(self.place / name, self.place / copy)
        as_if_killed(self.place / copy, 3)
        return copy

    def rows(self, name: str) -> list[dict[str, Any]]:
        return metrics_of(self.place / name)

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.last(name) / "model.safetensors")

    def last(self, name: str) -> Path:
        return self.place / name / "checkpoints" / "step-000006"

    def require_same(self, name: str, reference: str) -> None:
        """Losses, norms and final weights, up to rounding; and what was decoded on the way."""
        self.require(name)
        self.require(reference)
        ours, theirs = self.rows(name), self.rows(reference)
        assert [row["step"] for row in ours] == [row["step"] for row in theirs]
        for key in ("loss", "gradient_norm"):
            values = [torch.tensor([row[key] for row in rows if key in row]) for rows in (ours, theirs)]
            torch.testing.assert_close(*values, **LOSS)
        ends = [[row["evaluation"] for row in rows if "evaluation" in row] for rows in (ours, theirs)]
        assert len(ends[0]) == 3
        for mine, other in zip(*ends, strict=True):
            assert mine["tau"] == other["tau"]
        validated = [[row["validation"]["loss"] for row in rows if "validation" in row] for rows in (ours, theirs)]
        losses = list(map(torch.tensor, validated))
        assert len(losses[0]) == 3
        torch.testing.assert_close(*losses, **LOSS)
        wanted = self.weights(reference)
        torch.testing.assert_close(self.weights(name), wanted, **WEIGHTS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def processes(run_server: Server, place: Path) -> Processes:
    return Processes(run_server, {"DRAFTSMITH_CACHE": str(place / "cache")})


@pytest.fixture
def runs(place: Path, processes: Processes, tiny_tokenizer: PreTrainedTokenizerFast) -> EngineRuns:
    """All tests share one folder: the target is sampled once, and each engine's run is done once."""
    made = EngineRuns(place, processes, place / "recipe.yaml")
    if made.recipe.exists():
        return made
    make_llama(num_hidden_layers=4).save_pretrained(place / "target")
    tiny_tokenizer.save_pretrained(place / "target")
    # The validation is read 2 rows at a time: two processes have 2 and 2, then 1 and none.
    data, train = {"response_tokens": 16, "count": 29, "validation": 5}, {"evaluate_every": 3, "checkpoint_every": 3}
    decoded = {"count": 2, "max_new_tokens": 8}
    write_recipe(place, place / "target", decoded, data, steps=6, gradient_accumulation=2, **train)
    # A head of its own, over a draft vocabulary: weights that the objective reads outside of any module.
    drafter = {"type": "eagle3", "layers": [1, 2], "draft_vocab_size": 40}
    made.recipe.write_text(yaml.safe_dump({**yaml.safe_load(made.recipe.read_text()), "drafter": drafter}))
    return made


@pytest.mark.parametrize("engine", mostly_slow(SEVERAL, "fsdp2"))
def test_all_engines_train_the_same_drafter(engine: str, runs: EngineRuns) -> None:
    runs.require_same(engine, "one")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "zero2", "zero3"])
def test_an_engine_continues_bit_by_bit(engine: str, runs: EngineRuns) -> None:
    again = runs.copied(engine, f"{engine}-again")
    runs.train(again, engine)
    assert runs.rows(again) == runs.rows(engine)
    for name, weight in runs.weights(engine).items():
        assert torch.equal(runs.weights(again)[name], weight), name
    drafters = [(runs.place / name / "drafter" / "model.safetensors").read_bytes() for name in (again, engine)]
    assert drafters[0] == drafters[1]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("fsdp2", "one"), ("zero3", "fsdp2"), ("one", "zero3"), ("ddp", "zero2")])
def test_another_engine_and_world_size_may_continue(first: str, then: str, runs: EngineRuns) -> None:
    changed = runs.copied(first, f"{first}-{then}")
    runs.train(changed, then)
    assert "resuming after step 3" in runs.said(changed)
    runs.require_same(changed, "one")


@pytest.mark.slow
def test_a_sharded_target_gives_the_same_numbers(runs: EngineRuns) -> None:
    runs.train("zero3-sharded", "zero3", "target.sharded=true")
    runs.require_same("zero3-sharded", "one")


@pytest.mark.slow
def test_a_sharded_target_answers_and_fills_caches(runs: EngineRuns) -> None:
    """Processes with unequal shares: 21 questions in batches of 5, and shards of 5 rows."""
    data = ("data.count=21", "data.batch_size=5", "train.seed=3")
    cached = (*data, "teacher.kind=cached", "teacher.dtype=float32", "teacher.shard_rows=5")
    runs.train("whole-target", "one", *cached)
    shutil.rmtree(runs.place / "cache")
    runs.train("sharded-target", "ddp", *cached, "target.sharded=true")
    runs.require_same("sharded-target", "whole-target")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3"])
def test_processes_that_share_texts_give_the_same_numbers(engine: str, runs: EngineRuns) -> None:
    runs.train(f"{engine}-texts", engine, "train.sequence_parallel=2")
    runs.require_same(f"{engine}-texts", "one")


@pytest.mark.slow
def test_processes_that_share_packed_texts_train_blocks_at_the_same_anchors(runs: EngineRuns) -> None:
    """Of accumulation steps too, and in the validation."""
    blocks = ("drafter.type=dflash", "drafter.anchors=3", "data.pack=true")
    runs.train("blocks", "one", *blocks)
    runs.train("ddp-blocks", "ddp", *blocks, "train.sequence_parallel=2")
    runs.require_same("ddp-blocks", "blocks")


@pytest.mark.slow
@pytest.mark.parametrize("engine", SEVERAL)
def test_a_process_may_have_a_row_that_is_shorter_than_the_draft(engine: str, runs: EngineRuns) -> None:
    """Rows of two tokens, each of them alone in its part of a batch where there are two processes."""
    texts = ["ab", "cd", *(LETTERS[start : start + 12] for start in range(8))]
    write_rows(runs.place / "short.jsonl", ({"text": text} for text in texts))
    prompts = (f"data.prompts={runs.place / 'short.jsonl'}", f"evaluation.prompts={runs.place / 'short.jsonl'}")
    short = ("data.response=text", "data.prompt_tokens=1", "train.batch_size=4", "objective.kind=lk_lambda", *prompts)
    if not (runs.place / "short").exists():
        runs.train("short", "one", *short)
    runs.train(f"short-{engine}", engine, *short)
    runs.require_same(f"short-{engine}", "short")


@pytest.mark.slow
def test_muon_gathers_what_fsdp2_shards(runs: EngineRuns) -> None:
    muon = ("train.optimizer=muon",)
    runs.train("muon", "one", *muon)
    runs.train("muon-fsdp2", "fsdp2", *muon)
    runs.require_same("muon-fsdp2", "muon")


@pytest.mark.slow
def test_two_processes_agree_on_an_early_end(runs: EngineRuns) -> None:
    runs.train("still", "ddp", "train.learning_rate=1e-9", "train.patience=1")
    assert runs.rows("still")[-1]["ending"]["last_step"] == 3
    assert finished(runs.place / "still")["steps"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_a_signal_to_one_process_stops_all_after_one_step(engine: str, runs: EngineRuns) -> None:
    name = f"{engine}-signal"
    started = runs.start(name, engine, "train.steps=2000", "train.evaluate_every=2000")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(read_metrics(runs.place / name)) < 3:
        time.sleep(0.01)
    os.kill(started[1], signal.SIGTERM)
    assert runs.server.wait(started) == [143, 143], runs.said(name)
    last = runs.rows(name)[-1]["step"]
    assert (runs.place / name / "checkpoints" / f"step-{last:06d}").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_a_loss_that_is_no_number_changes_no_weight(engine: str, runs: EngineRuns) -> None:
    """Steps of 1e30 blow the weights up, and the next loss is none; what is kept is the state before that step."""
    name = f"{engine}-none"
    runs.train(name, engine, "train.learning_rate=1e30", "train.weight_decay=0.5", "evaluation.count=1", code=2)
    assert ", loss=" in runs.said(name)
    assert json.loads((runs.place / name / "failed_batch.json").read_text())["rows"]
    losses = [row["loss"] for row in runs.rows(name) if "loss" in row]
    assert all(torch.tensor(losses).isfinite())


@pytest.mark.slow
@pytest.mark.parametrize("config", ["cpu_2", "fsdp2_2cpu", "zero2_8gpu", "zero3_8gpu"])
def test_shipped_launch_configs_start_a_run(config: str, runs: EngineRuns) -> None:
    """Through `accelerate launch` itself; those for GPUs on two processes of this CPU."""
    file = Path(__file__).parents[2] / "recipes" / "accelerate" / f"{config}.yaml"
    name = f"launched-{config}"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), "--num_processes", "2"]
    launch += ["--main_process_port", str(free_port()), "-m", "draftsmith.train", str(runs.place / "recipe.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DRAFTSMITH_CACHE": str(runs.place / "cache")}
    result = subprocess.run([*launch, f"output={runs.place / name}"], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    runs.require_same(name, "one")


@pytest.mark.slow
def test_a_slurm_job_on_two_machines_trains_the_same_drafter(runs: EngineRuns) -> None:
    """Two launchers on this machine meet at a rendezvous; stand-ins for SLURM's commands start one for each node."""
    tools = runs.place / "slurm"
    tools.mkdir()
    commands = {
        "scontrol": "echo 127.0.0.1",
        # accelerate refuses a port that is in use on node 0, which both share here: node 0 opens it first.
        "srun": 'SLURM_NODEID=0 "$@" & first=$!\n'
        "until (: < /dev/tcp/127.0.0.1/$PORT) 2> /dev/null; do kill -0 $first || exit 1; sleep 0.2; done\n"
        'SLURM_NODEID=1 "$@" & wait $! && wait $first',
        "accelerate": f'exec {sys.executable} -m accelerate.commands.accelerate_cli "$@"',
    }
    for name, body in commands.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "PROCESSES": "1", "PORT": str(free_port())}
    environment = {**os.environ, **job, "OMP_NUM_THREADS": "1", "DRAFTSMITH_CACHE": str(runs.place / "cache")}
    environment["PATH"] = f"{tools}:{environment['PATH']}"
    command = ["bash", "recipes/accelerate/slurm.sh", "cpu_2", str(runs.place / "recipe.yaml")]
    command += [f"output={runs.place / 'slurm-run'}"]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    runs.require_same("slurm-run", "one")
