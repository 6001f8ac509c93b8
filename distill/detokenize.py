"""Decode the tokens that follow other tokens.

Decoded alone, the same tokens may give another text: sentencepiece tokenizers strip the space of the first token, and a
character may begin in one token and end in the next.
"""

from collections.abc import Sequence
from typing import Any

REPLACED = "\N{REPLACEMENT CHARACTER}"
"""Shown for the bytes of an incomplete character."""
WINDOW = 32
"""Tokens of the context that are decoded; the whole context if these have no complete text."""


def text_after(
    tokenizer: Any, context: Sequence[int], tokens: Sequence[int], *, skip_special_tokens: bool = True
) -> str:
    """Return the text that `tokens` add after `context`, including a character that the context left incomplete."""

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    tails = (context[-WINDOW - more :] for more in range(4))  # one of them begins at a character's first byte
    window = next((tail for tail in tails if decode(tail).strip() and REPLACED not in decode(tail)), context)
    for end in range(len(window), -1, -1):
        before, whole = decode(window[:end]), decode([*window[:end], *tokens])
        for shown in (before, before.rstrip(REPLACED)):
            if whole.startswith(shown):
                return whole[len(shown) :]
        # Byte tokens turn the whole bytes before them into replacement characters until they are a character.
    raise AssertionError("nothing is a prefix of every text")


class IncrementalText:
    """Decode tokens one by one; the bytes of an incomplete character are held back."""

    def __init__(self, tokenizer: Any, context: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._before, self._waiting, self._shown = list(context), list[int](), 0

    def add(self, token: int) -> str:
        """Return the text that is complete with `token`."""
        self._waiting.append(token)
        text = self._text()
        certain = text.rstrip(REPLACED)
        new, self._shown = certain[self._shown :], max(self._shown, len(certain))
        if certain == text:
            self._before += self._waiting
            self._waiting, self._shown = [], 0
        return new

    def rest(self) -> str:
        """Return the text that was held back, when no token follows."""
        return self._text()[self._shown :]

    def _text(self) -> str:
        return text_after(self._tokenizer, self._before, self._waiting, skip_special_tokens=self._skip)
