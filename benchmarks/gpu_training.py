"""Training steps of large shapes, for gpu.py: time by part, tokens/s, MFU, peak memory beside the estimate."""

import gc
import math
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config

from draftsmith.decode.clock import PartClock
from draftsmith.distill.teacher import Batch
from draftsmith.errors import reason_of
from draftsmith.train.estimate.fake_run import DryStep, Operations, dry_step
from draftsmith.train.estimate.gpus import MACHINES
from draftsmith.train.estimate.memory import estimate_memory
from draftsmith.train.progress import PARTS
from draftsmith.train.recipe import Recipe, parse_recipe
from draftsmith.train.step import compile_drafter

SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
SMALL |= {"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
"""Qwen3-0.6B, but for the vocabulary, which is the target's."""
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}
DSPARK = {"type": "dflash", "block_size": 8, "num_hidden_layers": 5, "anchors": 512, "markov_rank": 256}
DSPARK |= {"confidence_head": True}
COLUMNS = ("trained", "tokens", "compiled", "ms", "tokens/s", "MFU", "MFU, own", "GiB", "estimate", *PARTS)


def recipes(target: PreTrainedModel, lengths: list[int], draft_model: str) -> Iterator[tuple[str, Recipe]]:
    """Yield the drafters with a row of each length for EAGLE-3 and one of the first length for the others."""
    vocabulary = min(32_000, target.config.vocab_size // 2)
    eagle3: dict[str, Any] = {"type": "eagle3", "train_steps": 7}
    drafters: list[tuple[str, dict[str, Any], int]] = [("EAGLE-3", eagle3, length) for length in lengths]
    drafters += [
        (f"EAGLE-3, {vocabulary:,} tokens", {**eagle3, "draft_vocab_size": vocabulary}, lengths[0]),
        ("DSpark", DSPARK, lengths[0]),
        ("Medusa-5", {"type": "medusa", "num_heads": 5}, lengths[0]),
        ("draft model", {"type": "draft_model", "model": draft_model}, lengths[0]),
    ]
    for name, drafter, length in drafters:
        data = {"prompts": "texts.jsonl", "response": "text", "prompt_tokens": length // 8}
        values = {"name": "gpu", "output": "gpu", "drafter": drafter, "target": {"model": "t", "dtype": "bfloat16"}}
        data["response_tokens"] = length - length // 8
        values |= {"data": data, "train": {"batch_size": 1, "optimizer": "adamw", "learning_rate": 1e-4}}
        yield name, parse_recipe(values, "benchmarks/gpu_training.py")


def batch_of(recipe: Recipe, target: PreTrainedModel, clock: PartClock) -> Batch:
    """Return a row of random tokens on the target's device; an eighth of it is its prompt."""
    prompt, length = recipe.data.prompt_tokens, recipe.data.prompt_tokens + recipe.data.response_tokens
    ids_BT = torch.randint(target.config.vocab_size, (1, length), device="cpu").to(target.device)
    mask_BT = (torch.arange(length, device=target.device) >= prompt - 1)[None] & (ids_BT >= 0)
    clock.end("fetch")
    return Batch(ids_BT, torch.ones_like(ids_BT), mask_BT)


def measure(recipe: Recipe, target: PreTrainedModel, compiled: bool, steps: int, peak_tflops: float) -> dict[str, Any]:
    """Time `steps` steps after two that are not counted."""
    gc.collect()  # the last drafter's tensors, and its hooks on the target
    device, clock = target.device, PartClock(target.device, PARTS)
    estimate = estimate_memory(recipe, target.config, device=device.type, bf16=True, accelerated=True).training
    with device:
        torch.manual_seed(0)
        step = dry_step(recipe, target, device=device.type, processes=1, bf16=True)
    step.batch = partial(batch_of, recipe, target, clock)
    whole, teacher = operations(step)
    if compiled:
        compile_drafter(step.drafter)
    vars(step.module)["clock"] = clock
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds: list[float] = []
    parts: list[dict[str, float]] = []
    for _ in range(steps + 2):
        started = time.perf_counter()
        clock.start()
        step.part()
        clock.end("backward")
        step.update()
        clock.end("optimizer")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
        parts.append(clock.seconds())
    middle = {part: statistics.median(one[part] for one in parts[2:]) for part in PARTS}
    median, own = statistics.median(seconds[2:]), sum(middle.values()) - middle["teacher"]
    length = recipe.data.prompt_tokens + recipe.data.response_tokens
    gib = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else math.nan
    rates = (length / median, whole / median / 1e12 / peak_tflops, (whole - teacher) / own / 1e12 / peak_tflops)
    row = (length, compiled, 1e3 * median, *rates, gib, estimate / 2**30, *(1e3 * middle[part] for part in PARTS))
    return dict(zip(COLUMNS[1:], row, strict=True))


def operations(step: DryStep) -> tuple[int, int]:
    """Return the operations of a step, and those of the target's pass in it."""
    with Operations() as whole:
        step.run()
    with Operations() as teacher, torch.autocast(step.device, torch.bfloat16):
        step.module._teacher[0].signals(step.batch())
    return whole.total, teacher.total


def train_rows(
    target: PreTrainedModel, lengths: list[int], *, compiled: bool, steps: int, until: float
) -> Iterator[dict[str, Any]]:
    """Measure all drafters, eager and where asked compiled; one that fails yields a row with its error.

    None is begun after the time `until`.
    """
    name = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else ""
    name = name.lower().replace(" ", "")
    peak = next((tflops for machine, (tflops, *_) in MACHINES.items() if machine in name), math.nan)
    with tempfile.TemporaryDirectory() as folder:
        shape = SMALL if target.config.hidden_size >= 1024 else TINY
        Qwen3Config(**shape, vocab_size=target.config.vocab_size).save_pretrained(folder)
        for drafter, recipe in recipes(target, lengths, folder):
            for how in (False, True) if compiled else (False,):
                started = time.perf_counter()
                if started > until:
                    print(f"{drafter}: not measured, half of the minutes have passed", flush=True)
                    continue
                try:
                    row = measure(recipe, target, how, steps, peak)
                except Exception as error:  # of any kind: the others may work
                    row = {"compiled": how, "error": failure(error)}
                took = f"{'compiled' if how else 'eager'}, measured in {time.perf_counter() - started:.0f} s"
                print(f"{drafter}: {row.get('error', took)}", flush=True)
                yield {"trained": drafter, **row}


def failure(error: Exception) -> str:
    """Return an error's first line; print where it came from, unless the memory was not enough."""
    if not isinstance(error, torch.OutOfMemoryError):
        traceback.print_exception(error)
    return f"{type(error).__name__}: {reason_of(error)}"


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table; parts are in milliseconds."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        shown = {"ms": row.get("error", ""), **row}
        cells = [_cell(name, shown.get(name, "")) for name in COLUMNS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    return "" if math.isnan(value) else f"{value:.1%}" if name.startswith("MFU") else f"{value:,.1f}"
