"""Train the embedded target again: `python -m draftsmith.distill.embedded.build FOLDER`.

This command wrote `weights/` in 40 minutes on 2 CPU cores. Another processor or another Python, whose standard library
is the corpus, gives other weights of the same quality.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path

from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from draftsmith.bars import Bars
from draftsmith.distill.embedded.corpus import Split, read_modules
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
from draftsmith.distill.load_target import load_target
from draftsmith.provenance import environment
from draftsmith.safe_text import Terminal
from draftsmith.storage import atomic_folder, write_json


def build(folder: Path, recipe: EmbeddedRecipe, progress: bool = True) -> None:
    """Train the target of `recipe`; write it, its tokenizer and build.json into `folder`."""
    disable_progress_bar()  # transformers shows one for writing a file
    started = time.perf_counter()
    train, heldout = (
        [module.text for module in read_modules(split, recipe.packages)] for split in ("train", "heldout")
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Terminal(stderr=True, quiet=not progress)) as bar:
        task = bar.add_task("embedded target: tokenizer", total=recipe.cost)
        tokenizer = train_tokenizer(train, recipe.vocab_size, recipe.max_position_embeddings)
        tokens = encode_corpus(tokenizer, train)

        def on_step(stage: Stage, loss: float) -> None:
            text = f"embedded target: {stage.layers} layers, loss {loss:.2f}"
            bar.update(task, advance=stage_step_cost(stage), description=text)

        model = train_model(recipe, tokenizer, tokens, on_step)
    with atomic_folder(folder) as temporary:
        write_target(temporary, model, tokenizer)
        read = load_target(str(temporary), device=training_device()).model
        heldout_tokens = encode_corpus(tokenizer, heldout)
        loss = heldout_loss(read, heldout_tokens, min(256, recipe.max_position_embeddings))
        info = {
            "recipe": dataclasses.asdict(recipe),
            "train_modules": len(train),
            "train_tokens": len(tokens),
            "heldout_modules": len(heldout),
            "heldout_tokens": len(heldout_tokens),
            "heldout_loss": round(loss, 4),
            "heldout_bits_per_byte": round(
                loss * len(heldout_tokens) / sum(len(text.encode()) for text in heldout) / 0.6931, 4
            ),
            "precision": "bf16 autocast" if bf16_is_fast(training_device()) else "fp32",
            "device": training_device().type,
            "seconds": round(time.perf_counter() - started, 1),
            "environment": environment(),
        }
        write_json(temporary / "build.json", info)


def _texts(split: Split, packages: tuple[str, ...] | None) -> list[str]:
    return [module.text for module in read_modules(split, packages)]


def write_target(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the weights in bfloat16, half of the size, with a config that makes transformers compute in float32."""
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.bfloat16().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", {**config, "dtype": "float32"})
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    build(Path(sys.argv[1]), EmbeddedRecipe())
