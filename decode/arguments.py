"""The decoder's arguments: settings of a call, prompts, which may be lists, arrays or padded tensors, and checks."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import numpy as np
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from draftsmith.decode.passes.capability import Capability, capability_of
from draftsmith.decode.policies import Policy
from draftsmith.decode.rules import Rule
from draftsmith.decode.sampling import require_seed
from draftsmith.decode.sequence import DecodeSequence, Stops, stop_string_criteria
from draftsmith.errors import ConfigError
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.hidden_states import ProcessorInputs
from draftsmith.heads.model_config import decoding_limit, eos_tokens, start_token, token_set

Ids = Tensor | np.ndarray | Sequence
"""Tokens of one prompt or of several, or a mask over them."""
EosTokens = int | Sequence[int] | Tensor | np.ndarray | Literal["model"] | None
NEW_TOKENS = 128
"""Default of `max_new_tokens`."""
_OF_TOKENIZER = ("input_ids", "attention_mask", "token_type_ids")
"""Keys that tokenizers return for a text; all its tokens are of one type."""


class GenerateSettings(TypedDict, total=False):
    """Keyword arguments that `generate` and `generate_batch` share."""

    max_new_tokens: int | None
    """Maximum number of new tokens for each prompt, 128 by default; reduced to the space in the target's context."""
    temperature: float | None
    """Applied to the target and the drafter alike, as `top_k` and `top_p` are; 0, the default, is greedy."""
    top_k: int | None
    top_p: float | None
    eos_token_id: EosTokens
    """Token or tokens that end a sequence; "model", the default: those of the model; None: no token does."""
    logits_processor: Sequence[LogitsProcessor] | None
    """transformers' or custom processors, applied before the temperature at every draft node; each must be a function
    of the tokens before a position and their scores."""
    stopping_criteria: Sequence[StoppingCriteria] | None
    """transformers' or custom criteria, called after every committed token with `scores=None`."""
    stop_strings: str | Sequence[str] | None
    """One string or several: a sequence ends with the token that completes one of them; requires `tokenizer`."""
    tokenizer: PreTrainedTokenizerBase | None


class BatchSettings(GenerateSettings, total=False):
    """Further keyword arguments of `generate_batch`."""

    attention_mask: Ids | None
    """0 or False at padding, on either side."""
    inputs: Sequence[ProcessorInputs | None] | None
    """For each prompt the processor's tensors besides its token ids, such as pixel_values, as a batch of one; None for
    a prompt without images. `input_ids` and `attention_mask` in them are ignored."""
    decoder_input_ids: Ids | None
    """For an encoder-decoder target, the first tokens of each decoder, including its start token; default: the start
    token alone."""
    encoder_states: Sequence[Tensor] | None
    """The encoder's output [T, H] for each sequence, which is then not computed. `input_ids` may then be empty lists,
    unless the drafter has an encoder of its own."""


def require_settings(given: Mapping[str, Any], kind: Any) -> None:
    """Raise TypeError for keyword arguments that a class of settings does not have."""
    if unknown := given.keys() - kind.__annotations__.keys():
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}; expected {', '.join(kind.__annotations__)}")


def sequences_of(
    model: PreTrainedModel, input_ids: Ids | Mapping[str, Any], seeds: Sequence[int] | int, settings: BatchSettings
) -> tuple[list[list[int]], list[DecodeSequence]]:
    """Return the tokens of each prompt, and the sequences to decode."""
    require_settings(settings, BatchSettings)
    states = settings.get("encoder_states")
    rows, paddings = prompt_rows(input_ids, settings.get("attention_mask"), may_be_empty=states is not None)
    prompts, sources = _prompts(model, rows, settings.get("decoder_input_ids"))
    require_known(prompts, model)
    require_known(sources, model)
    strings = stop_string_criteria(settings.get("stop_strings") or (), settings.get("tokenizer"))
    stops = Stops(
        _eos(model, settings.get("eos_token_id", "model")), [*(settings.get("stopping_criteria") or ()), *strings]
    )
    most = settings.get("max_new_tokens")
    sequences = [
        DecodeSequence(list(prompt), _longest(model, prompt, NEW_TOKENS if most is None else most), seed, stops)
        for prompt, seed in zip(prompts, one_seed_each(seeds, len(rows)), strict=True)
    ]
    for number, (sequence, source, padding) in enumerate(zip(sequences, sources, paddings, strict=True)):
        sequence.number, sequence.source, sequence.padding = number, source, [] if source else padding
    for sequence, states_TH in zip(sequences, states or (), strict=states is not None):
        sequence.encoded = states_TH
    return rows, sequences


def _longest(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> int:
    """Return the number of tokens at which a sequence ends; ConfigError for a prompt that leaves no room."""
    if max_new_tokens < 1:
        raise ConfigError.of("max_new_tokens", max_new_tokens, ">= 1")
    limit = decoding_limit(model.config)
    if limit is not None and len(prompt) >= limit:
        fits = f"fewer than the target's context of {limit}: a new token needs room"
        raise ConfigError(f"prompt={len(prompt)} tokens; expected {fits}")
    length = len(prompt) + max_new_tokens
    return length if limit is None else min(length, limit)


def _prompts(
    model: PreTrainedModel, rows: list[list[int]], decoder_input_ids: Ids | None
) -> tuple[Sequence[list[int]], Sequence[list[int]]]:
    """Return (decoder tokens, encoder tokens) of each sequence; a decoder-only target has no encoder tokens."""
    if not model.config.is_encoder_decoder:
        if decoder_input_ids is not None:
            raise ConfigError("decoder_input_ids with a decoder-only target; expected the whole text in input_ids")
        return rows, [[] for _ in rows]
    if decoder_input_ids is None:
        return [[start_token(model)] for _ in rows], rows
    starts, _ = prompt_rows(decoder_input_ids, may_be_empty=True)
    if len(starts) != len(rows) or not all(starts):
        raise ConfigError(f"decoder_input_ids={len(starts)} rows; expected {len(rows)}, none of them empty")
    return starts, rows


def _eos(model: PreTrainedModel, given: EosTokens) -> frozenset[int]:
    if isinstance(given, str) and given == "model":
        return eos_tokens(model.config, getattr(model, "generation_config", None))
    return frozenset() if given is None else token_set(given)


def prompt_rows(
    input_ids: Ids | Mapping[str, Any], attention_mask: Ids | None = None, *, may_be_empty: bool = False
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of each prompt, and the padding on its left.

    Accepts [T] and [B, T] as a tensor, an array or lists, rows of different lengths, and a tokenizer's output. The
    model does not read tokens at which the mask is 0; logits processors and stopping criteria read the padding on the
    left, as in transformers' `generate`.
    """
    given: Any = input_ids
    if isinstance(input_ids, Mapping):
        if others := sorted(set(input_ids) - set(_OF_TOKENIZER)):
            raise ConfigError(f"input_ids[{others[0]!r}]; expected it in `inputs`, see `generate_batch`")
        attention_mask = input_ids.get("attention_mask") if attention_mask is None else attention_mask
        given = input_ids["input_ids"]
    rows = _rows("input_ids", given)
    paddings: list[list[int]] = [[] for _ in rows]
    if attention_mask is not None:
        masks = _rows("attention_mask", attention_mask)
        if (shape := list(map(len, masks))) != (expected := list(map(len, rows))):
            raise ConfigError.of("attention_mask lengths", shape, f"those of input_ids, {expected}")
        if not set().union(*masks) <= {0, 1}:
            raise ConfigError("attention_mask with other values than 0 and 1; expected True or 1 at tokens")
        paired = list(zip(rows, masks, strict=True))
        paddings = [row[: [*mask, 1].index(1)] for row, mask in paired]
        rows = [[token for token, kept in zip(row, mask, strict=True) if kept] for row, mask in paired]
    for number, row in enumerate(rows):
        if not row and not may_be_empty:
            raise ConfigError(f"prompt{f' {number}' if len(rows) > 1 else ''}=0 tokens; expected at least 1")
    if not rows:
        raise ConfigError("prompts=0; expected at least 1")
    return rows, paddings


def _rows(name: str, values: Ids) -> list[list[int]]:
    """Return rows of numbers; ConfigError for values that are not whole numbers."""
    if not isinstance(values, Tensor | np.ndarray):
        nested = len(values) > 0 and np.ndim(values[0]) > 0
        return [_row(name, row) for row in values] if nested else [_row(name, values)]
    if values.ndim > 2:
        raise ConfigError.of(f"{name} shape", list(values.shape), "[T] or [B, T]")
    return [_row(name, row) for row in (values if values.ndim > 1 else values[None])]


def _row(name: str, values: Ids) -> list[int]:
    array = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    whole = array.astype(np.int64) if array.dtype.kind in "biuf" else None
    if whole is None or not (whole == array).all():
        raise ConfigError(f"{name} of {array.dtype}; expected whole numbers")
    return whole.tolist()


def require_known(rows: Sequence[list[int]], model: PreTrainedModel) -> None:
    """Raise ConfigError for tokens that the model has no embedding for."""
    embeddings = model.get_input_embeddings().weight
    assert isinstance(embeddings, Tensor)
    known = embeddings.shape[0]
    for number, row in enumerate(rows):
        for token in (min(row), max(row)) if row else ():
            if not 0 <= token < known:
                raise ConfigError(
                    f"prompt {number} contains token {token}; expected 0 to {known - 1}, the target's vocabulary"
                )


def one_seed_each(seeds: Sequence[int] | int, count: int) -> Sequence[int]:
    """Return one seed for each of `count` prompts; ConfigError for another number of seeds or seeds out of range."""
    if isinstance(seeds, int | np.integer):
        seeds = range(int(seeds), int(seeds) + count)
    for seed in (seeds[0], seeds[-1]) if isinstance(seeds, range) else seeds:
        require_seed("seed", seed, 2**64 - 1)
    if len(seeds) != count:
        raise ConfigError.of("seeds", list(seeds), f"one for each of the {count} prompts")
    return seeds


# Targets, drafters, policies and rules that fit together.


def capabilities(target: PreTrainedModel, drafter: Drafter | None) -> list[Capability]:
    """Return the capabilities of the target and of the models that `drafter` runs with a cache of their own."""
    modules = () if drafter is None else drafter.modules()
    models = [target, *(module.model for module in modules if isinstance(module, DraftModel))]
    return [capability_of(model) for model in models]


def require_readable(policy: Policy, models: Sequence[Capability]) -> None:
    """Raise ConfigError if drafts of `policy` may have branches, and one of the models reads chains only."""
    for capability in models:
        if capability.no_trees and policy.branches:
            raise ConfigError(capability.refusal(f"policy={policy}"))


def require_fitting(rule: Rule, drafter: Drafter, policy: Policy | None) -> None:
    """Raise ConfigError if `rule` does not apply to retrieved drafts or to drafts of `policy`."""
    if rule.drawn and type(drafter).retrieve is not Drafter.retrieve:
        raise ConfigError(f"rule={rule.name!r} needs {rule.takes}; a {drafter.type} drafter also retrieves drafts")
    if policy is not None:
        rule.require(drawn=not policy.chooses, is_chain=not policy.branches)


def require_reach(drafter: Drafter, draft_length: int) -> None:
    """Raise ConfigError for more draft tokens than the drafter proposes."""
    most = drafter.max_draft_length
    if most is not None and draft_length > most:
        raise ConfigError.of(
            "draft_length", draft_length, f"at most {most}, which is what this {drafter.type} drafter proposes"
        )


def require_same_vocabulary(drafter: Drafter, target: PreTrainedModel) -> None:
    """Raise ConfigError for a drafter with another vocabulary size, unless the number of shared tokens is known."""
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    if drafter.vocab_size in (None, vocabulary) or drafter.shared_vocabulary is not None:
        return
    raise ConfigError(f"drafter vocabulary={drafter.vocab_size}; expected the target's {vocabulary}")
