"""The decoder inside stock transformers: `model.generate(..., custom_generate=as_custom_generate(drafter))`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.generation.streamers import BaseStreamer

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.output import DecodeOutput, Round
from draftsmith.decode.policies import Policy
from draftsmith.errors import ConfigError
from draftsmith.heads.drafter import Drafter

# What transformers prepares for its own loops and this decoder has no use for.
_IGNORED = {"attention_mask", "encoder_outputs", "past_key_values", "use_cache", "position_ids", "logits_to_keep"}
_IGNORED |= {"decoder_attention_mask", "cache_position", "inputs_tensor", "synced_gpus"}


def as_custom_generate(
    drafter: Drafter | None,
    *,
    draft_length: int | None = None,
    policy: Policy | str | None = None,
    rule: str | None = None,
    streamer: BaseStreamer | None = None,
    on_output: Callable[[list[DecodeOutput]], None] | None = None,
) -> Callable[..., Any]:
    """A `custom_generate` for transformers' `generate`, which prepares processors and criteria as it always does.

    Greedy and sampled decoding, any batch; not beam search. A seed comes from torch's global generator, so
    `torch.manual_seed` reproduces a text. transformers passes neither `streamer` nor `tokenizer` to a callable: give
    the streamer here (one prompt only), and stop strings as a `StopStringCriteria` in `stopping_criteria`.

    Args:
        drafter, draft_length, policy, rule: as for `SpeculativeDecoder`.
        on_output: called with what `generate` does not return: rounds, tau, seconds.
    """
    decoders: dict[int, SpeculativeDecoder] = {}

    def custom_generate(
        model: nn.Module,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
        _refuse_others(generation_config, model_kwargs)
        if id(model) not in decoders:
            decoders[id(model)] = SpeculativeDecoder(
                model, drafter, draft_length=draft_length, policy=policy, rule=rule
            )
        if streamer is not None and input_ids.shape[0] > 1:
            raise ConfigError.of("input_ids batch", input_ids.shape[0], "1 prompt for a streamer")

        def stream(_: int, tokens: list[int], __: Round | None) -> None:
            for token in tokens:
                streamer.put(torch.tensor([token]))

        prompts = inputs_tensor if model.config.is_encoder_decoder else input_ids
        eos, criteria = _split(stopping_criteria)
        outputs = decoders[id(model)].generate_batch(
            prompts,
            attention_mask=model_kwargs.get("attention_mask"),
            max_new_tokens=generation_config.max_length - input_ids.shape[1],
            temperature=1.0 if generation_config.do_sample else 0.0,  # the real one is among the processors
            seeds=int(torch.randint(2**48, ())),
            eos_token_id=eos,
            logits_processor=logits_processor,
            stopping_criteria=criteria,
            on_tokens=None if streamer is None else stream,
        )
        if streamer is not None:
            streamer.end()
        if on_output is not None:
            on_output(outputs)
        sequences = _padded(input_ids, outputs, generation_config)
        if not generation_config.return_dict_in_generate:
            return sequences
        kind = GenerateEncoderDecoderOutput if model.config.is_encoder_decoder else GenerateDecoderOnlyOutput
        return kind(sequences=sequences)

    return custom_generate


def _refuse_others(config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """ConfigError for what this decoder does not do."""
    if config.num_beams > 1:
        raise ConfigError.of("num_beams", config.num_beams, "1: speculative decoding samples or is greedy")
    for key in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, key, False):
            raise ConfigError.of(key, True, "False: rejected positions have no place in that output")
    others = {key for key, value in model_kwargs.items() if value is not None} - _IGNORED
    if others:
        raise ConfigError(f"generate({sorted(others)[0]}=...) is not supported here; expected input_ids and their mask")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ConfigError("generate(past_key_values=...) holds tokens; expected the whole text in input_ids")


def _split(criteria: StoppingCriteriaList) -> tuple[list[int] | None, list]:
    """End tokens, and what is left of the criteria: the decoder watches those and the length by itself."""
    eos: list[int] = []
    others = []
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            eos += criterion.eos_token_id.flatten().tolist()
        elif type(criterion) is not MaxLengthCriteria:
            others.append(criterion)
    return eos or None, others


def _padded(input_ids: Tensor, outputs: Sequence[DecodeOutput], config: GenerationConfig) -> Tensor:
    """[B, T + n]: the prompts as they came, then the new tokens, padded on the right."""
    width = max(len(output.tokens) for output in outputs)
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    rows = [[*output.tokens, *[pad] * (width - len(output.tokens))] for output in outputs]
    return torch.cat([input_ids, torch.tensor(rows, device=input_ids.device)], 1)
