"""Time that a run takes on a GPU, computed from the operations of its step and the bytes that sampling reads.

Also whether it fits into the memory of the GPU, and the recipe values with which it does.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.errors import DraftsmithError
from draftsmith.heads.model_config import text_config
from draftsmith.train.estimate.fake_run import without_data
from draftsmith.train.estimate.gpus import MACHINES, room_on
from draftsmith.train.estimate.memory import MemoryEstimate, cache_bytes, estimate_memory
from draftsmith.train.models import target_of
from draftsmith.train.progress import in_units
from draftsmith.train.recipe import Recipe

OPERATIONS_SHARE, BYTES_SHARE = 0.4, 0.5
"""Shares of both that a run is assumed to reach."""
EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "top_k_experts")
"""Keys of configs."""
SERVED = ("data.response=text", "teacher.kind=cached", "target.offload=true")
"""For a target that a GPU holds in 4 bits only: an engine writes the answers, and one pass over them, with a layer at a
time on the GPU, computes the states of the same weights."""

ONLY_IN = {"train": "in training", "data": "while sampling"}
"""The phase, see `MemoryEstimate.phases`, that proposed values of a section change."""


@dataclass(frozen=True)
class WorkEstimate:
    """The work of one process, assuming that all samples are as long as the recipe allows."""

    step_operations: float
    """Operations of an optimizer step: target, drafter, objective, backward pass."""
    steps: int
    caching_operations: float
    """Operations of the target's pass over all samples before training; 0 unless its states are cached."""
    prompt_operations: float
    """Operations of reading all prompts; 0, like the next three, where no responses are sampled here."""
    passes: int
    """Forward passes that each add a token to `data.batch_size` texts."""
    pass_operations: float
    pass_bytes: float

    def training_seconds(self, machine: str) -> float:
        """Return the seconds of training, including the teacher's cache."""
        work = self.steps * self.step_operations + self.caching_operations
        return work / (OPERATIONS_SHARE * _peak(machine)[0])

    def sampling_seconds(self, machine: str) -> float:
        """Return the seconds of sampling the responses."""
        operations, moved = _peak(machine)
        operations, moved = OPERATIONS_SHARE * operations, BYTES_SHARE * moved
        one_pass = max(self.pass_operations / operations, self.pass_bytes / moved)
        return self.prompt_operations / operations + self.passes * one_pass

    def on(self, machine: str) -> str:
        """Return the estimate for a machine as text."""
        sampling, training = self.sampling_seconds(machine), self.training_seconds(machine)
        parts = f"sampling {in_hours(sampling)}, training {in_hours(training)}"
        return f"about {in_hours(sampling + training)} on {machine}: {parts}"


def fitting_sentence(machine: str, needed: MemoryEstimate, overrides: list[str] | None) -> str:
    """Return whether a run fits into a machine's memory: as it is, with `overrides`, or, with None, not at all.

    `needed`: with the overrides.
    """
    room = f"{in_units(room_on(machine))} that can be used of {MACHINES[machine][2]} GiB on {machine}"
    if overrides is None:
        return f"does not fit into the {room}; expected a smaller target, several GPUs with --sharded, or a larger GPU"
    if not overrides:
        return f"fits into the {room}"
    disk = f" and at most {in_units(needed.disk)} of disk" if needed.disk else ""
    return f"does not fit into the {room}; takes {in_units(needed.announced)}{disk} and fits with {' '.join(overrides)}"


def _peak(machine: str) -> tuple[float, float]:
    """Return operations and bytes per second."""
    operations, moved, _ = MACHINES[machine]
    return operations * 1e12, moved * 1e9


def fitting_overrides(recipe: Recipe, room: int, needed: Callable[[list[str]], dict[str, int]]) -> list[str] | None:
    """Return recipe values, `section.key=value`, with which a run fits into `room` bytes; None if none do.

    Those that leave the result as it is come first: more accumulation steps, recomputed activations, fewer prompts
    decoded together. The target's dtype, its quantization and a draft vocabulary follow. A value that saves nothing is
    left out. Where all of them are not enough, `SERVED` takes the place of sampling here and of quantization.

    Args:
        needed: returns the bytes of each phase of the run with these values, see `MemoryEstimate.totals`; raises
            ConfigError for values that exclude each other.
    """
    train, data = recipe.train, recipe.data
    small = [
        *(f"train.gradient_accumulation={train.batch_size // size}" for size in (4, 2, 1) if size < train.batch_size),
        "train.activation_checkpointing=true",
    ]
    fewer = [f"data.batch_size={size}" for size in (16, 4) if size < data.batch_size]
    dtype = ["target.dtype=bfloat16"] if recipe.target.dtype == "float32" else []
    rows = "drafter.draft_vocab_size=32000"
    here = _first_that_fit([], [*small, *fewer, *dtype, "target.quantization=int8", rows], room, needed)
    return here if here is not None else _first_that_fit([*SERVED], [*small, *dtype, rows], room, needed)


def _first_that_fit(
    given: list[str], steps: list[str], room: int, needed: Callable[[list[str]], dict[str, int]]
) -> list[str] | None:
    """Return `given` and the first of `steps` that save memory until a run fits; None if it does not.

    After each that does, those before it are tried again: another phase of the run may need most by then. Each try
    takes seconds, so values that only change a smaller phase are not tried.
    """
    chosen: dict[str, str] = {}
    try:
        least = needed(given)
    except DraftsmithError:
        return None
    while max(least.values()) > room:
        largest = max(least, key=least.__getitem__)
        for place, step in enumerate(steps):
            if _key(step) in chosen and place <= steps.index(chosen[_key(step)]):
                continue
            if ONLY_IN.get(step.partition(".")[0], largest) != largest:
                continue
            with suppress(DraftsmithError):
                sizes = needed([*given, *({**chosen, _key(step): step}).values()])
                if max(sizes.values()) < 0.99 * max(least.values()):
                    least, chosen[_key(step)] = sizes, step
                    break
        else:
            return None
    return [*given, *chosen.values()]


def _key(step: str) -> str:
    return step.partition("=")[0]


def in_hours(seconds: float) -> str:
    """Return a duration in hours, or in minutes below two hours."""
    return f"{seconds / 3600:.1f} h" if seconds >= 7200 else f"{math.ceil(seconds / 60)} min"


def estimate_work(
    recipe: Recipe,
    config: PreTrainedConfig,
    memory: MemoryEstimate | None = None,
    *,
    processes: int = 1,
    bf16: bool = False,
) -> WorkEstimate:
    """Count the operations and bytes of a run on fake tensors; `config` is the target's.

    Args:
        memory: the estimate of this run, whose step is counted; by default it is computed here.

    Raises:
        ConfigError: for a drafter that does not fit the target.
        DraftsmithError: for a quantised target.
    """
    memory = memory or estimate_memory(recipe, config, processes=processes, bf16=bf16)
    data, train = recipe.data, recipe.train
    with without_data(recipe, config, "cpu", processes):
        target = target_of(recipe, config)
        reading, writing = _weights_used(target)
        experts, share = _experts(target)
        read_by_all = writing + experts * (1 - share - (1 - share) ** data.batch_size)
        size = next(target.parameters()).element_size()
    of_step = memory.part_operations * train.gradient_accumulation + memory.update_operations
    asked = sum(source.count for source in data.sources if not source.answered)
    rows = math.ceil(asked / processes) * data.responses
    tokens = (rows + math.ceil((data.count - asked) / processes)) * (data.prompt_tokens + data.response_tokens)
    caching = 2.0 * reading * tokens if recipe.teacher.kind == "cached" else 0.0
    if not asked or data.server is not None:
        return WorkEstimate(of_step, train.steps, caching, 0.0, 0, 0.0, 0.0)
    passes = math.ceil(rows / data.batch_size) * data.response_tokens
    read = read_by_all * size + cache_bytes(recipe, config) / 2  # on average, texts have half of their final length
    prompts = 2.0 * reading * rows * data.prompt_tokens
    return WorkEstimate(of_step, train.steps, caching, prompts, passes, 2.0 * writing * data.batch_size, read)


def _weights_used(target: PreTrainedModel) -> tuple[int, int]:
    """Return the counts of weights that a token of a prompt and one of a response use.

    They differ for an encoder-decoder: its encoder reads the prompt and its decoder writes the response.
    """
    everything = sum(weight.numel() for weight in target.parameters())
    if not target.config.is_encoder_decoder:
        experts, share = _experts(target)
        active = everything - round(experts * (1 - share))
        return active, active
    encoder = sum(weight.numel() for weight in target.get_encoder().parameters())
    embeddings = sum(weight.numel() for weight in target.get_input_embeddings().parameters())  # used by both
    return encoder, everything - encoder + embeddings


def _experts(target: PreTrainedModel) -> tuple[int, float]:
    """Return the number of weights in experts, and the share of them that a token uses."""
    config = text_config(target)
    chosen = next((n for key in EXPERTS_OF_A_TOKEN if (n := getattr(config, key, None))), None)
    stacked = [weight for name, weight in target.named_parameters() if ".experts." in name and weight.dim() == 3]
    if chosen is None or not stacked:
        return 0, 1.0
    return sum(weight.numel() for weight in stacked), chosen / max(len(weight) for weight in stacked)
