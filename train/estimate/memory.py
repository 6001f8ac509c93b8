"""How much memory a run will take, found by running one step of it on tensors that have shapes but no data."""

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedConfig

from draftsmith.decode.kv_cache import FIRST_SLOTS
from draftsmith.distill.load_target import DTYPES, load_tokenizer
from draftsmith.errors import ConfigError
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.hidden_states import final_states, layer_lists
from draftsmith.train.accelerator import precision
from draftsmith.train.estimate.fake_run import LiveBytes, dry_step, marked_share, require_plain, target_of, without_data
from draftsmith.train.progress import Console, in_units
from draftsmith.train.recipe import Recipe

LIBRARIES, KEPT = 64 * 2**20, 0.2
"""On a CPU: bytes of what libraries load for a run, and the share of all that comes and goes which the allocator keeps
when it is freed. Measured with glibc on both quickstart recipes, see docs/training.md."""

# Shapes: B sequences, T positions, H hidden size.


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
    reading: int
    """What is alive beside them while it reads those texts' prompts, the optimizer's state in later rounds included."""
    on_host: bool = False
    """Whether all of it lies in the host's memory, where libraries and the allocator take their share."""

    @property
    def training(self) -> int:
        return self.target + self.drafter + self.gradients + self.optimizer + self.activations

    @property
    def sampling(self) -> int:
        return self.target + self.drafter + self.cache + self.reading

    @property
    def peak(self) -> int:
        """Of tensors alone."""
        return max(self.training, self.sampling)

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        """Bytes by what they are for, in each phase of a run, the phase that takes most first."""
        models = {"target": self.target, "drafter": self.drafter}
        kept = {"gradients": self.gradients, "optimizer": self.optimizer}
        phases = {"in training": {**models, **kept, "activations": self.activations}}
        if self.cache:
            phases["while sampling"] = {**models, "cache": self.cache, "prompts": self.reading}
        if self.on_host:
            for parts in phases.values():
                passing = sum(parts.get(name, 0) for name in ("activations", "cache", "prompts"))
                parts["libraries and allocator"] = LIBRARIES + round(KEPT * passing)
        return dict(sorted(phases.items(), key=lambda phase: -sum(phase[1].values())))

    @property
    def announced(self) -> int:
        """What a run's `MemoryMeter` is expected to measure: all parts of the larger phase."""
        return sum(next(iter(self.phases.values())).values())

    def __str__(self) -> str:
        described = []
        for phase, parts in self.phases.items():
            listed = ", ".join(f"{name} {in_units(value)}" for name, value in parts.items())
            described.append(f"{in_units(sum(parts.values()))} a process {phase} ({listed})")
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
    """What a step with sequences as long as the recipe allows will hold, without loading anything.

    Two steps are run, since the optimizer's state comes with the first; the second one's peak counts. `config`: the
    target's. `sharded`: FSDP2 or ZeRO, which share out the optimizer's state; weights and gradients are whole during a
    step. `bf16`: under autocast. `accelerated`: whether the run has an accelerator beside the host's memory; by default
    whether `device` is one.

    Raises:
        ConfigError: for a drafter that does not fit the target.
        DraftsmithError: for a quantised target, which cannot be built from its config alone.
    """
    require_plain(config)
    data = recipe.data
    with without_data(device, marked_share(recipe, config)) as live:
        target = target_of(recipe, config)
        weights = live.now
        step = dry_step(recipe, target, device=device, processes=processes, bf16=bf16)
        drafted = live.now - weights
        trained = sum(p.numel() * p.element_size() for p in step.module.parameters() if p.requires_grad)
        for _ in range(2):
            live.peak = live.now
            step.run()
        moments = _moments(step.optimizers)
        copies = 2 if processes > 1 and not sharded else 1  # DDP keeps gradients in buckets of its own, too
        rest = max(0, live.peak - weights - drafted - moments - trained)
        cache = reading = 0
        if data.response == "target" and recipe.teacher.kind != "logprobs":
            cache, reading = cache_bytes(recipe, config), _reading_bytes(recipe, target, live)
            if isinstance(step.drafter, DraftModel) and (data.refresh_every or data.drafter_share):
                cache += cache_bytes(
                    recipe, step.drafter.model.config
                )  # it proposes or answers, with a cache of its own
            if data.refresh_every:
                reading += moments  # later rounds are sampled in the middle of training
        beside_host = torch.device(device).type != "cpu" if accelerated is None else accelerated
        elsewhere = _elsewhere(recipe, target, beside_host, processes)
        mine = moments // processes if sharded else moments
        parts = (weights - elsewhere, drafted, copies * trained, mine, rest, cache, reading)
        return MemoryEstimate(*parts, on_host=not beside_host)


def _moments(optimizers: list[torch.optim.Optimizer]) -> int:
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() * value.element_size() for value in states)


def _elsewhere(recipe: Recipe, target: nn.Module, accelerated: bool, processes: int) -> int:
    """Bytes of the target that lie in the host's memory or with other processes, see train/target_placement.py."""
    offload = recipe.target.offload and accelerated
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
    console.say("memory: computing what the run will take")
    here = {"device": str(accelerator.device), "processes": accelerator.num_processes}
    here["sharded"] = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    try:
        estimate = estimate_memory(recipe, config, **here, bf16=precision(recipe) == "bf16")
    except ConfigError:
        return None  # the run itself says what is wrong, on all processes
    except Exception as error:  # whatever it is: what could not be told beforehand may run all the same
        console.say(f"memory: no estimate ({type(error).__name__}: {' '.join(str(error).split())})")
        return None
    console.say(f"memory: about {estimate}")
    return estimate


@torch.no_grad()
def _reading_bytes(recipe: Recipe, target: nn.Module, live: LiveBytes) -> int:
    """Of one pass over `data.batch_size` prompts, and the logits behind them."""
    before = live.peak = live.now
    ids_BT = torch.zeros(_together(recipe), recipe.data.prompt_tokens, dtype=torch.long)
    source = (ids_BT,) if target.config.is_encoder_decoder else ()
    states_BTH = final_states(target, ids_BT[:, :1] if source else ids_BT, torch.ones_like(ids_BT), *source)
    target.get_output_embeddings()(states_BTH[:, -1:]).float().softmax(-1)
    return live.peak - before


def cache_bytes(recipe: Recipe, config: PreTrainedConfig) -> int:
    """Of the texts that are answered together, see decode/kv_cache.py; `config` is the model's that reads them."""
    text, data = config.get_text_config(decoder=True), recipe.data
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = (
        getattr(text, "head_dim", None) or getattr(text, "d_kv", None) or text.hidden_size // text.num_attention_heads
    )
    prompt = 1 if config.is_encoder_decoder else data.prompt_tokens
    slots = prompt + FIRST_SLOTS
    while slots < prompt + data.response_tokens:
        slots *= 2
    if config.is_encoder_decoder:
        slots += data.prompt_tokens  # the encoder's, read by every layer of the decoder
    bytes_each = torch.empty(0, dtype=DTYPES[recipe.target.dtype]).element_size()
    return 2 * text.num_hidden_layers * _together(recipe) * heads * size * slots * bytes_each


def _together(recipe: Recipe) -> int:
    """Prompts that are answered together."""
    return min(recipe.data.batch_size, recipe.data.count)
