"""Train EAGLE-3 with draftsmith and with vLLM's speculators on the same texts: tokens/s, peak memory, tau.

    python benchmarks/peers.py                      # installs speculators 0.9.0 into .venv-peers first; slow
    python benchmarks/peers.py --steps 1 --tau-steps 2 --prompts 2 --count 40   # does it run?

The peer's own model, loss, loader, optimizer and `Trainer.train_epoch`, from PyPI, in an environment of its own that
borrows this one's torch and transformers. The embedded target, 16 texts a step, four steps of the training-time test,
the full vocabulary, KL with weights 0.8^k, AdamW at one constant rate, float32. The sides alternate step by step in
one process. Online, the target runs over the 16 texts of a step for both sides; cached, both read its states from disk.

The peer packs the texts into one row; its flex attention has no backward pass on a CPU, so that it attends with a dense
mask of all pairs. 'peer, by text' feeds it one text at a time and sums the gradients, which avoids that.

Memory: each side in its own process, the growth of the resident memory over four steps. Tau: after as many steps of
each, on held-out prompts; the intervals of ours / peer resample the prompts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.heads.checkpoint import load_drafter
from draftsmith.names import EMBEDDED
from draftsmith.train import trainer as loop
from draftsmith.train.data import chat_of, heldout_prompts
from draftsmith.train.evaluation import evaluate_drafter
from draftsmith.train.launch import make_accelerator
from draftsmith.train.progress import MemoryMeter
from draftsmith.train.recipe import Recipe, load_recipe
from draftsmith.train.run_folder import claim_output

ROOT = Path(__file__).resolve().parents[1]
PEER = ("speculators==0.9.0", "hs-connectors==0.9.0")
LIGHT = ("openai", "httpx", "loguru", "pydantic-settings")
"""Its imports that are missing here; of its other dependencies this environment has newer versions."""
TEXTS, TTT_STEPS, DECAY, RATE = 16, 4, 0.8, 3e-3
SIDES = ("ours", "peer", "peer, by text")
BY_TEXT = "ours, by text"
"""For memory alone: `train.gradient_accumulation` of all texts, which takes them one at a time too."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="Python of an environment that has the peer")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--count", type=int, default=1024, help="prompts")
    parser.add_argument("--steps", type=int, default=10, help="counted steps of every side")
    parser.add_argument("--tau-steps", type=int, default=120, help="steps before tau is measured")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts for tau")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


def peers_python() -> str:
    """Install the peer beside this environment's packages and return its Python."""
    folder = ROOT / ".venv-peers"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        borrowed = [sysconfig.get_paths()["purelib"], *(path for path in sys.path if "site-packages" in path)]
        (folder / "lib" / version / "site-packages" / "borrowed.pth").write_text("\n".join(borrowed))
        for packages in (["--no-deps", *PEER], LIGHT):
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
    return str(python)


def make_run(options: argparse.Namespace, teacher: str, folder: Path, *more: str) -> loop.Run:
    overrides = [f"output={folder / 'run'}", f"target.model={options.target}", f"data.count={options.count}"]
    overrides += [f"teacher.kind={teacher}", "teacher.dtype=float32", "data.temperature=1", "evaluation.count=1"]
    overrides += ["train.optimizer=adamw", f"train.learning_rate={RATE}", "train.schedule=constant"]
    overrides += ["train.warmup_fraction=0", "train.mixed_precision=no", f"objective.position_decay={DECAY}", *more]
    recipe: Recipe = load_recipe("eagle3/embedded", overrides)
    claim_output(recipe)
    return loop.Run(recipe, make_accelerator(recipe, folder / "run"), folder / "run")


# The peer.


@torch.no_grad()
def states_of(target: PreTrainedModel, texts: list[Tensor], layers: tuple[int, ...]) -> list[Tensor]:
    """Return the states [T, layers + 1, H] of texts as engines hand them over: the last one before the final norm."""
    deepest: list[Tensor] = []
    handle = target.model.norm.register_forward_pre_hook(lambda _, given: deepest.append(given[0]))
    ids_BT = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    hidden = target.model(input_ids=ids_BT, output_hidden_states=True, use_cache=False).hidden_states
    handle.remove()
    states_BTLH = torch.stack([*(hidden[layer] for layer in layers), deepest[0]], 2)
    return [states[: len(text)].clone() for states, text in zip(states_BTLH, texts, strict=True)]


class Peer:
    """The peer's trainer on the rows of a run."""

    def __init__(self, run: loop.Run, teacher: str, folder: Path) -> None:
        from hs_connectors import FileTransfer
        from speculators.models.eagle3 import Eagle3DraftModel
        from speculators.models.eagle3.data import shift_batch
        from speculators.train import trainer as theirs
        from speculators.train.data import ArrowDataset
        from speculators.train.dataloader import _setup_dataloader

        self.target, self.layers = run.target.model, run.drafter.needs.layers
        self.rows = [self._row(row) for row in run.data.rows.select(range(run.data.trained))]
        Dataset.from_list(self.rows).with_format("torch").save_to_disk(folder / "texts")
        run.target.model.save_pretrained(folder / "target")
        config = type(run.target.model.config).from_pretrained(folder / "target", num_hidden_layers=1)
        torch.manual_seed(0)
        self.model: Any = Eagle3DraftModel.from_training_args(
            config,
            draft_vocab_size=config.vocab_size,
            norm_before_residual=False,
            ttt_steps=TTT_STEPS,
            verifier_name_or_path=str(folder / "target"),
            target_layer_ids=list(self.layers),
            draft_attn_impl="sdpa",
        )
        longest = max(row["seq_len"] for row in self.rows)
        transfer: Any = FileTransfer(folder / "states")
        (folder / "states").mkdir()
        data = ArrowDataset(longest, folder / "texts", transfer, on_missing="raise", hidden_states_dtype=torch.float32)
        sizes = {"num_workers": 0, "num_target_layers": len(self.layers), "preprocess": shift_batch}
        self.loader: Any = _setup_dataloader(data, TEXTS * longest, config.hidden_size, **sizes)
        if teacher == "cached":
            self._store(range(len(self.rows)), folder / "states")
        else:
            self.ready: dict[int, dict[str, Tensor]] = {}
            transfer.get_cached = self._computed
        calls, _ = Eagle3DraftModel.get_trainer_kwargs(
            loss_fn="kl_div", loss_implementation="eager", ttt_steps=TTT_STEPS, ttt_step_loss_decay=DECAY
        )
        theirs.get_local_rank = lambda: "cpu"  # it is made for CUDA alone
        settings = {"weight_decay": 0.0, "scheduler_type": "none", "hidden_states_dtype": torch.float32}
        settings |= {"train_call_kwargs": calls, "log_freq": 10**9, "checkpoint_freq": 10**9}
        configured = theirs.TrainerConfig(RATE, 1, str(folder / "peer"), **settings)
        self.trainer: Any = theirs.Trainer(self.model, configured, self.loader)
        self.trainer.device_type, self.trainer.rank = "cpu", 1  # no bar
        self.trainer.global_step = 1  # step 0 would be profiled
        self.calls, self.epoch, self.batches = calls, 0, iter(())

    @staticmethod
    def _row(row: dict[str, Any]) -> dict[str, Any]:
        mask = [False] * len(row["input_ids"])
        for start, end in row["spans"]:
            mask[start:end] = [True] * (end - start)
        return {"input_ids": row["input_ids"], "loss_mask": mask, "seq_len": len(row["input_ids"])}

    def _states(self, places: list[int]) -> dict[int, dict[str, Tensor]]:
        texts = [torch.tensor(self.rows[place]["input_ids"]) for place in places]
        found = states_of(self.target, texts, self.layers)
        return {
            place: {"token_ids": text, "hidden_states": states}
            for place, text, states in zip(places, texts, found, strict=True)
        }

    def _store(self, places: range, folder: Path) -> None:
        for start in range(0, len(places), TEXTS):
            for place, item in self._states(list(places[start : start + TEXTS])).items():
                save_file(item, folder / f"hs_{place}.safetensors")

    def _computed(self, place: int) -> dict[str, Tensor]:
        """Return a text's states; those of its whole batch are computed together."""
        if place not in self.ready:
            batches = self.loader.batch_sampler._generate_batches(self.epoch)
            (batch,) = [batch for batch in batches if place in batch]
            self.ready = self._states([int(index) for index in batch])
        return self.ready[place]

    def step(self, by_text: bool) -> None:
        """Take one optimizer step with the trainer's own loop, or text by text."""
        batch = next(self.batches, None)
        if batch is None:
            self.epoch += 1
            self.loader.batch_sampler.set_epoch(self.epoch)
            self.batches = iter(self.loader)
            batch = next(self.batches)
        if by_text:
            self._by_text(batch)
        else:
            self.trainer.train_loader = _Loader([batch])
            self.trainer.train_epoch(self.epoch)

    def _by_text(self, batch: dict[str, Any]) -> None:
        self.model.train()
        self.trainer._optimizers_zero_grad()
        documents = batch["document_ids"][0]
        for number in range(int(documents.max()) + 1):
            kept = documents == number
            part = {key: value[:, kept] for key, value in batch.items() if isinstance(value, Tensor)}
            _, loss, _ = self.model(**{**part, "document_ids": torch.zeros_like(part["document_ids"])}, **self.calls)
            (loss / TEXTS).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.trainer._optimizers_step()


class _Loader(list[Any]):
    """One batch, as the trainer's loop reads a loader."""

    batch_sampler = None


# Measuring; each in a process of its own, with the peer's Python.


def sides_of(run: loop.Run, peer: Peer) -> dict[str, Callable[[int], object]]:
    steps = (run.step, lambda _: peer.step(by_text=False), lambda _: peer.step(by_text=True))
    return dict(zip(SIDES, steps, strict=True))


def measure_speed(options: argparse.Namespace, teacher: str, folder: Path) -> dict[str, float]:
    """Return the tokens/s of every side: medians over steps that alternate; the first of each is not counted."""
    run = make_run(options, teacher, folder)
    sides, seconds = sides_of(run, Peer(run, teacher, folder)), {name: [] for name in SIDES}
    for step in range(options.steps + 1):
        first = step % len(SIDES)
        for name in SIDES[first:] + SIDES[:first]:
            started = time.process_time()
            sides[name](step)
            seconds[name].append(time.process_time() - started)
    tokens = TEXTS * statistics.mean(map(len, run.data.rows["input_ids"]))
    return {name: tokens / statistics.median(values[1:]) for name, values in seconds.items()}


def measure_memory(options: argparse.Namespace, teacher: str, folder: Path, side: str) -> dict[str, int]:
    """Return the growth of this process's resident memory over four steps, with the target and the data loaded."""
    run = make_run(options, teacher, folder, *([f"train.gradient_accumulation={TEXTS}"] if side == BY_TEXT else []))
    peer = None if side.startswith("ours") else Peer(run, teacher, folder)
    meter = MemoryMeter(torch.device("cpu"))
    for step in range(4):
        run.step(step) if peer is None else peer.step(by_text=side == SIDES[2])
    return {"peak": meter.peak()}


def measure_tau(options: argparse.Namespace, teacher: str, folder: Path) -> dict[str, Any]:
    """Return tau of ours and of the peer after as many steps, and the interval of their ratio over the prompts."""
    options.count = max(options.count, TEXTS * options.tau_steps // 4)
    run = make_run(options, teacher, folder)
    peer = Peer(run, teacher, folder)
    for step in range(options.tau_steps):
        run.step(step)
        peer.step(by_text=True)
    peer.model.save_pretrained(folder / "trained")
    theirs = load_drafter(str(folder / "trained"), run.target.model, run.target.tokenizer)
    settings = run.recipe.evaluation.model_copy(update={"count": options.prompts, "max_new_tokens": 64})
    recipe = run.recipe.model_copy(update={"evaluation": settings})
    prompts = heldout_prompts(EMBEDDED, chat_of(recipe.data, run.target), run.target, recipe)
    found: dict[str, Any] = {}
    for temperature in (0.0, 1.0):
        at, counts = settings.model_copy(update={"temperature": temperature}), []
        for drafter in (run.drafter, theirs):
            evaluation = evaluate_drafter(run.target.model, drafter, prompts, at, run.draft_length)
            assert evaluation is not None, "nothing stops it"
            counts.append(np.array([evaluation["tokens"], evaluation["rounds"]], dtype=float))
        drawn_SP = np.random.default_rng(0).multinomial(
            len(prompts), np.full(len(prompts), 1 / len(prompts)), size=2000
        )
        ours_S, theirs_S = ((drawn_SP @ tokens) / (drawn_SP @ rounds) for tokens, rounds in counts)
        taus = [float(tokens.sum() / rounds.sum()) for tokens, rounds in counts]
        interval = np.quantile(ours_S / theirs_S, [0.025, 0.975]).tolist()
        found[f"T={temperature:g}"] = (*taus, taus[0] / taus[1], *interval)
    return found


def measured(python: str, *what: str) -> Any:
    """Measure in a process of its own, and return what it printed last."""
    command = [python, str(Path(__file__).resolve()), *sys.argv[1:], "--measure", *what]
    # Both sides with the allocator as it is; torch's threads of two processes would wait for each other.
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=variables)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    options = arguments()
    if options.measure:
        what, teacher, *side = options.measure
        measure = {"speed": measure_speed, "memory": measure_memory, "tau": measure_tau}[what]
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps(measure(options, teacher, Path(name), *side)))
        return
    python = options.python or peers_python()
    for teacher in ("online", "cached"):
        speeds = measured(python, "speed", teacher)
        peaks = {side: measured(python, "memory", teacher, side)["peak"] for side in (*SIDES, BY_TEXT)}
        print(f"{teacher}:")
        for side in SIDES:
            speed, peak = speeds[side], peaks[side]
            ratios = f"ours / this {speeds['ours'] / speed:.2f}, memory {peaks['ours'] / peak:.2f}"
            print(f"  {side:14s} {speed:7.0f} tokens/s {peak / 2**20:7.0f} MiB; {ratios}", flush=True)
        print(f"  {BY_TEXT:31s} {peaks[BY_TEXT] / 2**20:7.0f} MiB", flush=True)
    for at, (ours, theirs, ratio, low, high) in measured(python, "tau", "cached").items():
        print(f"{at}, {options.tau_steps} steps: tau {ours:.2f} / {theirs:.2f} = {ratio:.2f} [{low:.2f}, {high:.2f}]")


if __name__ == "__main__":
    main()
