"""Compare a training step with a plain loop: tokens per second, shares of time, and peak memory.

    python benchmarks/training.py                              # a small random target on a CPU
    python benchmarks/training.py --drafters eagle3 --chunk 256 --activation-checkpointing
    python benchmarks/training.py --hidden 2048 --layers 20 --vocab 128000 --length 2048 --bf16 --peak-tflops 989  # GPU

The target has random weights, which does not change the time of a step. Both sides train the same drafter on the same
texts, KL over its whole vocabulary, AdamW. The plain loop is in `PlainLoop`: target with logits, drafter with logits,
loss, backward. Speed: the sides alternate step by step in one process; medians are printed. Memory: each side runs in
its own process; the figure is the peak above the memory of Python and its libraries; the estimate is the one that a run
prints.
"""

import argparse
import json
import os
import statistics
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.distill.load_target import load_target
from draftsmith.distill.teacher import Batch
from draftsmith.heads import HEADS, TrainableDrafter
from draftsmith.heads.base import FINAL, TeacherSignals
from draftsmith.train import trainer as loop
from draftsmith.train.estimate.fake_run import Operations
from draftsmith.train.launch import make_accelerator
from draftsmith.train.progress import PARTS, MemoryMeter
from draftsmith.train.recipe import Recipe, load_recipe
from draftsmith.train.run_folder import claim_output
from draftsmith.train.step import autocast, collate

ROWS = 64


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", nargs="+", default=["draft_model", "medusa", "eagle3"], choices=sorted(HEADS))
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256, help="tokens a text; an eighth of it is its prompt")
    parser.add_argument("--shortest", type=int, help="tokens of the shortest text; lengths are drawn evenly from there")
    parser.add_argument("--pack", action="store_true", help="data.pack, in rows of the longest text's length")
    parser.add_argument("--chunk", type=int, default=128, help="objective.chunk_tokens")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--peak-tflops", type=float, help="the machine's peak, for model FLOPs utilisation")
    parser.add_argument("--measure", choices=("ours", "plain"), help=argparse.SUPPRESS)
    return parser.parse_args()


def make_files(options: argparse.Namespace, folder: Path) -> None:
    """Write a random target, a tokenizer of single characters, and texts."""
    torch.manual_seed(0)
    sizes = {"hidden_size": options.hidden, "intermediate_size": options.hidden * 8 // 3 // 32 * 32}
    heads = {"num_attention_heads": options.hidden // 64, "num_key_value_heads": max(1, options.hidden // 128)}
    limits = {"vocab_size": options.vocab, "max_position_embeddings": 2 * options.length}
    config = LlamaConfig(**sizes, **heads, **limits, num_hidden_layers=options.layers, eos_token_id=1, pad_token_id=0)
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder / "target")
    vocabulary = {"<pad>": 0, "<eos>": 1, **{letter: i + 2 for i, letter in enumerate(string.ascii_letters)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "target")
    lengths = torch.randint(options.shortest or options.length, options.length + 1, (ROWS + 1,)).tolist()
    letters = [torch.randint(len(string.ascii_letters), (length,)).tolist() for length in lengths]
    texts = ["".join(string.ascii_letters[i] for i in row) for row in letters]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def recipe_of(kind: str, options: argparse.Namespace, folder: Path) -> Recipe:
    prompt = options.length // 8
    values = {
        "name": kind,
        "output": str(folder / f"run-{kind}"),
        "drafter": {"type": kind},
        "target": {"model": str(folder / "target"), "dtype": "bfloat16" if options.bf16 else "float32"},
        "data": {
            "prompts": str(folder / "texts.jsonl"),
            "response": "text",
            "prompt_tokens": prompt,
            "response_tokens": options.length - prompt,
            "pack": options.pack,
        },
        "objective": {"chunk_tokens": options.chunk},
        "train": {
            "batch_size": options.batch,
            "optimizer": "adamw",
            "learning_rate": 1e-3,
            "mixed_precision": "bf16" if options.bf16 else "no",
            "activation_checkpointing": options.activation_checkpointing,
            "compile": options.compile,
        },
        "evaluation": {"count": 1, "max_new_tokens": 4},
    }
    file = folder / f"{kind}.yaml"
    file.write_text(yaml.safe_dump(values))
    return load_recipe(str(file))


class PlainLoop:
    """A plain training loop: all positions and all logits at once."""

    def __init__(self, recipe: Recipe, target: nn.Module, drafter: TrainableDrafter) -> None:
        self._recipe, self._target, self._drafter = recipe, target, drafter
        trained = [weight for weight in drafter.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-3)

    def step(self, batch: Batch) -> None:
        ids_BT, mask_BT = batch.input_ids_BT, batch.attention_mask_BT
        with torch.no_grad():
            out = self._target(input_ids=ids_BT, attention_mask=mask_BT, output_hidden_states=True, use_cache=False)
            p_log = out.logits.float().log_softmax(-1)
        layers, states = self._drafter.needs.layers, out.hidden_states
        features = torch.cat([states[-1 if k == FINAL else k] for k in layers], -1) if layers else None
        signals = TeacherSignals(ids_BT, mask_BT, states[-1], batch.mask_BT, features)
        with autocast(self._recipe.train, ids_BT.device):
            loss = self._loss(signals, p_log)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._drafter.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _loss(self, signals: TeacherSignals, p_log_BTV: Tensor) -> Tensor:
        loss = 0.0
        for k, entry in enumerate(self._drafter.unroll(signals)):
            p_log = p_log_BTV.flatten(0, 1)
            if not entry.every_depth:
                p_log = p_log[entry.places_N.clamp_min(0)]
            q_log, mask = entry.head(entry.states_ND).float().log_softmax(-1), entry.trained(signals.mask_BT)
            kl = nn.functional.kl_div(q_log, p_log, log_target=True, reduction="none").sum(-1)
            loss = loss + 0.8**k * (kl * mask).sum() / mask.sum()
        return loss


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def make_run(recipe: Recipe) -> loop.TrainingRun:
    claim_output(recipe)
    return loop.TrainingRun(recipe, make_accelerator(recipe, Path(recipe.output)), Path(recipe.output))


def measure_speed(kind: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    recipe = recipe_of(kind, options, folder)
    run = make_run(recipe)
    target = run.target.model
    fresh = HEADS[kind].from_target(target, **recipe.drafter_options()).to(target.device)
    fresh.attach(target)
    plain = PlainLoop(recipe, target, fresh)
    parts: list[dict[str, float]] = []
    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    for step in range(options.steps + 1):
        rows = run.data.rows
        indices = [(step * options.batch + i) % len(rows) for i in range(options.batch)]
        sides = {
            "ours": lambda step=step: parts.append(run.step(step)["seconds_by_part"]),
            "plain": lambda indices=indices, rows=rows: plain.step(collate(rows, indices, target.device)),
        }
        for side in ("ours", "plain") if step % 2 else ("plain", "ours"):
            started = now()
            sides[side]()
            seconds[side].append(now() - started)
        if step == 0:  # first calls allocate and choose kernels
            parts.clear()
            seconds = {side: [] for side in seconds}
    shares = {part: sum(times[part] for times in parts) / sum(seconds["ours"]) for part in PARTS}
    with Operations() as operations:
        run.step(options.steps + 1)
    tokens = options.batch * statistics.mean(map(len, run.data.rows["input_ids"]))
    return {
        **{side: tokens / statistics.median(values) for side, values in seconds.items()},
        "shares": shares,
        "tflops": operations.total / statistics.median(seconds["ours"]) / 1e12,
    }


def measure_memory(kind: str, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Measure peak memory of one side in this process: two steps, the second with the optimizer's state."""
    recipe = recipe_of(kind, options, folder)
    if options.measure == "ours":
        run = make_run(recipe)
        for step in range(2):
            run.step(step)
        return {"peak": run.memory.peak(), "estimate": run.estimate.training}
    accelerator = make_accelerator(recipe, folder)
    meter = MemoryMeter(accelerator.device)
    target = load_target(recipe.target.model, dtype=recipe.target.dtype, device=accelerator.device).model
    drafter = HEADS[kind].from_target(target, **recipe.drafter_options()).to(accelerator.device)
    drafter.attach(target)
    plain = PlainLoop(recipe, target, drafter)
    shape = (options.batch, options.length)
    mask = torch.arange(options.length, device=accelerator.device) >= options.length // 8
    for _ in range(2):
        ids = torch.randint(5, 50, shape, device=accelerator.device)
        plain.step(Batch(ids, torch.ones_like(ids), mask.expand(shape)))
    return {"peak": meter.peak()}


def memory_of(side: str, kind: str) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--drafters", kind, "--measure", side]
    # Let the C library return freed memory; by default it keeps a few hundred MiB.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(options, folder)
        if options.measure:
            print(json.dumps(measure_memory(options.drafters[0], options, folder)))
            return
        table = Table(title=f"{torch.get_num_threads()} thread(s), {options.batch} x {options.length} tokens a step")
        for column in ("drafter", "ours tok/s", "plain tok/s", "ratio", *PARTS, "TFLOP/s"):
            table.add_column(column, justify="right")
        for column in ("ours MiB", "plain MiB", "ratio", "estimate", "off by"):
            table.add_column(column, justify="right")
        for kind in options.drafters:
            mine, theirs = memory_of("ours", kind), memory_of("plain", kind)
            speed = measure_speed(kind, options, folder)
            rates = f"{speed['tflops']:.2f}"
            if options.peak_tflops:
                rates += f" ({speed['tflops'] / options.peak_tflops:.0%})"
            table.add_row(
                *(kind, f"{speed['ours']:.0f}", f"{speed['plain']:.0f}", f"{speed['ours'] / speed['plain']:.2f}"),
                *(f"{speed['shares'][part]:.1%}" for part in PARTS),
                *(rates, f"{mine['peak'] / 2**20:.0f}", f"{theirs['peak'] / 2**20:.0f}"),
                *(f"{mine['peak'] / theirs['peak']:.2f}", f"{mine['estimate'] / 2**20:.0f}"),
                f"{mine['estimate'] / mine['peak'] - 1:+.0%}",
            )
        Console(width=190).print(table)


if __name__ == "__main__":
    main()
