"""Token ids of a sample, and the spans of them that a drafter is trained on."""

from dataclasses import dataclass
from typing import Any

from draftsmith.distill.conversation import Conversation, mask_spans
from draftsmith.errors import ConfigError

Span = list[int]
"""[start, end) of tokens to train on; the token before `start` is only read."""
EVERYTHING = [0, 2**31 - 1]
"""The span of all tokens of a text, and of what is appended to it."""


@dataclass(frozen=True)
class EncodedText:
    """Token ids, and the spans of them that a drafter is trained on."""

    input_ids: list[int]
    spans: list[Span]
    masked: int = 0
    """Tokens of the answers that are not trained, because the tokenizer has no such id."""
    unended: int = 0
    """Answers after which the chat template shows no token that ends the target's answers."""

    @property
    def trained(self) -> int:
        return sum(end - start for start, end in self.spans)


def sampled_text(whole: Conversation, vocab_size: int, known: int) -> EncodedText:
    """Return the tokens and spans of a file, the latter without ids from `known` on; ConfigError for invalid ones."""
    ids, spans = whole.input_ids or [], whole.spans or []
    good = _whole_numbers(ids) and isinstance(spans, list) and len(spans) > 0 and all(map(_whole_numbers, spans))
    if not good or any(len(span) != 2 or not 0 < span[0] < span[1] <= len(ids) for span in spans):
        raise ConfigError(f"{whole.place}: spans={spans}; expected [start, end] inside its 'input_ids'")
    if not all(0 <= token < vocab_size for token in ids):
        raise ConfigError(f"{whole.place}: input_ids={ids}; expected token ids below {vocab_size}")
    trained = without_unknown(ids, spans, known)
    return EncodedText(ids, trained, masked=sum(b - a for a, b in spans) - sum(b - a for a, b in trained))


def without_unknown(ids: list[int], spans: list[Span], known: int) -> list[Span]:
    """Return the spans without ids from `known` on."""
    trained = [False] * len(ids)
    for start, end in spans:
        trained[start:end] = [token < known for token in ids[start:end]]
    return mask_spans(trained)


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)
