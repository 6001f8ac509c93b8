"""Hidden states of transformers models: final states, outputs of chosen layers, packed documents.

Rows may hold several documents one after the other:

documents_BT   0 0 0 1 1 2 2 2        positions   0 1 2 0 1 0 1 2
"""

import hashlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from draftsmith.errors import ConfigError
from draftsmith.heads.base import FINAL
from draftsmith.heads.flat_rows import as_rows, flat_rows
from draftsmith.heads.lm_head import logits_map
from draftsmith.heads.model_config import QueryScales, has_data, is_dynamic, rotary_switch, text_config, uncompiled
from draftsmith.provenance import fingerprint

ProcessorInputs = Mapping[str, Tensor]
"""Tensors of a processor besides token ids, for one prompt, a batch of one: pixels, sizes of images, kinds of tokens.

A target reads them with its prompt; all tokens after the prompt are text. Audio has such tensors, too.
"""

# Shapes: B rows, T positions.


def document_numbers(lengths: Sequence[Sequence[int]], width: int) -> Tensor:
    """Return the document of each position [B, T], for rows whose documents have these lengths.

    Rows are padded on the right to `width`. The padding is one more document, so no token attends to it.
    """
    rows = []
    for row in lengths:
        padding = width - sum(row)
        assert padding >= 0, f"documents of {sum(row)} tokens in a row of {width}"
        rows.append(torch.arange(len(row) + 1).repeat_interleave(torch.tensor([*row, padding])))
    return torch.stack(rows)


def document_positions(documents_BT: Tensor) -> Tensor:
    """Return positions [B, T] that restart at 0 in each document."""
    places_BT = torch.arange(documents_BT.shape[1], device=documents_BT.device).expand_as(documents_BT)
    first_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    first_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return places_BT - places_BT.where(first_BT, 0).cummax(1).values


def positions_like(ids_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
    """Return positions [B, T] inside documents, or [1, T] where every row is one document."""
    if documents_BT is None:
        return torch.arange(ids_BT.shape[1], device=ids_BT.device)[None]
    return document_positions(documents_BT)


# Shapes: B sequences, T positions, S positions of the source, H hidden size, X any states.


class SequencesApart:
    """The sequences of a batch in groups whose rotary frequencies are those that each sequence has alone.

    Where frequencies depend on the longest sequence of a pass (longrope, dynamic), sequences on both sides of
    `rotary_switch` are read apart, those beyond it of dynamic scaling by length; so are short sequences from padding
    beyond it.

    Args:
        sequences: row, start and end of each sequence or packed document.
    """

    def __init__(self, model: PreTrainedModel, shape: torch.Size, sequences: list[tuple[int, int, int]]) -> None:
        self._model, self._shape, self._groups = model, shape, dict[int, list[tuple[int, int, int]]]()
        switch = rotary_switch(model.config)
        assert switch is not None, "see `sequences_apart`"
        dynamic = is_dynamic(model.config)
        for row, start, end in sequences:
            side = max(switch, end - start) if dynamic else int(end - start > switch)
            self._groups.setdefault(side, []).append((row, start, end))

    def batches(self, input_ids_BT: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield tokens and mask of each group's sequences, padded on the right."""
        for sequences in self._groups.values():
            ids = [input_ids_BT[row, start:end] for row, start, end in sequences]
            _forget_lengths(self._model)
            yield pad_sequence(ids, True), pad_sequence([torch.ones_like(each) for each in ids], True)
        _forget_lengths(self._model)

    def rows(self, states: Sequence[Tensor]) -> Tensor:
        """Return states [B, T, X] in their rows, zero at padding, from those of `batches`."""
        rows_BTX = states[0].new_zeros(*self._shape, states[0].shape[-1])
        for sequences, states_bTX in zip(self._groups.values(), states, strict=True):
            for index, (row, start, end) in enumerate(sequences):
                rows_BTX[row, start:end] = states_bTX[index, : end - start]
        return rows_BTX


def sequences_apart(
    model: PreTrainedModel, attention_mask_BT: Tensor, documents_BT: Tensor | None = None
) -> SequencesApart | None:
    """Return the groups of sequences that are read apart; None where one pass gives each its own frequencies."""
    switch, shape = rotary_switch(model.config), attention_mask_BT.shape
    if switch is None or shape[1] <= switch or not has_data(attention_mask_BT):
        return None
    sequences = []
    documents = torch.zeros_like(attention_mask_BT) if documents_BT is None else documents_BT
    for row, (length, numbered) in enumerate(zip(attention_mask_BT.sum(1).tolist(), documents.tolist(), strict=True)):
        start = 0
        for _, same in groupby(numbered[:length]):
            end = start + len(list(same))
            sequences.append((row, start, end))
            start = end
    return SequencesApart(model, shape, sequences)


def _forget_lengths(model: PreTrainedModel) -> None:
    """Let dynamic frequencies be those of the next pass alone: transformers keeps those of the longest one so far."""
    rotary: Any
    for rotary in model.modules() if is_dynamic(model.config) else ():
        if hasattr(rotary, "max_seq_len_cached") and hasattr(rotary, "original_inv_freq"):
            rotary.max_seq_len_cached = rotary.original_max_seq_len
            rotary.inv_freq = rotary.original_inv_freq.to(rotary.inv_freq.device)


def final_states(
    model: PreTrainedModel,
    input_ids_BT: Tensor,
    attention_mask_BT: Tensor,
    source_BS: Tensor | None = None,
    source_mask_BS: Tensor | None = None,
    documents_BT: Tensor | None = None,
    inputs: ProcessorInputs | None = None,
    *,
    divides: bool = True,
) -> Tensor:
    """Return the model's final hidden states [B, T, H], the input of its lm_head.

    Rows are padded on the right, where states are undefined; models that fit read them without padding, see
    `FlatRows`. An encoder-decoder model reads the source in its encoder and the input ids in its decoder.

    `documents_BT`: see `TeacherSignals`. Not every model separates documents, see `require_packable`. `inputs`: the
    processor's tensors of one sequence, extended to its length. `divides`: `sequences_apart` may divide the batch.
    """
    divides = divides and not inputs and source_BS is None
    apart = sequences_apart(model, attention_mask_BT, documents_BT) if divides else None
    if apart is not None:
        return apart.rows([final_states(model, *part, divides=False) for part in apart.batches(input_ids_BT)])
    flat = None if inputs or source_BS is not None else flat_rows(model, attention_mask_BT, documents_BT)
    if flat is not None:
        arguments = flat.arguments(input_ids_BT)
    elif documents_BT is not None:
        arguments = _packed(model, input_ids_BT, attention_mask_BT, documents_BT)
    elif source_BS is None:  # no token sees the padding after it; with a mask, attention would need a dense one
        arguments = {"input_ids": input_ids_BT, **(inputs or {})}
    else:
        source_mask_BS = torch.ones_like(source_BS) if source_mask_BS is None else source_mask_BS
        arguments = {"input_ids": source_BS, "attention_mask": source_mask_BS, "decoder_input_ids": input_ids_BT}
    # The operations before the lm_head differ (T5 and MiniCPM3 scale), so a hook records its input.
    read: list[Tensor] = []

    def record(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        read.append(as_rows(arguments[0]))
        return (arguments[0][:, :0], *arguments[1:])  # no logits are read

    lm_head = model.get_output_embeddings()
    assert lm_head is not None, "a model without an lm_head is refused when its logits are measured"
    handle = lm_head.register_forward_pre_hook(record)
    try:
        with uncompiled(model), nullcontext() if flat is None else flat.reading():
            model(**arguments, use_cache=False)
    finally:
        handle.remove()
    return read[0]


def _packed(
    model: PreTrainedModel, input_ids_BT: Tensor, attention_mask_BT: Tensor, documents_BT: Tensor
) -> dict[str, Tensor]:
    """Return the inputs of packed rows.

    transformers separates documents by positions that restart, but only without an attention mask and a cache.
    """
    if model.config.is_encoder_decoder:
        raise ConfigError(
            f"data.pack=True with an encoder-decoder model (model_type={model.config.model_type!r}); "
            "expected data.pack=false"
        )
    if QueryScales(model):
        raise ConfigError(
            f"data.pack=True with model_type={model.config.model_type!r}, which scales queries by position in the row; "
            "expected attn_implementation=sdpa, or data.pack=false"
        )
    # Padding stays at position 0: no token attends to it, and it needs no more learned positions than the text.
    return {"input_ids": input_ids_BT, "position_ids": document_positions(documents_BT) * attention_mask_BT}


def layers_name(model: PreTrainedModel) -> str:
    """Return the module name of a decoder-only model's list of layers."""
    return layer_lists(model)[0]


def layer_lists(model: PreTrainedModel) -> list[str]:
    """Return the module names of a model's lists of layers: one, or the encoder's and the decoder's."""
    depth = text_config(model).num_hidden_layers
    lists = {f"{name}.": module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outermost = [name for name in lists if not any(name.startswith(other) for other in lists if other != name)]
    names = [name.removesuffix(".") for name in outermost if len(lists[name]) == depth]
    wanted = 2 if model.config.is_encoder_decoder else 1
    if wanted == 1:  # the part that reads images may have as many layers
        decoder = model.get_decoder()
        prefix = next((name for name, module in model.named_modules() if module is decoder), "")
        names = [name for name in names if name.startswith(prefix)] or names
        names.sort(key=lambda name: name.count("."))  # an encoder of images inside the decoder (GIT) lies deeper
    if len(names) < wanted:
        raise ConfigError(
            f"model {type(model).__name__} has no list of {depth} layers to copy from; expected init='random'"
        )
    return names[:wanted]


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of a transformers model."""
    return [layer for name in layer_lists(model) for layer in model.get_submodule(name).children()]


def text_weights(target: PreTrainedModel, model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the target's weights; of a vision-language target those of its language model, as `model` names them."""
    weights = target.state_dict()
    if target.config.is_encoder_decoder or text_config(target) is target.config:
        return weights
    decoder, own = target.get_decoder(), f"{model.base_model_prefix}."
    prefix = next(f"{name}." for name, module in target.named_modules() if module is decoder)
    text = {own + name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    return {**text, **{name: value for name, value in weights.items() if name.startswith("lm_head.")}}


# Shapes: B rows, Q tokens read, F size of the features per position.


class Features:
    """Store the outputs of chosen layers at each forward pass, by hooks that are removed with this object.

    Args:
        layers: see `Needs.layers`.
    """

    def __init__(self, model: PreTrainedModel, layers: tuple[int, ...]) -> None:
        self._layers = layers
        self._seen: dict[int, Tensor] = {}
        for layer, watched in feature_modules(model, layers).items():
            weakref.finalize(self, watched.register(watched.hook(self._seen, layer)).remove)

    def take(self) -> Tensor:
        """Return the features [B, Q, F] of the last pass, the layers concatenated in the requested order."""
        return torch.cat([self._seen[layer] for layer in self._layers], -1)


class Watched(NamedTuple):
    """A module whose hidden states are kept: its output, times `scale`, or with `before` its input."""

    module: nn.Module
    before: bool = False
    scale: float = 1.0

    def hook(self, seen: dict[int, Tensor], layer: int) -> Callable[..., None]:
        """Return a hook that stores the states in `seen[layer]`."""
        return _keeping_input(seen, layer) if self.before else _keeping(seen, layer, self.scale)

    def register(self, hook: Callable[..., None]) -> RemovableHandle:
        """Add a hook to the module."""
        module = self.module
        return module.register_forward_pre_hook(hook) if self.before else module.register_forward_hook(hook)


def feature_modules(model: PreTrainedModel, layers: tuple[int, ...]) -> dict[int, Watched]:
    """Return the modules whose outputs are the features of `layers`; ConfigError for layers that the model lacks."""
    require_layers(model, layers)
    blocks = layers_name(model) if set(layers) - {FINAL} else ""
    return {
        layer: Watched(model.base_model, scale=_final_scale(model))
        if layer == FINAL
        else Watched(model.get_submodule(f"{blocks}.{layer - 1}"))
        for layer in layers
    }


def _final_scale(model: PreTrainedModel) -> float:
    """Return the factor that makes the base model's output the input of the lm_head; ConfigError if there is none."""
    scale = logits_map(model).state_scale
    if scale is None:
        raise ConfigError(
            f"model {type(model).__name__}: the input of the lm_head is no multiple of the base model's output; "
            "expected a drafter that does not predict this input from its own, such as 'medusa' or 'eagle3'"
        )
    return scale


def _keeping_input(seen: dict[int, Tensor], layer: int) -> Callable[..., None]:
    """Return a forward pre-hook that stores a module's input in `seen[layer]`."""

    def keep(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        seen[layer] = as_rows(arguments[0])

    return keep


def _keeping(seen: dict[int, Tensor], layer: int, scale: float) -> Callable[..., None]:
    """Return a forward hook that stores a module's hidden states, times `scale`, in `seen[layer]`."""

    def keep(_: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        state = getattr(output, "last_hidden_state", output)
        state = state[0] if isinstance(state, tuple | list) else state
        seen[layer] = as_rows(state if scale == 1 else state * scale)

    return keep


def require_layers(model: PreTrainedModel, layers: tuple[int, ...]) -> None:
    """Raise ConfigError unless `model` is decoder-only and has these layers."""
    if not layers:
        return
    if model.config.is_encoder_decoder:
        raise ConfigError(f"model_type={model.config.model_type!r}; expected a decoder-only target for these features")
    depth = text_config(model).num_hidden_layers
    if not all(type(layer) is int and (layer == FINAL or 1 <= layer <= depth) for layer in layers):
        raise ConfigError.of("drafter layers", list(layers), f"1 to {depth}, which is what the target has")
    if set(layers) != {FINAL}:
        _require_one_stream(model)


def _require_one_stream(model: PreTrainedModel) -> None:
    """Raise ConfigError for a target whose layers return several hidden states of each token."""
    config = text_config(model)
    for name in ("altup_num_inputs", "hc_mult", "hc_count"):
        if (count := getattr(config, name, None) or 1) > 1:
            raise ConfigError(
                f"model_type={config.model_type!r} has {count} streams of hidden states between its layers ({name}); "
                "expected a drafter that reads the last state only, such as 'medusa', 'eagle' or 'mtp'"
            )


# Shapes: T tokens of the prompt, A axes of positions.

_OF_TEXT = ("input_ids", "attention_mask")
_OF_RUNS = ("inputs_embeds", "position_ids", "cache", "past_key_values", "labels", "logits_to_keep", "use_cache")


def inputs_for(model: PreTrainedModel, given: ProcessorInputs) -> dict[str, Tensor]:
    """Return the tensors on the device and in the dtype of `model`, without token ids and their mask.

    Raises:
        ConfigError: for a tensor that the model's forward pass does not take.
    """
    accepted = inspect.signature(model.forward).parameters
    parameter, placed = next(model.parameters()), {}
    for name, value in given.items():
        if name in _OF_TEXT:
            continue
        if name not in accepted or name in _OF_RUNS or not isinstance(value, Tensor):
            kind = model.config.model_type
            raise ConfigError(f"inputs[{name!r}] with model_type={kind!r}; expected tensors of its own processor")
        dtype = parameter.dtype if value.is_floating_point() else None
        placed[name] = value.to(parameter.device, dtype)
    return placed


def extended(inputs: ProcessorInputs, prompt: int, total: int) -> dict[str, Tensor]:
    """Return the tensors for a text of `total` tokens that begins with the prompt: kinds of tokens are 0 after it."""

    def longer(value: Tensor) -> Tensor:
        by_token = value.shape == (1, prompt) and not value.is_floating_point()
        return nn.functional.pad(value, (0, total - prompt)) if by_token else value

    return {name: longer(value) for name, value in inputs.items()}


def prompt_positions(model: PreTrainedModel, ids_1T: Tensor, inputs: ProcessorInputs) -> tuple[Tensor | None, int]:
    """Return positions [A, 1, T] of a prompt's tokens, and the shift of the text after it.

    Models with several axes of positions (M-RoPE; Qwen2-VL, arXiv:2409.12191, section 2.1) give the tokens of an image
    fewer positions than tokens. The position of a token after the prompt is its index plus the shift. (None, 0) for
    models whose positions are indices.
    """
    locate = getattr(model.base_model, "get_rope_index", None)
    if locate is None or not inputs:
        return None, 0
    accepted = inspect.signature(locate).parameters
    given = {"attention_mask": torch.ones_like(ids_1T), **inputs}
    arguments = {name: value for name, value in given.items() if name in accepted}
    positions_A1T, shift_11 = locate(input_ids=ids_1T, **arguments)
    return positions_A1T, int(shift_11)


def inputs_fingerprint(inputs: ProcessorInputs | None) -> str | None:
    """Return a fingerprint of the tensors' names and values."""
    if not inputs:
        return None
    contents = {name: value.flatten().view(torch.uint8).numpy().tobytes() for name, value in inputs.items()}
    return fingerprint({name: hashlib.sha256(content).hexdigest() for name, content in contents.items()})
