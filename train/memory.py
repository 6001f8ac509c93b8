"""How much memory a run will take, found by running one step of it on tensors that have shapes but no data."""

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig

from draftsmith.decode.cache import FIRST_SLOTS
from draftsmith.distill.targets import DTYPES, load_tokenizer
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.heads import HEADS, TrainableDrafter
from draftsmith.heads.draft_model import layer_lists
from draftsmith.heads.drafter import TeacherSignals
from draftsmith.heads.vocabulary import checked_size
from draftsmith.train.assembly import step_and_optimizers
from draftsmith.train.batches import Batch
from draftsmith.train.console import Console
from draftsmith.train.launching import precision
from draftsmith.train.live_bytes import without_data
from draftsmith.train.meter import in_units
from draftsmith.train.recipe import Recipe
from draftsmith.train.step import Last

LIKELIEST = 20
"""Known tokens a place that are reckoned with where the teacher is a file."""

# Shapes: B sequences, T positions, S positions of the source, H hidden size, F features, E known tokens.


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one process at its fullest moment of a step, by what they are for; and while it samples."""

    target: int
    drafter: int
    gradients: int
    optimizer: int
    activations: int
    """Everything else that is alive at that moment: activations, logits of a chunk, features, batch."""
    cache: int
    """Keys and values of the texts that the target answers together, before training; 0 where it answers none."""

    @property
    def training(self) -> int:
        return self.target + self.drafter + self.gradients + self.optimizer + self.activations

    @property
    def sampling(self) -> int:
        return self.target + self.drafter + self.cache

    @property
    def peak(self) -> int:
        return max(self.training, self.sampling)

    def __str__(self) -> str:
        parts = {name: getattr(self, name) for name in ("target", "drafter", "gradients", "optimizer", "activations")}
        text = ", ".join(f"{name} {in_units(value)}" for name, value in parts.items())
        sampling = f"; while sampling {in_units(self.sampling)}, cache {in_units(self.cache)}" if self.cache else ""
        return f"{in_units(self.training)} a process in training ({text}){sampling}"


def estimate_memory(
    recipe: Recipe,
    config: PreTrainedConfig,
    *,
    device: str = "cpu",
    processes: int = 1,
    sharded: bool = False,
    bf16: bool = False,
) -> MemoryEstimate:
    """What a step with sequences as long as the recipe allows will hold, without loading anything.

    Two steps are run, since the optimizer's state comes with the first; the second one's peak counts. `config`: the
    target's. `sharded`: FSDP2 or ZeRO, which share out the optimizer's state; weights and gradients are whole during a
    step. `bf16`: under autocast.

    Raises:
        ConfigError: for a drafter that does not fit the target.
        DraftsmithError: for a quantised target, which cannot be built from its config alone.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise DraftsmithError("target is quantised; expected one whose weights are plain numbers")
    data = recipe.data
    width = _width(recipe)
    share = 1.0 if config.is_encoder_decoder else min(1.0, data.response_tokens / width)
    with without_data(device, share) as live:
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        target = auto.from_config(config, dtype=DTYPES[recipe.target.dtype]).eval().requires_grad_(False)
        weights = live.now
        drafter = _drafter(recipe, target)
        teacher = _teacher(recipe, target, drafter)
        step, optimizers, _ = step_and_optimizers(recipe, target, drafter, teacher)
        step.train()
        drafted = live.now - weights
        trained = sum(p.numel() * p.element_size() for p in step.parameters() if p.requires_grad)
        for _ in range(2):
            live.peak = live.now
            _one_step(step, optimizers, _batch(recipe, config, width, processes), device, bf16)
        states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
        moments = sum(value.numel() * value.element_size() for value in states)
        copies = 2 if processes > 1 and not sharded else 1  # DDP keeps gradients in buckets of its own, too
        rest = max(0, live.peak - weights - drafted - moments - trained)
        cache = _cache_bytes(recipe, config) if data.response == "target" and recipe.teacher.kind != "logprobs" else 0
        elsewhere = _elsewhere(recipe, target, device, processes)
        mine = moments // processes if sharded else moments
        return MemoryEstimate(weights - elsewhere, drafted, copies * trained, mine, rest, cache)


def _elsewhere(recipe: Recipe, target: nn.Module, device: str, processes: int) -> int:
    """Bytes of the target that lie in the host's memory or with other processes, see train/placement.py."""
    offload = recipe.target.offload and torch.device(device).type != "cpu"
    if not offload and not (recipe.target.sharded and processes > 1):
        return 0
    layers = [_bytes(layer) for name in layer_lists(target) for layer in target.get_submodule(name)]
    kept = 0 if offload else sum(layers) // processes
    return sum(layers) - kept - max(layers)  # one of them is there while it computes


def _bytes(module: nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())


def announce_memory(recipe: Recipe, accelerator: Accelerator, console: Console) -> MemoryEstimate | None:
    """Say what the run will take, before anything is loaded for it; None where that cannot be told."""
    settings = recipe.target
    with accelerator.main_process_first():
        _, config = load_tokenizer(
            settings.model, revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
    if not console.visible:
        return None
    here = {"device": str(accelerator.device), "processes": accelerator.num_processes}
    here["sharded"] = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    try:
        estimate = estimate_memory(recipe, config, **here, bf16=precision(recipe) == "bf16")
    except ConfigError:
        raise
    except Exception as error:  # whatever it is: what could not be told beforehand may run all the same
        console.say(f"memory: no estimate ({type(error).__name__}: {' '.join(str(error).split())})")
        return None
    console.say(f"memory: about {estimate}")
    return estimate


def _width(recipe: Recipe) -> int:
    data = recipe.data
    if data.pack and data.pack_tokens is not None:
        return data.pack_tokens
    return data.prompt_tokens + data.response_tokens


def _drafter(recipe: Recipe, target: nn.Module) -> TrainableDrafter:
    options = recipe.drafter_options()
    if options.get("model") is not None:  # its shapes are enough
        options |= {"model": None, "config": AutoConfig.from_pretrained(options["model"]).to_dict()}
    size = checked_size(recipe.draft_vocab_size, target.get_output_embeddings().weight.shape[0])
    if size is not None:
        options["draft_vocabulary"] = list(range(size))
    drafter = HEADS[recipe.drafter.type].from_target(target, **options)
    drafter.attach(target)
    return drafter


def _batch(recipe: Recipe, config: PreTrainedConfig, width: int, processes: int) -> Batch:
    """The longest that a process may see at once."""
    rows = max(1, recipe.train.batch_size // (processes * recipe.train.gradient_accumulation))
    if config.is_encoder_decoder:
        source_BS = torch.zeros(rows, recipe.data.prompt_tokens, dtype=torch.long)
        ids_BT = torch.zeros(rows, recipe.data.response_tokens + 1, dtype=torch.long)
        more = {"source_BS": source_BS, "source_mask_BS": torch.ones_like(source_BS)}
    else:
        ids_BT = torch.zeros(rows, width, dtype=torch.long)
        more = {"documents_BT": torch.zeros_like(ids_BT)} if recipe.data.pack else {}
    return Batch(ids_BT, torch.ones_like(ids_BT), torch.ones_like(ids_BT).bool(), rows=list(range(rows)), **more)


def _one_step(step: nn.Module, optimizers: list[torch.optim.Optimizer], batch: Batch, device: str, bf16: bool) -> None:
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=bf16):
        loss = step(batch, 1.0, Last([0.5] * 64))[0]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(step.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _teacher(recipe: Recipe, target: nn.Module, drafter: TrainableDrafter) -> "OnlineTeacher | _Told":
    kind = recipe.teacher.kind
    return OnlineTeacher(target, drafter.needs.layers) if kind == "online" else _Told(target, drafter, kind)


class _Told:
    """Stands for a teacher that reads its signals from a file, so that the target does not run."""

    def __init__(self, target: nn.Module, drafter: TrainableDrafter, kind: str) -> None:
        self.model, self.lm_head = target, target.get_output_embeddings()
        self._layers, self._likeliest = len(drafter.needs.layers), kind == "logprobs"

    def signals(
        self, input_ids_BT: Tensor, attention_mask_BT: Tensor, mask_BT: Tensor, **rest: Tensor
    ) -> TeacherSignals:
        weight_VH, shape, text = self.lm_head.weight, input_ids_BT.shape, (input_ids_BT, attention_mask_BT)
        documents = {"documents_BT": rest.get("documents_BT")}
        if self._likeliest:
            nothing_BT0 = weight_VH.new_empty(*shape, 0)
            ids_BTE = torch.zeros(*shape, LIKELIEST, dtype=torch.long)
            known = {"top_ids_BTE": ids_BTE, "top_log_BTE": torch.zeros(*shape, LIKELIEST)}
            return TeacherSignals(*text, nothing_BT0, mask_BT, **documents, **known)
        hidden = weight_VH.shape[1]
        features_BTF = weight_VH.new_empty(*shape, self._layers * hidden) if self._layers else None
        return TeacherSignals(*text, weight_VH.new_empty(*shape, hidden), mask_BT, features_BTF, **documents)


def _cache_bytes(recipe: Recipe, config: PreTrainedConfig) -> int:
    """Of `data.batch_size` texts in the decoder's cache, see decode/cache.py."""
    text, data = config.get_text_config(decoder=True), recipe.data
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = (
        getattr(text, "head_dim", None) or getattr(text, "d_kv", None) or text.hidden_size // text.num_attention_heads
    )
    prompt = 1 if config.is_encoder_decoder else data.prompt_tokens
    slots = prompt + FIRST_SLOTS
    while slots < prompt + data.response_tokens:
        slots *= 2
    bytes_each = torch.empty(0, dtype=DTYPES[recipe.target.dtype]).element_size()
    return 2 * text.num_hidden_layers * data.batch_size * heads * size * slots * bytes_each
