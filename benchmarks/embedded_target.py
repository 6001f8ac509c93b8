"""Train the embedded target again: `python benchmarks/embedded_target.py FOLDER`.

This script wrote `distill/embedded/weights/` in 40 minutes on 2 CPU cores: a byte-level BPE tokenizer and a Llama that
grows in depth during training. Another processor or another Python, whose standard library is the corpus, gives other
weights of the same quality. The deep model is slow to train from scratch on a CPU. A shallow model is therefore trained
first, whose blocks are then repeated to make a deeper one (progressive stacking: Gong et al., 2019).
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from draftsmith.distill.embedded import read_modules
from draftsmith.distill.load_target import bf16_is_fast, load_target
from draftsmith.distill.muon import Muon
from draftsmith.provenance import environment
from draftsmith.storage import atomic_folder, write_json
from draftsmith.terminal import Bars, Terminal

# Shapes: B batch, T positions, V vocabulary.


PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"


@dataclass(frozen=True)
class Stage:
    """A stretch of training at one depth."""

    layers: int
    steps: int
    batch_size: int
    sequence_length: int


@dataclass(frozen=True)
class EmbeddedRecipe:
    """Everything that determines the embedded target's weights, apart from the corpus."""

    vocab_size: int = 272
    """Three special tokens, the 256 bytes and 13 sequences, most of them indentation: few choices a token."""
    hidden_size: int = 192
    intermediate_size: int = 384
    num_attention_heads: int = 3
    max_position_embeddings: int = 1024
    stages: tuple[Stage, ...] = (
        Stage(layers=4, steps=1000, batch_size=8, sequence_length=512),
        Stage(layers=10, steps=700, batch_size=8, sequence_length=512),
        Stage(layers=20, steps=800, batch_size=8, sequence_length=512),
        Stage(layers=20, steps=600, batch_size=8, sequence_length=512),
    )
    learning_rate: float = 6e-3
    """Peak learning rate of Muon, for the matrices inside the blocks."""
    embedding_learning_rate: float = 8e-3
    """Peak learning rate of AdamW, for the embedding and the norms' gains."""
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    packages: tuple[str, ...] | None = None
    """Only these top-level packages of the standard library; None for all."""

    @property
    def cost(self) -> int:
        """Layer passes over tokens, for the time left (embedding and lm_head cost about 1 layer)."""
        return sum(stage_step_cost(stage) * stage.steps for stage in self.stages)


def stage_step_cost(stage: Stage) -> int:
    """Return the cost of an optimizer step, in the unit of `EmbeddedRecipe.cost`."""
    return (stage.layers + 1) * stage.batch_size * stage.sequence_length


def train_tokenizer(texts: list[str], vocab_size: int, model_max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer: every text round-trips; no special tokens are added to texts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )


def encode_corpus(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """Return all texts as one sequence of token ids [N], each between <|bos|> and <|eos|>."""
    ids: list[int] = []
    special = tokenizer.get_vocab()
    for text in texts:
        ids += [special[BOS], *tokenizer(text, verbose=False)["input_ids"], special[EOS]]
    return torch.tensor(ids)


def model_config(recipe: EmbeddedRecipe, tokenizer: PreTrainedTokenizerFast, layers: int) -> LlamaConfig:
    """Return the Llama config of `recipe` at one depth."""
    special = tokenizer.get_vocab()
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=recipe.num_attention_heads,
        num_key_value_heads=recipe.num_attention_heads,
        max_position_embeddings=recipe.max_position_embeddings,
        tie_word_embeddings=True,
        pad_token_id=special[PAD],
        bos_token_id=special[BOS],
        eos_token_id=special[EOS],
    )


def _move(module: nn.Module, device: torch.device) -> None:
    module.to(device)


@torch.no_grad()
def grow(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """Return a deeper model that computes nearly the same function, with each block repeated.

    Each of the n copies of a block adds 1/n of its output: the residual network, read as a discretised flow, takes
    smaller steps.
    """
    config = type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": layers})
    deeper = LlamaForCausalLM(config)
    _move(deeper, model.device)
    deeper.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    deeper.model.norm.load_state_dict(model.model.norm.state_dict())
    shallow = model.model.layers
    origin = [index * len(shallow) // layers for index in range(layers)]
    for index, block in enumerate(deeper.model.layers):
        block.load_state_dict(shallow[origin[index]].state_dict())
        share = 1 / origin.count(origin[index])
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            block.get_parameter(name).mul_(share)
    return deeper


def batches(tokens: Tensor, stage: Stage, seed: int) -> Iterator[Tensor]:
    """Yield batches [B, T+1] without end; every epoch cuts the corpus at another offset, in random order."""
    generator = torch.Generator().manual_seed(seed)
    width = stage.sequence_length + 1
    queue: list[int] = []
    while True:
        while len(queue) < stage.batch_size:
            phase = int(torch.randint(min(width, max(1, len(tokens) - width)), (1,), generator=generator))
            pieces = max(1, (len(tokens) - phase) // width)
            queue += [phase + width * i for i in torch.randperm(pieces, generator=generator).tolist()]
        starts, queue = queue[: stage.batch_size], queue[stage.batch_size :]
        yield torch.stack([tokens[start : start + width] for start in starts])


def training_device() -> torch.device:
    """Return the accelerator if there is one; its weights may differ from the CPU's in the last digits."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def language_loss(model: PreTrainedModel, batch: Tensor, bf16: bool) -> Tensor:
    """Return the mean next-token cross-entropy of a batch [B, T+1] in nats."""
    with torch.autocast(batch.device.type, dtype=torch.bfloat16, enabled=bf16):
        logits_BTV = model(batch[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits_BTV.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.inference_mode()
def heldout_loss(model: PreTrainedModel, tokens: Tensor, sequence_length: int, windows: int = 64) -> float:
    """Return the mean loss in nats a token over evenly spaced windows of the held-out tokens."""
    width = min(sequence_length + 1, len(tokens))
    starts = torch.linspace(0, len(tokens) - width, windows).long().tolist()
    bf16 = bf16_is_fast(model.device)
    losses = [language_loss(model, tokens[None, start : start + width].to(model.device), bf16) for start in starts]
    return float(torch.stack(losses).mean())


def _pace(step: int, stage: Stage, last: bool, warmup: int) -> float:
    """Return the factor of the peak rate: a short warm-up in each stage, then constant; linear to 0 in the last."""
    warm = min(1.0, (step + 1) / max(1, min(warmup, stage.steps // 4)))
    decay = 1 - step / stage.steps if last else 1.0
    return warm * decay


def _optimizers(model: LlamaForCausalLM, recipe: EmbeddedRecipe, bf16: bool) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the blocks, AdamW for the embedding and the norms' gains."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    gains = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    embedding = model.model.embed_tokens.weight
    product_type = torch.bfloat16 if bf16 else torch.float32
    muon = Muon(matrices, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, dtype=product_type)
    rate = recipe.embedding_learning_rate
    return [muon, torch.optim.AdamW([embedding, *gains], lr=rate, betas=(0.9, 0.95), weight_decay=0.0)]


def train_model(
    recipe: EmbeddedRecipe,
    tokenizer: PreTrainedTokenizerFast,
    tokens: Tensor,
    on_step: Callable[[Stage, float], None],
) -> LlamaForCausalLM:
    """Train through all stages and return the fp32 model in eval mode; `on_step` is called with stage and loss."""
    device = training_device()
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        config = model_config(recipe, tokenizer, recipe.stages[0].layers)
        model = LlamaForCausalLM(config)
        _move(model, device)
        for number, stage in enumerate(recipe.stages):
            if stage.layers != model.config.num_hidden_layers:
                model = grow(model, stage.layers)
            _train_stage(model, recipe, number, tokens, on_step)
    return model.eval().cpu()


def _train_stage(
    model: LlamaForCausalLM,
    recipe: EmbeddedRecipe,
    number: int,
    tokens: Tensor,
    on_step: Callable[[Stage, float], None],
) -> None:
    stage = recipe.stages[number]
    last = number == len(recipe.stages) - 1
    bf16 = bf16_is_fast(model.device)
    optimizers = _optimizers(model, recipe, bf16)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    source = batches(tokens, stage, seed=recipe.seed * 1000 + number)
    model.train()
    for step in range(stage.steps):
        loss = language_loss(model, next(source).to(model.device), bf16)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * _pace(step, stage, last, recipe.warmup_steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        on_step(stage, loss.item())


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


def write_target(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the weights in bfloat16, half of the size, with a config that makes transformers compute in float32."""
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.bfloat16().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", {**config, "dtype": "float32"})
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    build(Path(sys.argv[1]), EmbeddedRecipe())
