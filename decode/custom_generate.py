"""Speculative decoding through transformers' `model.generate(..., custom_generate=as_custom_generate(drafter))`."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    Cache,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from draftsmith.decode.cache.rollback import cache_name
from draftsmith.decode.decoder import OnBatchTokens, SpeculativeDecoder
from draftsmith.decode.fastest import fastest_decoder
from draftsmith.decode.policies import Policy
from draftsmith.decode.sequence import DecodeOutput, Round
from draftsmith.errors import ConfigError
from draftsmith.heads.base import Drafter

# Arguments that transformers prepares for its own decoding loops and that this decoder ignores.
_IGNORED = {"attention_mask", "encoder_outputs", "position_ids", "logits_to_keep"}
_IGNORED |= {"use_cache", "cache", "past_key_values", "cache_params"}
_IGNORED |= {"decoder_attention_mask", "cache_position", "inputs_tensor", "synced_gpus"}
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)
# Arguments that choose another mode of decoding, with the value that does not.
_OTHER_MODES = {
    "num_beams": 1,
    "constraints": None,
    "force_words_ids": None,
    "penalty_alpha": None,
    "dola_layers": None,
}


def as_custom_generate(
    drafter: Drafter | None,
    *,
    draft_length: int | None = None,
    policy: Policy | str | None = None,
    rule: str | None = None,
    streamer: BaseStreamer | None = None,
    on_output: Callable[[list[DecodeOutput]], None] | None = None,
) -> Callable[..., Any]:
    """Return a `custom_generate` for transformers' `generate`, which prepares processors and criteria as usual.

    Supports greedy and sampled decoding, batches, `num_return_sequences`, and for encoder-decoder models
    `decoder_input_ids` and `encoder_outputs`; no other mode of decoding. The seed comes from torch's global generator,
    so `torch.manual_seed` makes a text reproducible, by default on one machine only: see `stored_costs`. transformers
    passes neither `streamer` nor `tokenizer` to a callable: pass the streamer here (one prompt only), and stop strings
    as a `StopStringCriteria` in `stopping_criteria`.

    Args:
        drafter, draft_length, policy, rule: as for `SpeculativeDecoder`; without length and policy, `fastest_decoder`.
        on_output: called with a `DecodeOutput` for each sequence, which holds rounds, tau and seconds.
    """
    decoders: dict[tuple[int, int], SpeculativeDecoder] = {}
    """By model and number of sequences."""

    def custom_generate(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
        encodes = model.config.is_encoder_decoder
        _refuse_others(generation_config, model_kwargs, encodes=encodes)
        chosen = draft_length is not None or policy is not None
        key = id(model), 1 if chosen else len(input_ids)
        if key not in decoders:
            if not chosen:
                decoders[key] = fastest_decoder(model, drafter, rule=rule, batch_size=len(input_ids))
            else:
                decoders[key] = SpeculativeDecoder(model, drafter, draft_length=draft_length, policy=policy, rule=rule)
        eos, length, criteria = _split(stopping_criteria)
        given: dict[str, Any] = {"input_ids": input_ids}
        if encodes:
            given = _encoded(input_ids, inputs_tensor, model_kwargs)
        on_tokens = None if streamer is None else _to(streamer, input_ids)
        outputs = decoders[key].generate_batch(
            **given,
            attention_mask=None if encodes else model_kwargs.get("attention_mask"),
            max_new_tokens=max(1, length - input_ids.shape[1]),
            temperature=1.0 if generation_config.do_sample else 0.0,  # the real one is among the processors
            seeds=int(torch.randint(2**48, ())),
            eos_token_id=eos,
            logits_processor=logits_processor,
            stopping_criteria=criteria,
            on_tokens=on_tokens,
        )
        if streamer is not None:
            streamer.end()
        if on_output is not None:
            on_output(outputs)
        sequences = _padded(input_ids, outputs, generation_config)
        if not generation_config.return_dict_in_generate:
            return sequences
        kind = GenerateEncoderDecoderOutput if encodes else GenerateDecoderOnlyOutput
        return kind(sequences=cast(torch.LongTensor, sequences))  # int64, which no annotation of torch's says

    return custom_generate


def _to(streamer: BaseStreamer, input_ids: Tensor) -> OnBatchTokens:
    """Put the prompt into `streamer` and return an `on_tokens` for the tokens; ConfigError for more than one text."""
    if len(input_ids) > 1:
        raise ConfigError.of("input_ids batch", len(input_ids), "1 text for a streamer")
    streamer.put(input_ids.cpu())

    def put(_: int, tokens: list[int], __: Round | None) -> None:
        for token in tokens:
            streamer.put(torch.tensor([token]))

    return put


def _refuse_others(config: GenerationConfig, model_kwargs: dict[str, Any], *, encodes: bool) -> None:
    """Raise ConfigError for arguments of `generate` that this decoder does not support."""
    mode = config.get_generation_mode()
    if mode not in _MODES:
        key = next(key for key in _OTHER_MODES if getattr(config, key, None) not in (None, 1))
        raise ConfigError.of(key, getattr(config, key), f"{_OTHER_MODES[key]}: {mode.value} is not supported")
    for key in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, key, False):
            raise ConfigError.of(key, True, "False: draft tokens that are rejected have no place in that output")
    known = _IGNORED | {"inputs_embeds"} if encodes else _IGNORED  # the encoder has read them
    others = {key for key, value in model_kwargs.items() if value is not None} - known
    if others:
        raise ConfigError(f"generate({sorted(others)[0]}=...) is not supported here; expected input_ids and their mask")
    mask = model_kwargs.get("decoder_attention_mask")
    if mask is not None and not mask.all():
        raise ConfigError(
            "generate(decoder_attention_mask=...) masks tokens; expected decoder_input_ids without padding"
        )
    if not encodes and not _follow(model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")):
        raise ConfigError("generate(position_ids=...) differs from the mask; expected positions that follow from it")
    name = cache_name(model_kwargs)
    cache = model_kwargs.get(name)
    if cache is not None and _has_tokens(cache):
        raise ConfigError(f"generate({name}=...) contains tokens; expected the whole text in input_ids")


def _has_tokens(cache: Cache) -> bool:
    try:
        return cache.get_seq_length() > 0
    except ValueError:  # it has recurrent layers only, which do not count tokens
        return cache.has_previous_state()


def _follow(positions: Tensor | None, mask: Tensor | None) -> bool:
    """Return whether the positions count the tokens of each row from 0, as the decoder does."""
    if positions is None or positions.dim() != 2:
        return True
    kept = torch.ones_like(positions) if mask is None else mask
    return bool(((positions == kept.cumsum(-1) - 1) | (kept == 0)).all())


def _encoded(decoder_ids_BP: Tensor, inputs: Tensor | None, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of an encoder-decoder model: decoder tokens, encoder states and, where given, source tokens.

    transformers has expanded all tensors except `inputs` to `num_return_sequences`. Where `generate` was called without
    `input_ids`, `inputs` holds no tokens and the sources are empty.
    """
    states_BTH, mask_BT = model_kwargs["encoder_outputs"][0], model_kwargs.get("attention_mask")
    mask_BT = torch.ones(states_BTH.shape[:2], device=states_BTH.device) if mask_BT is None else mask_BT
    sources: list[list[int]] = [[] for _ in states_BTH]
    assert inputs is not None, "`generate` passes inputs_tensor to every callable that names it"
    inputs = inputs.repeat_interleave(len(states_BTH) // len(inputs), 0)
    if inputs.shape == mask_BT.shape and int(inputs.min()) >= 0:
        sources = [row_T[kept_T.bool()].tolist() for row_T, kept_T in zip(inputs, mask_BT, strict=True)]
    states = [states_TH[kept_T.bool()] for states_TH, kept_T in zip(states_BTH, mask_BT, strict=True)]
    return {"input_ids": sources, "decoder_input_ids": decoder_ids_BP.tolist(), "encoder_states": states}


def _split(criteria: StoppingCriteriaList) -> tuple[list[int] | None, int, list[StoppingCriteria]]:
    """Return (end tokens, maximum length, other criteria); the decoder checks the first two itself.

    transformers makes a criterion of `max_length`, or of `max_new_tokens`, unless the user passes one.
    """
    eos: list[int] = []
    lengths: list[int] = []
    others: list[StoppingCriteria] = []
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            eos += criterion.eos_token_id.flatten().tolist()
        elif type(criterion) is MaxLengthCriteria:
            lengths.append(criterion.max_length)
        else:
            others.append(criterion)
    return eos or None, min(lengths), others


def _padded(input_ids: Tensor, outputs: Sequence[DecodeOutput], config: GenerationConfig) -> Tensor:
    """Return the prompts followed by the new tokens, padded on the right: [B, T + n]."""
    width = max(len(output.tokens) for output in outputs)
    # Where no pad token is set, `generate` has stored the first end token, or None without any.
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    rows = [[*output.tokens, *[pad] * (width - len(output.tokens))] for output in outputs]
    return torch.cat([input_ids, torch.tensor(rows, device=input_ids.device)], 1)
