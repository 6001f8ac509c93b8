"""A run's models, batch and step on tensors that have shapes but no data: what it would do, without doing it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig

from draftsmith.distill.targets import DTYPES
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.errors import DraftsmithError
from draftsmith.heads import HEADS, TrainableDrafter
from draftsmith.heads.draft_model import pretrained_config
from draftsmith.heads.drafter import TeacherSignals
from draftsmith.heads.vocabulary import checked_size
from draftsmith.train.assembly import step_and_optimizers
from draftsmith.train.batches import Batch
from draftsmith.train.drafters import check_target
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
