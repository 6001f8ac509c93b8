"""The embedded target: a small real language model built once on this machine, cached and checksummed."""

import dataclasses
import hashlib
import json
import platform
import time
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from transformers.utils.logging import disable_progress_bar

from draftsmith.bars import Bars
from draftsmith.distill.embedded.corpus import Module, corpus_hash, embedded_prompts, read_modules
from draftsmith.distill.embedded.training import (
    EmbeddedRecipe,
    Stage,
    bf16_is_fast,
    encode_corpus,
    heldout_loss,
    stage_step_cost,
    train_model,
    train_tokenizer,
    training_device,
)
from draftsmith.locks import hold_cache
from draftsmith.provenance import environment, fingerprint
from draftsmith.safe_text import Terminal
from draftsmith.storage import atomic_folder, cache_dir, write_json, writing

__all__ = ["EmbeddedRecipe", "Stage", "build_info", "embedded_prompts", "embedded_target"]

BUILD_VERSION = 1
"""Increase when the code builds another target from the same recipe and corpus; old caches are then ignored."""


def embedded_target(progress: bool = True, recipe: EmbeddedRecipe | None = None) -> Path:
    """Return the folder of the embedded target in transformers format; build it if it is missing or damaged.

    Args:
        progress: show a progress line with the time left while building.
        recipe: sizes and steps; the default is that of all measurements in the docs.
    """
    recipe = recipe or EmbeddedRecipe()
    console = Terminal(stderr=True, quiet=not progress)
    train, heldout = (read_modules(split, recipe.packages) for split in ("train", "heldout"))
    folder = cache_dir() / "embedded" / _key(recipe, train, heldout)
    if find_damage(folder) is None:
        return folder
    with hold_cache(folder):
        damage = find_damage(folder)
        if damage is None:
            return folder  # another process has built it
        if folder.exists():
            Terminal(stderr=True).print(f"embedded target is damaged: {damage}; building it again", soft_wrap=True)
        with writing(folder, "free some space, or set DRAFTSMITH_CACHE"), atomic_folder(folder) as temporary:
            _build(temporary, recipe, train, heldout, console)
            write_json(temporary / "checksums.json", checksums(temporary))
    return folder


def build_info(folder: Path) -> dict[str, Any]:
    """Return what `embedded_target` recorded about its build: recipe, losses, seconds, environment."""
    return json.loads((folder / "build.json").read_text(encoding="utf-8"))


def checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of the folder by name, except `checksums.json`."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != "checksums.json")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def find_damage(folder: Path) -> str | None:
    """Return the first file that is missing or does not match its checksum, with the reason; None for no damage."""
    try:
        expected = json.loads((folder / "checksums.json").read_text(encoding="utf-8"))
        actual = checksums(folder)
        for name, digest in expected.items():
            if name not in actual:
                return f"{name} is missing"
            if actual[name] != digest:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, AttributeError):
        return "checksums.json cannot be read"
    return None


def _key(recipe: EmbeddedRecipe, train: list[Module], heldout: list[Module]) -> str:
    return fingerprint(
        {
            "build": BUILD_VERSION,
            "recipe": dataclasses.asdict(recipe),
            "train": corpus_hash(train),
            "heldout": corpus_hash(heldout),
            "python": platform.python_version(),
        }
    )


def _build(folder: Path, recipe: EmbeddedRecipe, train: list[Module], heldout: list[Module], console: Terminal) -> None:
    """Write model, tokenizer and build.json into `folder`."""
    disable_progress_bar()  # transformers shows one for writing a file
    started = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console) as bar:
        task = bar.add_task("embedded target: tokenizer", total=recipe.cost)
        texts = [module.text for module in train]
        tokenizer = train_tokenizer(texts, recipe.vocab_size, recipe.max_position_embeddings)
        tokens = encode_corpus(tokenizer, texts)

        def on_step(stage: Stage, loss: float) -> None:
            text = f"embedded target: {stage.layers} layers, loss {loss:.2f}"
            bar.update(task, advance=stage_step_cost(stage), description=text)

        model = train_model(recipe, tokenizer, tokens, on_step)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    heldout_texts = [module.text for module in heldout]
    heldout_tokens = encode_corpus(tokenizer, heldout_texts)
    loss = heldout_loss(model, heldout_tokens, min(256, recipe.max_position_embeddings))
    tokens_per_byte = len(heldout_tokens) / sum(len(text.encode()) for text in heldout_texts)
    info = {
        "recipe": dataclasses.asdict(recipe),
        "train_modules": len(train),
        "train_tokens": len(tokens),
        "heldout_modules": len(heldout),
        "heldout_tokens": len(heldout_tokens),
        "heldout_loss": round(loss, 4),
        "heldout_bits_per_byte": round(loss * tokens_per_byte / 0.6931, 4),
        "precision": "bf16 autocast" if bf16_is_fast(training_device()) else "fp32",
        "device": training_device().type,
        "seconds": round(time.perf_counter() - started, 1),
        "environment": environment(),
    }
    write_json(folder / "build.json", info)
