"""A run's models, batch and step on torch's fake tensors, which have shapes and no data.

`LiveBytes` counts the bytes of live tensors, and `Operations` the floating-point operations of matrix products; both
also work on tensors with data.
"""

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from transformers import AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from draftsmith.distill.teacher import Batch, OnlineTeacher, TargetHead, stored_layers
from draftsmith.errors import DraftsmithError
from draftsmith.heads import TrainableDrafter
from draftsmith.heads.base import TeacherSignals
from draftsmith.heads.configs import is_named
from draftsmith.heads.sequence_part import SequencePart
from draftsmith.train.models import check_target, new_drafter, stored_drafter, target_of
from draftsmith.train.recipe import Recipe
from draftsmith.train.step import Last, Teacher, make_step

# Shapes: B sequences, T positions, S positions of the source, H hidden size, V vocabulary, F features.


def require_plain(config: PreTrainedConfig) -> None:
    """Raise DraftsmithError for a quantised target, which cannot be built from its config alone."""
    if getattr(config, "quantization_config", None) is not None:
        raise DraftsmithError("target is quantised; expected one whose weights are plain numbers")


def marked_share(recipe: Recipe, config: PreTrainedConfig) -> float:
    """Return the trained share of a batch's positions, in samples as long as the recipe allows, packed or not."""
    prompt, response = recipe.data.prompt_tokens, recipe.data.response_tokens
    return 1.0 if config.is_encoder_decoder or recipe.data.prompts_trained else response / (prompt + response)


@dataclass
class DryStep:
    """A step of one process, to be run inside `without_data`."""

    drafter: TrainableDrafter
    module: nn.Module
    optimizers: list[torch.optim.Optimizer]
    batch: Callable[[], Batch]
    device: str
    bf16: bool
    keeps_gradients: bool = False
    """Whether the gradients' memory is kept between steps, as DDP's buckets are."""

    def run(self) -> None:
        """Take a step with a single accumulation step."""
        self.part()
        self.update()

    def first_update(self) -> None:
        """Step the optimizers with gradients of zero, which creates their state as the first step does."""
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        self.update()

    def part(self) -> None:
        """Run forward and backward pass over a process's share of one accumulation step."""
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.bf16):
            loss = self.module(self.batch(), 1.0, Last([0.5] * 64))[0]
        loss.backward()

    def update(self) -> None:
        """Step the optimizers, once after all accumulation steps."""
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=not self.keeps_gradients)


def starting_point(recipe: Recipe, config: PreTrainedConfig) -> TrainableDrafter | None:
    """Return the drafter that `start_from` names, to be read before `without_data`; None without one."""
    named = recipe.start_from is None or is_named(recipe.start_from)
    return None if named else stored_drafter(recipe, config)


def served_layers(recipe: Recipe, config: PreTrainedConfig) -> list[int]:
    """Return the layers that the engine of a recipe's teacher returns: those of the drafter, and the last one."""
    start = starting_point(recipe, config)
    with without_data(recipe, config, "cpu", 1):
        drafter = start or new_drafter(recipe, target_of(recipe, config), from_files=False)
    return sorted({*stored_layers(drafter.needs.layers), config.get_text_config(decoder=True).num_hidden_layers})


def dry_step(
    recipe: Recipe,
    target: PreTrainedModel,
    start: TrainableDrafter | None = None,
    *,
    device: str,
    processes: int,
    bf16: bool,
) -> DryStep:
    """Build a step over sequences as long as the recipe allows; ConfigError for a drafter that does not fit.

    `start`: see `starting_point`.
    """
    if start is None:
        drafter = new_drafter(recipe, target, from_files=False)
    else:
        drafter = type(start).from_config(start.config())
        drafter.shared_vocabulary = start.shared_vocabulary
        drafter.train_further(**recipe.drafter_options())
    drafter.attach(target)
    check_target(recipe, target, drafter)
    count = recipe.train.sequence_parallel
    part = SequencePart(count - 1, count) if count > 1 else None
    step, optimizers, _ = make_step(recipe, target, drafter, _teacher(recipe, target, drafter), part=part)
    step.train()
    return DryStep(drafter, step, optimizers, partial(largest_batch, recipe, target.config, processes), device, bf16)


def sequence_length(recipe: Recipe) -> int:
    """Return the number of tokens of the longest row."""
    return recipe.data.prompt_tokens + recipe.data.response_tokens


def batch_shape(recipe: Recipe, config: PreTrainedConfig, processes: int) -> tuple[int, int]:
    """Return rows and positions of the largest batch of a process in one accumulation step."""
    shares = processes // recipe.train.sequence_parallel * recipe.train.gradient_accumulation
    rows = max(1, recipe.train.batch_size // max(1, shares))
    return rows, recipe.data.response_tokens + 1 if config.is_encoder_decoder else sequence_length(recipe)


def largest_batch(recipe: Recipe, config: PreTrainedConfig, processes: int) -> Batch:
    """Return the largest batch of a process; with packing, every row is one document."""
    ids_BT = torch.zeros(batch_shape(recipe, config, processes), dtype=torch.long)
    mask_BT = torch.ones_like(ids_BT)
    source_BS = source_mask_BS = None
    if config.is_encoder_decoder:
        source_BS = torch.zeros(len(ids_BT), recipe.data.prompt_tokens, dtype=torch.long)
        source_mask_BS = torch.ones_like(source_BS)
    return Batch(ids_BT, mask_BT, mask_BT.bool(), source_BS, source_mask_BS, list(range(len(ids_BT))))


def _teacher(recipe: Recipe, target: PreTrainedModel, drafter: TrainableDrafter) -> Teacher:
    if recipe.teacher.kind == "online":
        return OnlineTeacher(target, drafter.needs.layers)
    normalizers = recipe.teacher.kind == "cached" and drafter.draft_vocabulary is not None
    return _StoredTeacher(OnlineTeacher(target).lm_head, len(drafter.needs.layers), normalizers)


class _StoredTeacher:
    """Stands for a teacher that reads its signals from files, so that the target does not run."""

    def __init__(self, lm_head: TargetHead, layers: int, normalizers: bool) -> None:
        self.lm_head, self._layers, self._normalizers = lm_head, layers, normalizers

    def signals(self, batch: Batch) -> TeacherSignals:
        weight_VH, shape, hidden = self.lm_head.weight, batch.input_ids_BT.shape, self.lm_head.weight.shape[1]
        features_BTF = weight_VH.new_empty(*shape, self._layers * hidden) if self._layers else None
        return TeacherSignals(
            batch.input_ids_BT,
            batch.attention_mask_BT,
            weight_VH.new_empty(*shape, hidden),
            batch.mask_BT,
            features_BTF,
            documents_BT=batch.documents_BT,
            log_sum_BT=weight_VH.new_empty(shape, dtype=torch.float64) if self._normalizers else None,
            argmax_BT=weight_VH.new_empty(shape, dtype=torch.long) if self._normalizers else None,
        )


ATEN = torch.ops.aten


@contextmanager
def without_data(
    recipe: Recipe, config: PreTrainedConfig, device: torch.device | str, processes: int
) -> Iterator["LiveBytes"]:
    """Create tensors on `device` without data, and count their bytes, until the context ends."""
    live = LiveBytes(marked_share(recipe, config), math.prod(batch_shape(recipe, config, processes)))
    with FakeTensorMode(allow_non_fake_inputs=True), live, torch.device(device), _masks_without_documents():
        yield live


@contextmanager
def _masks_without_documents() -> Iterator[None]:
    """Let transformers make masks for rows of one text: fake positions do not tell it whether they restart."""
    before = {name: ALL_MASK_ATTENTION_FUNCTIONS[name] for name in ("sdpa", "eager")}

    def of_one_text(make: Callable[..., Tensor | None], **options: Any) -> Tensor | None:
        return make(**{**options, "mask_function": causal_mask_function, "allow_is_causal_skip": True})

    try:
        for name, make in before.items():
            AttentionMaskInterface.register(name, partial(of_one_text, make))
        yield
    finally:
        for name, make in before.items():
            AttentionMaskInterface.register(name, make)


class LiveBytes(TorchDispatchMode):
    """Counts `now` and `peak` bytes of live storages that operations inside the context have created.

    Under torch's FakeTensorMode nothing has data, so operations that depend on data follow a rule: a mask selects
    `marked_share` of its positions (a mask of one dimension all, but no more than that share of the batch's
    `positions`), `bucketize` divides sorted values evenly, and a scalar is 0 or False. Workspace of kernels and memory
    that the allocator keeps are not counted.
    """

    def __init__(self, marked_share: float = 1.0, positions: int = sys.maxsize) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._marked_share = marked_share
        self._most = math.ceil(marked_share * positions)
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        result = self._without_data(operation, arguments, options or {})
        for tensor in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _without_data(self, operation: Any, arguments: tuple, options: dict) -> Any:
        first = arguments[0] if arguments else None
        if not isinstance(first, FakeTensor):
            return operation(*arguments, **options)
        rule = WITHOUT_DATA.get(operation)
        result = NotImplemented if rule is None else rule(self, *arguments, **options)
        if result is not NotImplemented:
            return result
        try:
            return operation(*arguments, **options)
        except DataDependentOutputException:
            if operation is ATEN.equal.default:
                return True
            return False if first.dtype == torch.bool else 0.0 if first.is_floating_point() else 0

    def _nonzero(self, mask: Tensor) -> Tensor:
        count = self._marked(mask) if mask.dim() > 1 else min(mask.numel(), self._most)
        return mask.new_empty((count, mask.dim()), dtype=torch.long)

    def _index(self, values: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
        mask, *others = indices
        if mask is None or mask.dtype != torch.bool or others:
            return NotImplemented
        return values.new_empty((self._marked(mask), *values.shape[mask.dim() :]))

    def _marked(self, mask: Tensor) -> int:
        return math.ceil(self._marked_share * mask.numel())

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += self._sizes[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _even_bounds(edges: int, count: int) -> Tensor:
    """Return a tensor with data: the positions of rising edges among `count` values that lie evenly between them."""
    with unset_fake_temporarily():
        return torch.tensor([count * edge // max(1, edges - 1) for edge in range(edges)], device="cpu")


GROUPED = ATEN._grouped_mm.default


def _grouped_product(arguments: tuple, options: dict) -> tuple[Tensor, float]:
    """Return the result, without values, and the operations of a product of E matrices, such as those of experts.

    Of two dimensions is an operand whose rows or columns are divided among the matrices at the argument `offs`.
    """
    left, right = arguments[0], arguments[1]
    ends_E = arguments[2] if len(arguments) > 2 else options.get("offs")
    rows, shared, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    shape, products = (rows, columns), 1
    if left.dim() == right.dim():  # shared values are divided, or nothing is
        count = len(left) if ends_E is None else len(ends_E)
        shape, products = (count, rows, columns), 1 if left.dim() == 2 else count
    return left.new_empty(shape), 2.0 * products * rows * shared * columns


ATTENTION = {
    getattr(ATEN, f"_scaled_dot_product_{kernel}")
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
}
ATTENTION_BACKWARD = {getattr(ATEN, f"{forward.__name__}_backward") for forward in ATTENTION}


def _detach(live: LiveBytes, x: Tensor) -> Any:
    """Run once more than needed: FakeTensorMode keeps a weak reference to a result that is not in its cache, as it is
    after one call, and nn.Module.to cannot swap a parameter with such a reference."""
    ATEN.detach.default(x)
    return NotImplemented


WITHOUT_DATA: dict[Any, Callable[..., Any]] = {
    torch.ops.prim.device.default: lambda live, x: x.fake_device,  # more than half of all operations
    ATEN.detach.default: _detach,
    # torch's rule for shapes refuses float32, which the kernels compute.
    GROUPED: lambda live, *arguments, **options: _grouped_product(arguments, options)[0],
    ATEN.nonzero.default: LiveBytes._nonzero,
    ATEN.bucketize.Tensor: lambda live, values, edges, **_: _even_bounds(values.numel(), edges.numel()),
    ATEN.index.Tensor: LiveBytes._index,
}
"""Operations on fake tensors whose result needs a rule; one that returns NotImplemented leaves it to FakeTensorMode."""


class Operations(TorchDispatchMode):
    """Counts `total`, two operations for each multiply-add, inside the context.

    torch's FlopCounterMode does not support gradients taken in a forward pass, as objectives here take them, and does
    not count the CPU's attention kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        result = operation(*arguments, **(options or {}))
        kind = operation._overloadpacket
        if operation is GROUPED:
            self.total += _grouped_product(arguments, options or {})[1]
        elif kind in ATTENTION:
            self.total += sdpa_flop_count(*_every_head(arguments[:3]))
        elif kind in ATTENTION_BACKWARD:
            self.total += sdpa_backward_flop_count(*_every_head(arguments[:4]))
        elif kind in flop_registry:
            self.total += flop_registry[kind](*arguments, **(options or {}), out_val=result)
        return result


def _every_head(tensors: tuple) -> list[tuple[int, ...]]:
    """Return the shapes [B, heads, T, d] with the query's heads throughout: torch 2.11 counts no shared keys."""
    heads = max(tensor.shape[1] for tensor in tensors)
    return [(tensor.shape[0], heads, *tensor.shape[2:]) for tensor in tensors]
