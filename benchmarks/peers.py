"""Train EAGLE-3 or DFlash with draftsmith and with vLLM's speculators on the same texts: tokens/s, peak memory, tau.

    python benchmarks/peers.py                      # installs speculators 0.9.0 into .venv-peers first; slow
    python benchmarks/peers.py --family dflash
    python benchmarks/peers.py --steps 1 --tau-steps 2 --prompts 2 --count 40   # does it run?
    python benchmarks/peers.py --target MODEL --texts 8 --teachers cached --set data.prompts=PROMPTS.jsonl \
        data.prompt_tokens=192 data.response_tokens=256 drafter.draft_vocab_size=8192 \
        evaluation.prompts=HELDOUT.jsonl --rate 1e-3                                # a target of the user

The peer's own model, loss, loader, optimizer and `Trainer.train_epoch`, from PyPI, in an environment of its own that
borrows this one's torch and transformers. By default the embedded target, 16 texts a step, four steps of EAGLE-3's
training-time test or the blocks and anchors of the recipe dflash/embedded, the full vocabulary (--set: any key of our
recipe; a draft vocabulary is the peer's too), KL with the peer's weights of positions, AdamW at one constant rate,
float32. The sides alternate step by step in one process. Online, the target
runs over the texts of a step for both sides; cached, both read its states from disk.

The peer packs the texts into one row; its flex attention has no backward pass on a CPU, so that it attends with a dense
mask of all pairs. 'peer, by text' feeds it one text at a time and sums the gradients, which avoids that.

Memory: the peak of the resident memory of a process that loads what its side needs and takes four steps, libraries
included; states were computed by an earlier process. Tau: after as many steps of each, on held-out prompts; the
intervals of ours / peer resample the prompts.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftsmith.heads import DFlash
from draftsmith.heads.checkpoint import load_drafter
from draftsmith.names import EMBEDDED
from draftsmith.train import trainer as loop
from draftsmith.train.launch import make_accelerator
from draftsmith.train.recipe import Recipe, load_recipe
from draftsmith.train.run_folder import claim_output
from draftsmith.train.training_data import chat_of, heldout_prompts
from draftsmith.train.validation import evaluate_drafter

ROOT = Path(__file__).resolve().parents[1]
PEER = ("speculators==0.9.0", "hs-connectors==0.9.0")
LIGHT = ("openai", "httpx", "loguru", "pydantic-settings")
"""Its imports that are missing here; of its other dependencies this environment has newer versions."""
TTT_STEPS = 4
DECAY = {"eagle3": 0.8, "dflash": math.exp(-1 / 4)}
"""Weight of a draft position over that of the one before it; the peer's default of DFlash."""
SIDES = ("ours", "peer", "peer, by text")
BY_TEXT = "ours, by text"
"""For memory alone: `train.gradient_accumulation` of all texts, which takes them one at a time too."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="Python of an environment that has the peer")
    parser.add_argument("--family", default="eagle3", choices=DECAY)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--count", type=int, default=1024, help="prompts")
    parser.add_argument("--texts", type=int, default=16, help="texts of a step")
    parser.add_argument("--teachers", nargs="+", default=["online", "cached"], choices=["online", "cached"])
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of our recipe FAMILY/embedded")
    parser.add_argument("--rate", type=float, default=3e-3, help="of AdamW, for both")
    parser.add_argument("--steps", type=int, default=10, help="counted steps of every side")
    parser.add_argument("--tau-steps", type=int, default=120, help="steps before tau is measured; 0: it is not")
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


def make_run(options: argparse.Namespace, teacher: str, folder: Path, *more: str) -> loop.TrainingRun:
    overrides = [f"output={folder / 'run'}", f"target.model={options.target}", f"data.count={options.count}"]
    overrides += [f"teacher.kind={teacher}", "teacher.dtype=float32", "data.temperature=1", "evaluation.count=1"]
    overrides += ["train.optimizer=adamw", f"train.learning_rate={options.rate}", "train.schedule=constant"]
    overrides += ["train.warmup_fraction=0", "train.mixed_precision=no"]
    overrides += [f"objective.position_decay={DECAY[options.family]}", f"train.batch_size={options.texts}"]
    overrides += [f"drafter.train_steps={TTT_STEPS}"] if options.family == "eagle3" else []
    recipe: Recipe = load_recipe(f"{options.family}/embedded", [*overrides, *options.set, *more])
    claim_output(recipe)
    return loop.TrainingRun(recipe, make_accelerator(recipe, folder / "run"), folder / "run")


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


@dataclass(frozen=True)
class PeerFiles:
    """The input of the peer's trainer: texts, the target and, with a cached teacher, states."""

    folder: Path

    @classmethod
    def write(cls, run: loop.TrainingRun, options: argparse.Namespace, teacher: str, folder: Path) -> Self:
        """Write the rows of a run."""
        files, rows = cls(folder), run.data.rows.select(range(run.data.trained))
        Dataset.from_list([_peer_row(row) for row in rows]).with_format("torch").save_to_disk(folder / "texts")
        run.target.model.save_pretrained(folder / "target")
        vocabulary = None if run.drafter.draft_vocabulary is None else run.drafter.draft_vocabulary.tokens_D.tolist()
        plan = {"layers": list(run.drafter.needs.layers), "vocabulary": vocabulary}
        if isinstance(run.drafter, DFlash):
            plan |= {"block": run.drafter.block_size, "depth": len(run.drafter.body.layers)}
            plan |= {"anchors": run.drafter.anchors, "mask": run.drafter.mask_token}
        (folder / "plan.json").write_text(json.dumps(plan))
        (folder / "states").mkdir()
        for start in range(0, len(rows) if teacher == "cached" else 0, options.texts):
            texts = [torch.tensor(ids) for ids in rows[start : start + options.texts]["input_ids"]]
            for place, states in enumerate(states_of(run.target.model, texts, run.drafter.needs.layers), start):
                item = {"token_ids": texts[place - start], "hidden_states": states}
                save_file(item, folder / "states" / f"hs_{place}.safetensors")
        return files

    @property
    def plan(self) -> dict[str, Any]:
        return json.loads((self.folder / "plan.json").read_text())


def _mappings(tokens_D: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return t2d [V] and d2t [D] of a draft vocabulary."""
    t2d_V = torch.zeros(size, dtype=torch.bool)
    t2d_V[tokens_D] = True
    return t2d_V, tokens_D - torch.arange(len(tokens_D))


def _peer_row(row: dict[str, Any]) -> dict[str, Any]:
    mask = [False] * len(row["input_ids"])
    for start, end in row["spans"]:
        mask[start:end] = [True] * (end - start)
    return {"input_ids": row["input_ids"], "loss_mask": mask, "seq_len": len(row["input_ids"])}


def _eagle3(plan: dict[str, Any], folder: Path, t2d: Any, d2t: Any, shared: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the peer's model, its preparation of a batch, and the arguments of its forward pass."""
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.models.eagle3.data import shift_batch

    config = AutoConfig.from_pretrained(folder / "target", num_hidden_layers=1)
    steps = {"ttt_steps": TTT_STEPS, "norm_before_residual": False}
    model = Eagle3DraftModel.from_training_args(config, t2d, d2t, **shared, **steps)
    losses = {"loss_fn": "kl_div", "loss_implementation": "eager"}
    calls, _ = model.get_trainer_kwargs(**losses, ttt_steps=TTT_STEPS, ttt_step_loss_decay=DECAY["eagle3"])
    return model, shift_batch, calls


def _dflash(plan: dict[str, Any], folder: Path, t2d: Any, d2t: Any, shared: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return what `_eagle3` returns."""
    from speculators.models.dflash import DFlashDraftModel

    config = AutoConfig.from_pretrained(folder / "target", num_hidden_layers=plan["depth"])
    block = {"block_size": plan["block"], "mask_token_id": plan["mask"] or 0}
    model = DFlashDraftModel.from_training_args(config, t2d, d2t, **shared, **block)
    calls, _ = model.get_trainer_kwargs(loss_fn="kl_div", loss_implementation="eager", max_anchors=plan["anchors"])
    return model, None, calls


class Peer:
    """The peer's trainer on the rows of a run, with about as many texts in a step."""

    def __init__(self, files: PeerFiles, options: argparse.Namespace, teacher: str) -> None:
        from hs_connectors import FileTransfer
        from speculators.train import trainer as theirs
        from speculators.train.data import ArrowDataset
        from speculators.train.dataloader import _setup_dataloader

        folder, plan, self.texts = files.folder, files.plan, options.texts
        self.layers, self.anchors = tuple(plan["layers"]), plan.get("anchors", 0)
        size = AutoConfig.from_pretrained(folder / "target")
        rows = plan["vocabulary"]
        t2d, d2t = (None, None) if rows is None else _mappings(torch.tensor(rows), size.vocab_size)
        torch.manual_seed(0)
        shared: dict[str, Any] = {
            "draft_vocab_size": size.vocab_size if rows is None else len(rows),
            "verifier_name_or_path": str(folder / "target"),
            "target_layer_ids": list(self.layers),
            "draft_attn_impl": "sdpa",
        }
        make = _dflash if options.family == "dflash" else _eagle3
        self.model, preprocess, calls = make(plan, folder, t2d, d2t, shared)
        transfer: Any = FileTransfer(folder / "states")
        lengths = [int(length) for length in Dataset.load_from_disk(folder / "texts")["seq_len"]]
        longest = max(lengths)
        data = ArrowDataset(longest, folder / "texts", transfer, on_missing="raise", hidden_states_dtype=torch.float32)
        sizes = {"num_workers": 0, "num_target_layers": len(self.layers), "preprocess": preprocess}
        packed = max(longest, round(options.texts * statistics.mean(lengths)))
        self.loader: Any = _setup_dataloader(data, packed, size.hidden_size, **sizes)
        if teacher == "online":
            self.target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
            self.data, self.ready = data, {}
            transfer.get_cached = self._computed
        theirs.get_local_rank = lambda: "cpu"  # it is made for CUDA alone
        settings = {"weight_decay": 0.0, "scheduler_type": "none", "hidden_states_dtype": torch.float32}
        settings |= {"train_call_kwargs": calls, "log_freq": 10**9, "checkpoint_freq": 10**9}
        configured = theirs.TrainerConfig(options.rate, 1, str(folder / "peer"), **settings)
        self.trainer: Any = theirs.Trainer(self.model, configured, self.loader)
        self.trainer.device_type, self.trainer.rank = "cpu", 1  # no bar
        self.trainer.global_step = 1  # step 0 would be profiled
        self.calls, self.epoch, self.batches = calls, 0, iter(())

    def _computed(self, place: int) -> dict[str, Tensor]:
        """Return a text's states; those of its whole batch are computed together."""
        if place not in self.ready:
            batches = self.loader.batch_sampler._generate_batches(self.epoch)
            (batch,) = [batch for batch in batches if place in batch]
            places = [int(index) for index in batch]
            texts = [torch.as_tensor(self.data.data[index]["input_ids"]) for index in places]
            found = zip(places, texts, states_of(self.target, texts, self.layers), strict=True)
            self.ready = {index: {"token_ids": text, "hidden_states": states} for index, text, states in found}
        return self.ready[place]

    def step(self, by_text: bool) -> int:
        """Take one optimizer step with the trainer's own loop, or text by text; return its tokens."""
        batch = next(self.batches, None)
        if batch is None:
            self.epoch += 1
            self.loader.batch_sampler.set_epoch(self.epoch)
            self.batches = iter(self.loader)
            batch = next(self.batches)
        if by_text:
            self._by_text(batch)
        else:
            if "max_anchors" in self.calls:  # as many a text as ours
                self.calls["max_anchors"] = self.anchors * int(batch["document_ids"].max() + 1)
            self.trainer.train_loader = _Loader([batch])
            self.trainer.train_epoch(self.epoch)
        return int((batch["document_ids"] >= 0).sum())

    def _by_text(self, batch: dict[str, Any]) -> None:
        self.model.train()
        self.trainer._optimizers_zero_grad()
        documents = batch["document_ids"][0]
        for number in range(int(documents.max()) + 1):
            kept = documents == number
            part = {key: value[:, kept] for key, value in batch.items() if isinstance(value, Tensor)}
            part["document_ids"] = torch.zeros_like(part["document_ids"])
            anchors = {"max_anchors": self.anchors} if self.anchors else {}
            _, loss, _ = self.model(**part, **{**self.calls, **anchors})
            (loss / self.texts).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.trainer._optimizers_step()


class _Loader(list[Any]):
    """One batch, as the trainer's loop reads a loader."""

    batch_sampler = None


# Measuring; each in a process of its own, with the peer's Python.


def prepare(options: argparse.Namespace, teacher: str, folder: Path) -> dict[str, float]:
    """Write what the peer reads, and cache our own states."""
    PeerFiles.write(make_run(options, teacher, folder), options, teacher, folder)
    return {}


def measure_speed(options: argparse.Namespace, teacher: str, folder: Path) -> dict[str, float]:
    """Return the tokens/s of every side: medians over steps that alternate; the first of each is not counted."""
    run, peer = make_run(options, teacher, folder), Peer(PeerFiles(folder), options, teacher)
    lengths = list(map(len, run.data.rows["input_ids"]))

    def ours(step: int) -> int:
        run.step(step)
        return sum(lengths[index] for index in run._indices(step))

    steps = (ours, lambda _: peer.step(by_text=False), lambda _: peer.step(by_text=True))
    sides: dict[str, Callable[[int], int]] = dict(zip(SIDES, steps, strict=True))
    speeds: dict[str, list[float]] = {name: [] for name in SIDES}
    for step in range(options.steps + 1):
        first = step % len(SIDES)
        for name in SIDES[first:] + SIDES[:first]:
            started = time.process_time()
            tokens = sides[name](step)
            speeds[name].append(tokens / (time.process_time() - started))
    return {name: statistics.median(values[1:]) for name, values in speeds.items()}


def measure_memory(options: argparse.Namespace, teacher: str, folder: Path, side: str) -> dict[str, int]:
    """Return this process's largest resident memory, in bytes, after it loaded one side and took four steps."""
    if side.startswith("ours"):
        whole = [f"train.gradient_accumulation={options.texts}"] if side == BY_TEXT else []
        run = make_run(options, teacher, folder, *whole)
        steps: Callable[[int], object] = run.step
    else:
        peer = Peer(PeerFiles(folder), options, teacher)
        steps = lambda _: peer.step(by_text=side == SIDES[2])  # noqa: E731
    for step in range(4):
        steps(step)
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return {"peak": int(line.split()[1]) * 1024}


def measure_tau(options: argparse.Namespace, teacher: str, folder: Path) -> dict[str, Any]:
    """Return tau of ours and of the peer after as many steps, and the interval of their ratio over the prompts."""
    options.count = max(options.count, options.texts * options.tau_steps // 4)
    run = make_run(options, teacher, folder)
    peer = Peer(PeerFiles.write(run, options, teacher, folder), options, teacher)
    for step in range(options.tau_steps):
        run.step(step)
        peer.step(by_text=True)
    peer.model.save_pretrained(folder / "trained")
    theirs = load_drafter(str(folder / "trained"), run.target.model, run.target.tokenizer)
    settings = run.recipe.evaluation.model_copy(update={"count": options.prompts, "max_new_tokens": 64})
    recipe = run.recipe.model_copy(update={"evaluation": settings})
    source = recipe.evaluation.prompts or EMBEDDED
    prompts = heldout_prompts(source, chat_of(recipe.data, run.target), run.target, recipe)
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
        what, teacher, folder, *side = options.measure
        measures = {"prepare": prepare, "speed": measure_speed, "memory": measure_memory, "tau": measure_tau}
        print(json.dumps(measures[what](options, teacher, Path(folder), *side)))
        return
    python = options.python or peers_python()
    for teacher in options.teachers:
        with tempfile.TemporaryDirectory() as folder:
            measured(python, "prepare", teacher, folder)
            speeds = measured(python, "speed", teacher, folder)
            peaks = {side: measured(python, "memory", teacher, folder, side)["peak"] for side in (*SIDES, BY_TEXT)}
        print(f"{teacher}:")
        for side in SIDES:
            speed, peak = speeds[side], peaks[side]
            ratios = f"ours / this {speeds['ours'] / speed:.2f}, memory {peaks['ours'] / peak:.2f}"
            print(f"  {side:14s} {speed:7.0f} tokens/s {peak / 2**20:7.0f} MiB; {ratios}", flush=True)
        print(f"  {BY_TEXT:31s} {peaks[BY_TEXT] / 2**20:7.0f} MiB", flush=True)
    if not options.tau_steps:
        return
    with tempfile.TemporaryDirectory() as folder:
        taus = measured(python, "tau", "cached", folder)
    for at, (ours, theirs, ratio, low, high) in taus.items():
        print(f"{at}, {options.tau_steps} steps: tau {ours:.2f} / {theirs:.2f} = {ratio:.2f} [{low:.2f}, {high:.2f}]")


if __name__ == "__main__":
    main()
