"""A run's models, batch and step on tensors that have shapes but no data: what it would do, without doing it.

Counting the bytes of all tensors that are alive, on tensors with data or without.

Counting the floating-point operations of products of matrices, on tensors with data or without.
"""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig

from draftsmith.distill.load_target import DTYPES
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.errors import DraftsmithError
from draftsmith.heads import HEADS, TrainableDrafter
from draftsmith.heads.base import TeacherSignals
from draftsmith.heads.draft_model import pretrained_config
from draftsmith.heads.draft_vocab import checked_size
from draftsmith.train.builders import check_target, step_and_optimizers
from draftsmith.train.data import Batch
from draftsmith.train.recipe import Recipe
from draftsmith.train.step import Last

LIKELIEST = 20
"""Known tokens a place that are reckoned with where the teacher is a file."""

# Shapes: B sequences, T positions, S positions of the source, H hidden size, F features, E known tokens.


def require_plain(config: PreTrainedConfig) -> None:
    """DraftsmithError for a quantised target, which cannot be built from its config alone."""
    if getattr(config, "quantization_config", None) is not None:
        raise DraftsmithError("target is quantised; expected one whose weights are plain numbers")


def marked_share(recipe: Recipe, config: PreTrainedConfig) -> float:
    """The share of a batch's positions that is trained, in samples as long as the recipe allows, packed or not."""
    prompt, response = recipe.data.prompt_tokens, recipe.data.response_tokens
    return 1.0 if config.is_encoder_decoder else response / (prompt + response)


def target_of(recipe: Recipe, config: PreTrainedConfig) -> nn.Module:
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return auto.from_config(config, dtype=DTYPES[recipe.target.dtype]).eval().requires_grad_(False)


@dataclass
class DryStep:
    """What `without_data` of live_bytes.py lets a process do in a step."""

    drafter: TrainableDrafter
    module: nn.Module
    optimizers: list[torch.optim.Optimizer]
    batch: Callable[[], Batch]
    device: str
    bf16: bool

    def run(self) -> None:
        """A step of one part."""
        self.part()
        self.update()

    def part(self) -> None:
        """Forward and backward pass over a process's share of one accumulation step."""
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.bf16):
            loss = self.module(self.batch(), 1.0, Last([0.5] * 64))[0]
        loss.backward()

    def update(self) -> None:
        """The optimizers' step, once behind all parts."""
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def dry_step(recipe: Recipe, target: nn.Module, *, device: str, processes: int, bf16: bool) -> DryStep:
    """A step over sequences as long as the recipe allows. ConfigError for a drafter that does not fit the target."""
    drafter = _drafter(recipe, target)
    check_target(recipe, target, drafter)
    step, optimizers, _ = step_and_optimizers(recipe, target, drafter, _teacher(recipe, target, drafter))
    step.train()
    return DryStep(drafter, step, optimizers, partial(_batch, recipe, target.config, processes), device, bf16)


def sequence_length(recipe: Recipe) -> int:
    """Of the longest row."""
    data = recipe.data
    sample = data.prompt_tokens + data.response_tokens  # one that is longer than packed rows has a row of its own
    return max(sample, data.pack_tokens or 0) if data.pack else sample


def _drafter(recipe: Recipe, target: nn.Module) -> TrainableDrafter:
    options = recipe.drafter_options()
    if options.get("model") is not None:  # its shapes are enough
        options |= {"model": None, "config": pretrained_config(options["model"])}
    size = checked_size(recipe.draft_vocab_size, target.get_output_embeddings().weight.shape[0])
    if size is not None:
        options["draft_vocabulary"] = list(range(size))
    drafter = HEADS[recipe.drafter.type].from_target(target, **options)
    drafter.attach(target)
    return drafter


def _batch(recipe: Recipe, config: PreTrainedConfig, processes: int) -> Batch:
    """The longest that a process may see at once."""
    rows = max(1, recipe.train.batch_size // (processes * recipe.train.gradient_accumulation))
    if config.is_encoder_decoder:
        source_BS = torch.zeros(rows, recipe.data.prompt_tokens, dtype=torch.long)
        ids_BT = torch.zeros(rows, recipe.data.response_tokens + 1, dtype=torch.long)
        more = {"source_BS": source_BS, "source_mask_BS": torch.ones_like(source_BS)}
    else:
        ids_BT = torch.zeros(rows, sequence_length(recipe), dtype=torch.long)
        more = {"documents_BT": torch.zeros_like(ids_BT)} if recipe.data.pack else {}
    return Batch(ids_BT, torch.ones_like(ids_BT), torch.ones_like(ids_BT).bool(), rows=list(range(rows)), **more)


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


ATEN = torch.ops.aten


@contextmanager
def without_data(device: torch.device | str, marked_share: float = 1.0) -> Iterator["LiveBytes"]:
    """Everything that is made inside has shapes on `device` and no data; its bytes are counted."""
    with (
        FakeTensorMode(),
        LiveBytes(marked_share) as live,
        torch.device(device),
        patch.object(nn.Module, "_apply", _replace_parameters),
    ):
        yield live


def _replace_parameters(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply` exchanges the insides of two tensors, which those without data refuse."""
    for child in module.children() if recurse else ():
        _replace_parameters(child, change)
    with torch.no_grad():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(change(parameter), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = change(buffer)
    return module


class LiveBytes(TorchDispatchMode):
    """While it is entered: `now` and `peak` bytes of the storages that operations have made and that still live.

    Under torch's FakeTensorMode nothing has data, so what depends on data is answered by rule: a mask picks
    `marked_share` of its positions, and a number that is asked for is 0, or False. What a kernel holds while it runs
    is not seen, nor is what an allocator keeps for later.
    """

    def __init__(self, marked_share: float = 1.0) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._marked_share = marked_share
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        result = self._without_data(operation, arguments, options or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _without_data(self, operation: Any, arguments: tuple, options: dict) -> Any:
        first = arguments[0] if arguments else None
        fake = hasattr(first, "fake_mode")
        if fake and operation is ATEN.nonzero.default:
            return first.new_empty((self._marked(first), first.dim()), dtype=torch.long)
        if fake and operation is ATEN.index.Tensor and arguments[1][0] is not None:
            mask, *others = arguments[1]
            if mask.dtype == torch.bool and not others:
                return first.new_empty((self._marked(mask), *first.shape[mask.dim() :]))
        try:
            return operation(*arguments, **options)
        except DataDependentOutputException:
            if operation is ATEN.equal.default:
                return True
            return False if first.dtype == torch.bool else 0.0 if first.is_floating_point() else 0

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


ATEN = torch.ops.aten


class Operations(TorchDispatchMode):
    """While it is entered, `total` grows by two for every multiplication with an addition.

    torch's FlopCounterMode cannot follow gradients that are taken in a forward pass, as objectives here take them, and
    does not know attention as it is computed on a CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        result = operation(*arguments, **(options or {}))
        kind = operation._overloadpacket
        if kind is ATEN._scaled_dot_product_flash_attention_for_cpu:
            self.total += sdpa_flop_count(*_every_head(arguments[:3]))
        elif kind is ATEN._scaled_dot_product_flash_attention_for_cpu_backward:
            self.total += sdpa_backward_flop_count(*_every_head(arguments[:4]))
        elif kind in flop_registry:
            self.total += flop_registry[kind](*arguments, **(options or {}), out_val=result)
        return result


def _every_head(tensors: tuple) -> list[tuple[int, ...]]:
    """Return the shapes [B, heads, T, d] with the query's heads throughout: torch 2.11 counts no shared keys."""
    heads = max(tensor.shape[1] for tensor in tensors)
    return [(tensor.shape[0], heads, *tensor.shape[2:]) for tensor in tensors]
