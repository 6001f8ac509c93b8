"""Memory that a run will take, estimated by running steps of it on fake tensors, which have shapes and no data."""

from dataclasses import dataclass

import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.decode.cache.rollback import FIRST_SLOTS
from draftsmith.distill.draft_probabilities import ROWS
from draftsmith.distill.hidden_state_cache import DTYPES as SHARD_DTYPES
from draftsmith.distill.hidden_state_cache import TOGETHER, stored_states
from draftsmith.distill.load_target import DTYPES
from draftsmith.distill.quantization import saved_bytes
from draftsmith.distill.teacher import Batch, OnlineTeacher
from draftsmith.errors import ConfigError
from draftsmith.heads.base import TrainableDrafter
from draftsmith.heads.hidden_states import final_states, layer_lists
from draftsmith.heads.model_config import layer_value
from draftsmith.train.estimate.fake_run import (
    LiveBytes,
    Operations,
    dry_step,
    require_plain,
    sequence_length,
    served_layers,
    starting_point,
    without_data,
)
from draftsmith.train.launch import RunContext
from draftsmith.train.models import target_of
from draftsmith.train.progress import in_units
from draftsmith.train.recipe import Recipe
from draftsmith.train.step import precision

LIBRARIES = 176 * 2**20
"""Bytes that libraries, kernels of oneDNN for each shape, and a tokenizer of `USUAL` tokens take on a CPU."""
USUAL, TOKEN = 32_000, 1200
"""Tokens of a usual vocabulary, and bytes of each token beyond them in a tokenizer: 262,144 of Gemma 3 take 267 to 315
MiB, 49,152 of SmolLM2 10 to 41 MiB, the less where the process had read the tokenizer before."""
GAPS = {"activations": 0.6, "cache": 0.2, "prompts": 0.2, "states": 0.2}
"""Memory of the allocator on a CPU beside tensors, as a share of temporary tensors by use: steps create many sizes.
Measured with glibc, see docs/guide/train.md."""

# Shapes: B sequences, T positions, H hidden size.


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak memory of one process in bytes, by use: in a training step, while it samples, and while it caches states."""

    target: int
    drafter: int
    gradients: int
    optimizer: int
    activations: int
    """Everything else at the peak: activations, logits of a chunk, features, batch."""
    cache: int
    """Keys and values of the texts that are decoded together before training; 0 where none are sampled here."""
    reading: int
    """Other memory while it reads their prompts."""
    caching: int = 0
    """Other memory while the target's states are cached; 0 without a cached teacher."""
    disk: int = 0
    """Bytes of the cached states of all processes on disk, if each text is as long as the recipe allows."""
    on_host: bool = False
    """Whether all of it is in host memory, where libraries and the allocator need memory too."""
    tokenizer: int = 0
    """Memory of a large tokenizer, on the host, beyond that of a usual one."""
    part_operations: float = 0
    """Floating-point operations of an accumulation step: target, drafter, objective, backward pass."""
    update_operations: float = 0
    """Floating-point operations of the optimizers' update."""

    @property
    def training(self) -> int:
        return self.target + self.drafter + self.gradients + self.optimizer + self.activations

    @property
    def sampling(self) -> int:
        return self.target + self.drafter + self.cache + self.reading

    @property
    def peak(self) -> int:
        """Bytes of tensors, without libraries and allocator."""
        return max(self.training, self.sampling, self.target + self.drafter + self.caching)

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        """Bytes by use in each phase of a run, the largest phase first."""
        models = {"target": self.target, "drafter": self.drafter}
        kept = {"gradients": self.gradients, "optimizer": self.optimizer}
        phases = {"in training": {**models, **kept, "activations": self.activations}}
        if self.cache:
            phases["while sampling"] = {**models, "cache": self.cache, "prompts": self.reading}
        if self.caching:
            phases["while caching"] = {**models, "states": self.caching}
        if self.on_host:
            for parts in phases.values():
                gaps = sum(share * parts.get(use, 0) for use, share in GAPS.items())
                parts["libraries and allocator"] = LIBRARIES + self.tokenizer + round(gaps)
        return dict(sorted(phases.items(), key=lambda phase: -sum(phase[1].values())))

    @property
    def announced(self) -> int:
        """Expected value of a run's `MemoryMeter`: all parts of the largest phase."""
        return next(iter(self.totals.values()))

    @property
    def totals(self) -> dict[str, int]:
        """Bytes of each phase of a run, the largest first."""
        return {phase: sum(parts.values()) for phase, parts in self.phases.items()}

    def __str__(self) -> str:
        described = []
        for phase, parts in self.phases.items():
            listed = ", ".join(f"{name} {in_units(value)}" for name, value in parts.items())
            described.append(f"{in_units(sum(parts.values()))} a process {phase} ({listed})")
        if self.disk:
            described.append(f"cached states: at most {in_units(self.disk)} on disk; teacher.kind=online takes none")
        return "; ".join(described)


def estimate_memory(
    recipe: Recipe,
    config: PreTrainedConfig,
    *,
    device: str = "cpu",
    processes: int = 1,
    sharded: bool = False,
    bf16: bool = False,
    accelerated: bool | None = None,
) -> MemoryEstimate:
    """Estimate the memory of a step with sequences as long as the recipe allows, without loading anything.

    The peak is that of a step with the optimizer's state, as all but the first one have.

    Args:
        config: the target's.
        sharded: FSDP2 or ZeRO, which shard the optimizer's state; weights and gradients are whole during a step.
        bf16: under autocast.
        accelerated: whether the run uses an accelerator with its own memory; by default whether `device` is one.

    Raises:
        ConfigError: for a drafter that does not fit the target.
        DraftsmithError: for a quantised target, which cannot be built from its config alone.
    """
    require_plain(config)
    data = recipe.data
    start = starting_point(recipe, config)
    with without_data(recipe, config, device, processes) as live:
        target = target_of(recipe, config)
        weights = live.now
        step = dry_step(recipe, target, start, device=device, processes=processes, bf16=bf16)
        step.keeps_gradients = processes > 1 and not sharded
        drafted = live.now - weights
        trained = sum(p.numel() * p.element_size() for p in step.module.parameters() if p.requires_grad)
        step.first_update()
        live.peak = live.now
        with Operations() as of_part:
            step.part()
        with Operations() as of_update:
            step.update()
        moments = _moments(step.optimizers)
        rest = max(0, live.peak - weights - drafted - moments - trained)
        cache = reading = 0
        if not data.answered and data.server is None:
            cache = cache_bytes(recipe, config)
            reading = _reading_bytes(recipe, target, live)
        beside_host = torch.device(device).type != "cpu" if accelerated is None else accelerated
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=bf16):
            caching, disk = _caching_bytes(recipe, target, step.drafter, live, not beside_host)
        return MemoryEstimate(
            target=weights - _elsewhere(recipe, target, beside_host, processes),
            drafter=drafted,
            gradients=trained,
            optimizer=moments // processes if sharded else moments,
            activations=rest,
            cache=cache,
            reading=reading,
            caching=caching,
            disk=disk,
            on_host=not beside_host,
            tokenizer=TOKEN * max(0, config.get_text_config(decoder=True).vocab_size - USUAL),
            part_operations=of_part.total,
            update_operations=of_update.total,
        )


def states_sentence(recipe: Recipe, config: PreTrainedConfig, seconds: float | None) -> str:
    """Return the bytes of an engine's states that a step reads, and those of a second; `seconds`: of all steps."""
    server, layers = recipe.teacher.server, served_layers(recipe, config)
    width = config.get_text_config(decoder=True).hidden_size
    numbers = recipe.train.batch_size * sequence_length(recipe) * len(layers) * width
    size = numbers if server is not None and server.transfer == "fp8" else 2 * numbers
    rate = "" if seconds is None else f", {in_units(size * recipe.train.steps / seconds)} a second"
    return f"states of layers {', '.join(map(str, layers))}: at most {in_units(size)} a step from the engine{rate}"


def _moments(optimizers: list[torch.optim.Optimizer]) -> int:
    """Return the bytes of the optimizers' state."""
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() * value.element_size() for value in states)


def _elsewhere(recipe: Recipe, target: PreTrainedModel, accelerated: bool, processes: int) -> int:
    """Return the target's bytes that this process's device does not hold, see train/placement.py."""
    offload = recipe.target.offload and accelerated
    if recipe.target.quantization is not None:
        return saved_bytes(target, recipe.target.quantization)
    if not offload and not (recipe.target.sharded and processes > 1):
        return 0
    layers = [_bytes(layer) for name in layer_lists(target) for layer in target.get_submodule(name).children()]
    kept = 0 if offload else sum(layers) // processes
    return sum(layers) - kept - max(layers)  # a layer that computes is whole


def _bytes(module: nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())


def announce_memory(context: RunContext) -> MemoryEstimate | None:
    """Print and return the estimate of a run before it loads anything; None where there is no estimate."""
    recipe, accelerator, console = context.recipe, context.accelerator, context.console
    with accelerator.main_process_first():
        _, config = recipe.target.load_tokenizer()
    if not console.visible:
        return None
    console.say("memory: computing what the run will take")
    try:
        estimate = estimate_memory(
            recipe,
            config,
            device="cpu" if accelerator.device.type == "cpu" else str(accelerator.device),  # fake tensors know no cpu:0
            processes=accelerator.num_processes,
            sharded=accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED),
            bf16=precision(recipe.train) == "bf16",
        )
    except ConfigError:
        return None  # the run itself reports it, on all processes
    except Exception as error:  # any failure: the run may work nevertheless
        console.say(f"memory: no estimate ({type(error).__name__}: {' '.join(str(error).split())})")
        return None
    console.say(f"memory: about {estimate}")
    return estimate


@torch.no_grad()
def _reading_bytes(recipe: Recipe, target: PreTrainedModel, live: LiveBytes) -> int:
    """Return the bytes of one pass over `data.batch_size` prompts, and of the logits of their last positions."""
    before = live.peak = live.now
    ids_BT = torch.zeros(_together(recipe), recipe.data.prompt_tokens, dtype=torch.long)
    source_BT = ids_BT if target.config.is_encoder_decoder else None
    read_BT = ids_BT if source_BT is None else ids_BT[:, :1]
    states_BTH = final_states(target, read_BT, torch.ones_like(ids_BT), source_BT)
    lm_head = target.get_output_embeddings()
    assert lm_head is not None, "a target without an lm_head has been refused with the drafter"
    lm_head(states_BTH[:, -1:]).float().softmax(-1)
    return live.peak - before


def _caching_bytes(
    recipe: Recipe, target: PreTrainedModel, drafter: TrainableDrafter, live: LiveBytes, on_host: bool
) -> tuple[int, int]:
    """Return the bytes of the target's passes over a shard's rows, and of all states on disk; 0 without a cache.

    With `on_host`, the states of the shard's rows count with the passes.
    """
    if recipe.teacher.kind != "cached":
        return 0, 0
    teacher, settings = OnlineTeacher(target, drafter.needs.layers), recipe.teacher
    every = recipe.data.count * recipe.data.responses
    rows = min(settings.shard_rows, every)
    before = live.peak = live.now
    ids_BT = torch.zeros(min(TOGETHER, rows), sequence_length(recipe), dtype=torch.long)
    signals = teacher.signals(Batch(ids_BT, torch.ones_like(ids_BT), ids_BT == 0))
    states_BTW = stored_states(signals, teacher.layers)
    one_pass = live.peak - before
    of_row = states_BTW.numel() // len(ids_BT)
    kept, stored = (rows * of_row * dtype.itemsize for dtype in (states_BTW.dtype, SHARD_DTYPES[settings.dtype]))
    copied = 0 if states_BTW.dtype == SHARD_DTYPES[settings.dtype] else stored
    if drafter.draft_vocabulary is not None:  # logits, twice in float32
        copied += 3 * ROWS * teacher.lm_head.weight.shape[0] * 4
    # On a CPU the rows' states, and then one tensor of them all.
    peak = kept + max(one_pass, kept + copied) if on_host else one_pass
    return peak, every * of_row * SHARD_DTYPES[settings.dtype].itemsize


def cache_bytes(recipe: Recipe, config: PreTrainedConfig) -> int:
    """Return the bytes of keys and values of the texts that are decoded together, see decode/cache/rollback.py.

    `config`: of the model that decodes them.
    """
    text, data = config.get_text_config(decoder=True), recipe.data
    values = 0
    for layer in range(text.num_hidden_layers):
        heads = layer_value(text, "num_attention_heads", layer)
        if heads is None:  # a purely recurrent model has none
            break
        size = layer_value(text, "head_dim", layer) or getattr(text, "d_kv", None) or text.hidden_size // heads
        values += 2 * size * (layer_value(text, "num_key_value_heads", layer) or heads)
    prompt = 1 if config.is_encoder_decoder else data.prompt_tokens
    slots = prompt + min(FIRST_SLOTS, data.response_tokens)
    while slots < prompt + data.response_tokens:
        slots *= 2
    if config.is_encoder_decoder:
        slots += data.prompt_tokens  # the encoder's, read by every layer of the decoder
    bytes_each = torch.empty(0, dtype=DTYPES[recipe.target.dtype]).element_size()
    return values * _together(recipe) * slots * bytes_each


def _together(recipe: Recipe) -> int:
    """Return the number of prompts that are decoded together."""
    return min(recipe.data.batch_size, recipe.data.count)
