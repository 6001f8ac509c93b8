"""The target: an unmodified transformers causal LM behind prefill, verify and commit."""

from typing import Protocol

import torch
from torch import Tensor, nn

from draftsmith.decode.cache import PointerCache, causal_mask, context_limit
from draftsmith.errors import ConfigError

# Shapes: P positions fed, H hidden size, V vocabulary.


class Target(Protocol):
    """What the decoder asks of a target; the exact tests also put toy tables behind it."""

    context_limit: int | None

    def start(self, max_length: int) -> None:
        """Begin a new text of at most `max_length` tokens."""

    def prefill(self, tokens: list[int]) -> Tensor:
        """Read the prompt; the logits behind its last token, [1, V]."""

    def verify(self, tokens: list[int]) -> Tensor:
        """Read tokens behind the committed ones; the logits behind each, [P, V]."""

    def commit(self, length: int) -> None:
        """Keep the first `length` tokens; forget the others that were read."""

    def hidden(self, row: int) -> Tensor | None:
        """[H]: what the lm_head read at `row` of the last logits; None for a target without hidden states."""


class TransformersTarget:
    """A transformers causal LM with a pointer cache. Batch 1."""

    def __init__(self, model: nn.Module) -> None:
        if getattr(model.config, "is_encoder_decoder", False):
            raise ConfigError(
                f"model_type={model.config.model_type!r} is encoder-decoder; expected a decoder-only target"
            )
        head = model.get_output_embeddings()
        if head is None:
            raise ConfigError(f"model {type(model).__name__} has no lm_head; expected a causal language model")
        self.model = model
        self.context_limit = context_limit(model)
        self._device = next(model.parameters()).device
        self._hidden_PH: Tensor | None = None
        self._head = head

    def start(self, max_length: int) -> None:
        self._cache = PointerCache(self.model.config, max_length)

    def prefill(self, tokens: list[int]) -> Tensor:
        return self._forward(tokens, logits_to_keep=1)

    def verify(self, tokens: list[int]) -> Tensor:
        return self._forward(tokens, logits_to_keep=0)

    def commit(self, length: int) -> None:
        self._cache.rollback(length)

    def hidden(self, row: int) -> Tensor | None:
        return None if self._hidden_PH is None else self._hidden_PH[row]

    def _forward(self, tokens: list[int], logits_to_keep: int) -> Tensor:
        start = self._cache.length
        positions = torch.arange(start, start + len(tokens), device=self._device)[None]

        # The hook sees what the lm_head reads, for every architecture alike and at no cost.
        def remember(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._hidden_PH = inputs[0][0]

        hook = self._head.register_forward_pre_hook(remember)
        try:
            output = self.model(
                input_ids=torch.tensor([tokens], device=self._device),
                attention_mask=causal_mask(start, len(tokens), self._device),
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=logits_to_keep,
            )
        finally:
            hook.remove()
        return output.logits[0]
