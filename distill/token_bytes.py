"""Which token of a vocabulary a piece of text is, by the bytes that each entry stands for."""

import re
from collections.abc import Sequence
from typing import Any

TOKEN_ID = "token_id:"
WORD_START = "\u2581"
"""How sentencepiece writes a space."""
SPACE = "\u0120"
"""How byte-level BPE writes one."""
REPLACED = "\ufffd"
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
ESCAPED = re.compile(r"\\x([0-9a-f]{2})")


class TokenTable:
    """The tokens of a vocabulary by the bytes that they stand for."""

    def __init__(self, tokenizer: Any) -> None:
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.size = max(vocabulary.values()) + 1
        added = tokenizer.get_added_vocab()
        pieces = any(WORD_START in token for token in vocabulary)
        byte_level = not pieces and any(SPACE in token for token in vocabulary)
        alphabet = byte_alphabet() if byte_level else {}
        self._ids: dict[bytes, int | None] = {}
        fallback: dict[bytes, int] = {}
        for token, index in vocabulary.items():
            if pieces and token not in added and (byte := BYTE_PIECE.fullmatch(token)):
                fallback[bytes.fromhex(byte[1])] = index
                continue
            plain = token in added or not all(character in alphabet for character in token)
            text = token.replace(WORD_START, " ") if pieces and token not in added else token
            raw = text.encode() if plain else bytes(alphabet[character] for character in token)
            self._ids[raw] = None if raw in self._ids else index  # two of the same: nobody knows which was meant
        # A byte of its own is written only where no piece stands for it.
        self._ids = {**fallback, **self._ids}

    def find(self, text: str, raw: Sequence[int] | None = None) -> int | None:
        """The token that a file writes as `text`, or exactly as `raw` bytes; None for none or several."""
        if text.startswith(TOKEN_ID):
            number = text.removeprefix(TOKEN_ID)
            return int(number) if number.isdecimal() and int(number) < self.size else None
        encoded = text.encode(errors="surrogatepass")
        if REPLACED in text and (raw is None or bytes(raw) == encoded):
            return None  # bytes that are no text of their own were replaced
        if raw is not None:
            return self._ids.get(bytes(raw))
        if text.startswith("bytes:") and ESCAPED.search(text):  # OpenAI's completions write broken characters so
            parts = ESCAPED.split(text.removeprefix("bytes:"))
            encoded = b"".join(
                bytes.fromhex(part) if i % 2 else part.encode(errors="surrogatepass") for i, part in enumerate(parts)
            )
        return self._ids.get(encoded)


def byte_alphabet() -> dict[str, int]:
    """The byte of each character in which byte-level BPE writes its tokens: printable ones stand for themselves."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(own)]
    return {**{chr(byte): byte for byte in own}, **{chr(256 + place): byte for place, byte in enumerate(others)}}
