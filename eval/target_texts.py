"""Text that the target wrote itself: what a forecast reads, and what acceptance is worth knowing on."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from draftsmith.decode.cache import context_limit
from draftsmith.decode.decoder import SpeculativeDecoder, start_token
from draftsmith.decode.processors import Sampling
from draftsmith.heads.drafter import Drafter

TOGETHER = 16
"""Texts that are decoded in one batch."""


@dataclass(frozen=True)
class TargetText:
    """A decoded text. A round may begin behind every new token but the last."""

    tokens: list[int]
    """The prompt and what follows; for an encoder-decoder target the decoder's, the start token first."""
    prompt_length: int
    max_length: int
    """Tokens at which decoding would have been cut, had no EOS come before: it limits drafts near the end."""
    source: list[int] = field(default_factory=list)
    """What an encoder reads; empty for decoder-only targets."""

    @property
    def anchors(self) -> int:
        """Committed tokens behind which a round may begin: all new ones but the last."""
        return max(len(self.tokens) - 1 - self.prompt_length, 0)

    @property
    def decode_tokens(self) -> int:
        """Tokens that rounds commit: all new ones but the first, which the prefill gives."""
        return self.anchors

    def room(self, anchor: int) -> int:
        """The deepest draft that the decoder allows from this anchor, counted from 0."""
        return self.max_length - (self.prompt_length + anchor + 1) - 1


def sample_texts(
    target: nn.Module,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    seed: int = 0,
    drafter: Drafter | None = None,
) -> list[TargetText]:
    """The target's answers; prompt i has seed `seed + i`. A drafter only makes it faster."""
    decoder = SpeculativeDecoder(target, drafter)
    settings = {"max_new_tokens": max_new_tokens, "temperature": sampling.temperature}
    if not sampling.greedy:
        settings |= {"top_k": sampling.top_k, "top_p": sampling.top_p}
    texts: list[TargetText] = []
    for start in range(0, len(prompts), TOGETHER):
        some = list(prompts[start : start + TOGETHER])
        outputs = decoder.generate_batch(some, seeds=seed + start, **settings)
        texts += [target_text(target, out.prompt_tokens, out.tokens, max_new_tokens) for out in outputs]
    return texts


def target_text(target: nn.Module, prompt: list[int], new: list[int], max_new_tokens: int) -> TargetText:
    """What the decoder has made of `prompt`, an encoder's input or the beginning of the text."""
    source: list[int] = []
    if target.config.is_encoder_decoder:
        source, prompt = prompt, [start_token(target)]
    longest = min(len(prompt) + max_new_tokens, context_limit(target) or len(prompt) + max_new_tokens)
    return TargetText([*prompt, *new], len(prompt), longest, source)
