"""A step: its rows as a padded batch, and the modules that accelerate wraps, drafter and objective together.

The rows depend on seed and step alone, so that resuming needs no saved state.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from draftsmith.decode.clock import PartClock
from draftsmith.distill.cotraining import Adapters, quality_kl
from draftsmith.distill.load_target import bf16_is_fast
from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import Batch, OnlineTeacher, TargetHead
from draftsmith.heads.base import TeacherSignals, TrainableDrafter
from draftsmith.heads.flat_rows import read_flat, recompute_activations
from draftsmith.heads.hidden_states import ProcessorInputs, document_numbers, layers_of
from draftsmith.heads.lora import without_lora
from draftsmith.heads.sequence_part import SequencePart
from draftsmith.train.optimizers import OPTIMIZERS, Optimizers, Sizes, Trained, adapters_optimizer
from draftsmith.train.progress import PARTS
from draftsmith.train.recipe import Recipe
from draftsmith.train.recipe_sections import CotrainSection, TrainSection

# Shapes: B sequences, T positions, S positions of the source, K draft positions, H hidden size, N trained positions.

MULTIPLE = 16
"""Batches are padded to a multiple of this length. On a CPU oneDNN keeps kernels for every length that occurs, so a run
with few lengths takes less memory. On a GPU matrix products are fastest at such sizes."""
ReadImages = Callable[[str, list[int]], ProcessorInputs | None]
"""Returns the processor's tensors for a text, from the column `images` and the tokens of its row."""


def batch_indices(
    seed: int, step: int, batch_size: int, length: int, excluded: Collection[int] = frozenset()
) -> list[int]:
    """Return the rows of global batch `step`; epochs are shuffled separately and follow each other without a gap.

    The next row takes the place of one that is excluded, so that nothing else changes; at least one row must remain.
    """
    indices = []
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, place = divmod(position, length)
        row = _permutation(seed, epoch, length)[place]
        while row in excluded:
            row = (row + 1) % length
        indices.append(row)
    return indices


_last: dict[tuple[int, int, int], list[int]] = {}


def _permutation(seed: int, epoch: int, length: int) -> list[int]:
    key = (seed, epoch, length)
    if key not in _last:
        if len(_last) > 1:
            _last.clear()
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        _last[key] = torch.randperm(length, generator=generator).tolist()
    return _last[key]


def collate(
    rows: Dataset,
    indices: list[int],
    device: torch.device,
    start_token: int | None = None,
    read_images: ReadImages | None = None,
    limit: int | None = None,
) -> Batch:
    """Pad rows on the right to one length: that of the longest, or the multiple of `MULTIPLE` after it.

    Args:
        limit: the length up to which rows are padded to a multiple; see `model_config.context_limit`.
        read_images: returns the processor's tensors of a row; for data with images.
        start_token: an encoder-decoder target's; its encoder then reads the prompts, and its decoder this token and
            the responses.
    """
    chosen = [rows[index] for index in indices]
    texts, spans = [row["input_ids"] for row in chosen], [row["spans"] for row in chosen]
    source_BS = source_mask_BS = None
    if start_token is not None:
        lengths = [of_row[0][0] for of_row in spans]
        prompts = [text[:length] for text, length in zip(texts, lengths, strict=True)]
        source_BS, source_mask_BS = _padded(prompts, device, limit)
        texts = [[start_token, *text[length:]] for text, length in zip(texts, lengths, strict=True)]
        spans = [[[1, len(text)]] for text in texts]
    ids_BT, attention_BT = _padded(texts, device, limit)
    mask_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for i, of_row in enumerate(spans):
        for start, end in of_row:
            mask_BT[i, start - 1 : end - 1] = True
    documents_BT = None
    if "documents" in rows.column_names:
        documents_BT = document_numbers([row["documents"] for row in chosen], ids_BT.shape[1]).to(device)
    inputs: list[ProcessorInputs | None] = []
    if read_images is not None and any(row["images"] for row in chosen):
        inputs = [read_images(row["images"], row["input_ids"]) for row in chosen]
    return Batch(ids_BT, attention_BT, mask_BT, source_BS, source_mask_BS, indices, documents_BT, inputs)


def _padded(texts: list[list[int]], device: torch.device, limit: int | None) -> tuple[Tensor, Tensor]:
    """Return token ids [B, T], padded with zeros, and the attention mask [B, T]."""
    longest = max(map(len, texts))
    width = -(-longest // MULTIPLE) * MULTIPLE
    if limit is not None:
        width = min(width, max(longest, limit))
    ids_BT = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
    mask_BT = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
    return ids_BT.to(device), mask_BT.to(device)


def response_tokens(rows: Dataset, indices: list[int]) -> int:
    """Return the number of trained tokens in a global batch; every process counts them without communication."""
    return sum(end - start for index in indices for start, end in rows[index]["spans"])


class Teacher(Protocol):
    """The target in the loop, or its stored hidden states."""

    lm_head: TargetHead

    def signals(self, batch: Batch) -> TeacherSignals:
        """Return the target's outputs for a batch. Only the online teacher takes a source or images."""
        ...


class StepSums(NamedTuple):
    """Sums over this process's tokens; see `AgreementSums`."""

    loss: Tensor
    alpha_K: Tensor
    match_K: Tensor
    count_K: Tensor
    quality_kl: Tensor
    """KL of the adapted target from the original, in nats; zero for a frozen target."""

    def plus(self, before: "StepSums | None") -> "StepSums":
        """Return these sums plus those of earlier batches; None stands for no earlier batch."""
        return self if before is None else StepSums(*(a + b for a, b in zip(before, self, strict=True)))


@dataclass(frozen=True)
class Last:
    """Means of the last step over all processes, so that a step does not depend on how its batch is divided."""

    alpha: list[float] | None = None
    """By draft position; None before the first step."""
    quality_kl: float = 0.0
    """KL of the adapted target from the original, in nats per token."""


class AgreementStep(nn.Module):
    """Maps a batch to sums over this process's tokens. Its parameters are the drafter's only."""

    def __init__(
        self,
        drafter: TrainableDrafter,
        objective: Objective,
        teacher: Teacher,
        *,
        part: SequencePart | None = None,
        clock: PartClock | None = None,
    ) -> None:
        """`part`: see `TeacherSignals`. `clock`: measures the parts of the forward pass."""
        super().__init__()
        self.drafter = drafter
        self._objective, self._part = objective, part
        # In a tuple, so that the frozen target is not registered as a submodule to train, wrap or save.
        self._teacher = (teacher,)
        self.clock = PartClock(torch.device("cpu"), PARTS) if clock is None else clock

    def forward(self, batch: Batch, done: float, last: Last) -> StepSums:
        """`done`: the share of the run's steps that have been taken."""
        teacher = self._teacher[0]
        signals = teacher.signals(batch)
        if self._part is not None:
            signals = replace(signals, part=self._part)
        self.clock.end("teacher")
        unrolled = self.drafter.unroll(signals)
        self.clock.end("drafter")
        sums = self._objective(unrolled, signals, teacher.lm_head, last.alpha)
        self.clock.end("objective")
        return StepSums(sums.loss, sums.alpha_K, sums.match_K, sums.count_K, sums.loss.detach() * 0)


RAMP = 0.2
"""Share of a run's steps, after the warm-up, in which the weight of the drafter's loss for adapters rises."""


class CotrainStep(AgreementStep):
    """Train the drafter alone, then drafter and adapters with the drafter's loss and the KL to the original target.

    The gradient of the drafter's loss with respect to the adapters is weighted: the weight rises over the ramp
    (Medusa-2), and falls to zero as the last step's KL nears the bound, so that the adapters stay within the bound.
    """

    def __init__(
        self,
        drafter: TrainableDrafter,
        objective: Objective,
        teacher: OnlineTeacher,
        adapters: Adapters,
        settings: CotrainSection,
        *,
        clock: PartClock | None = None,
    ) -> None:
        super().__init__(drafter, objective, teacher, clock=clock)
        self.adapters = nn.ParameterList(adapters.parameters.values())
        self._settings, self._online = settings, (teacher,)

    def forward(self, batch: Batch, done: float, last: Last) -> StepSums:
        settings, teacher = self._settings, self._online[0]
        if done < settings.warmup_fraction:
            sums = super().forward(batch, done, last)
            return sums._replace(loss=sums.loss + 0 * sum(weight.sum() for weight in self.adapters))
        with without_lora(teacher.model):
            original_NH = teacher.signals(batch).hidden_BTH[batch.mask_BT]
        signals = teacher.signals(batch, gradient=True)
        self.clock.end("teacher")
        chunk = self._objective.chunk_tokens
        quality = quality_kl(teacher.lm_head, original_NH, signals.hidden_BTH[batch.mask_BT], chunk)
        self.clock.end("objective")
        ramp = min(1.0, (done - settings.warmup_fraction) / RAMP)
        room = max(0.0, 1 - last.quality_kl / settings.max_quality_kl)
        weight = settings.drafter_weight * ramp * room
        read = replace(
            signals,
            hidden_BTH=_scaled_gradient(signals.hidden_BTH, weight),
            features_BTF=None if signals.features_BTF is None else _scaled_gradient(signals.features_BTF, weight),
        )
        # Adapters get gradients through the drafter's inputs only: p is constant, and the drafter follows it.
        known = replace(signals, hidden_BTH=signals.hidden_BTH.detach())
        unrolled = self.drafter.unroll(read)
        self.clock.end("drafter")
        sums = self._objective(unrolled, known, teacher.lm_head, last.alpha)
        self.clock.end("objective")
        loss = sums.loss + quality
        return StepSums(loss, sums.alpha_K, sums.match_K, sums.count_K, quality.detach())


def _scaled_gradient(states: Tensor, weight: float) -> Tensor:
    """Return `states` with a gradient scaled by `weight`: the drafter learns at its full rate, the adapters less."""
    fixed = states.detach()
    return fixed + weight * (states - fixed)


def autocast(settings: TrainSection, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward pass in the recipe's precision: bf16 products of float32 weights, or nothing."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision(settings) == "bf16")


def precision(settings: TrainSection) -> str:
    """Return 'bf16' or 'no'; 'auto' depends on the machine."""
    if settings.mixed_precision != "auto":
        return settings.mixed_precision
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return "bf16" if bf16_is_fast(device) else "no"


def sequence_part(count: int, accelerator: Accelerator) -> SequencePart | None:
    """Return this process's part of each text; None where every process trains on texts of its own.

    `count`: the processes that share a text.
    """
    if count == 1:
        return None
    shape = (accelerator.num_processes // count, count)
    mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("texts", "parts"))
    return SequencePart(accelerator.process_index % count, count, mesh["parts"].get_group())


def make_step(
    recipe: Recipe,
    target: PreTrainedModel,
    drafter: TrainableDrafter,
    teacher: Teacher,
    *,
    sizes: Sizes | None = None,
    part: SequencePart | None = None,
    clock: PartClock | None = None,
) -> tuple[AgreementStep, Optimizers, Adapters | None]:
    """Return the step module, its optimizers, and the adapters on the target where the recipe trains them too.

    Args:
        sizes: see `Trained`.
        part: see `TeacherSignals`.
        clock: measures the parts of the forward pass.
    """
    settings, cotrain = recipe.train, recipe.cotrain
    objective = Objective(**recipe.objective_options(recipe.draft_length(drafter.max_draft_length)))
    if settings.activation_checkpointing:
        recompute_activations(drafter.trained_blocks())
    trained = Trained.of(
        drafter,
        sizes=sizes or {},
        weight_decay=settings.weight_decay,
        dtype=torch.bfloat16 if precision(settings) == "bf16" else torch.float32,
    )
    optimizers = OPTIMIZERS[settings.optimizer](trained)
    if cotrain is None:
        return AgreementStep(drafter, objective, teacher, part=part, clock=clock), optimizers, None
    torch.manual_seed(settings.seed)
    adapters = Adapters.on(target, rank=cotrain.lora_rank, modules=cotrain.modules)
    if settings.activation_checkpointing:
        recompute_activations(layers_of(target))
    assert isinstance(teacher, OnlineTeacher), "the recipe refuses other teachers with cotrain"
    step = CotrainStep(drafter, objective, teacher, adapters, cotrain, clock=clock)
    return step, [*optimizers, adapters_optimizer(step.adapters, cotrain.learning_rate_ratio)], adapters


def compile_drafter(drafter: TrainableDrafter) -> None:
    """Compile each block of the drafter when it first runs, for any batch size and length."""
    if drafter.language_model is not None:
        read_flat(drafter.language_model, False)  # a flat row would be compiled for each combination of lengths
    for block in drafter.trained_blocks():
        block.compile(dynamic=True)
