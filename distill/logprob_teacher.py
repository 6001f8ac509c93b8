"""A teacher for targets that run elsewhere: a file of answers with the log-probabilities of their most likely tokens.

Rows have `prompt`, `messages` or `prompt_token_ids`, and an answer in one of these layouts:

    OpenAI chat            choices[].logprobs.content[] = {token, logprob, bytes, top_logprobs: [the same three]}
    OpenAI completions     choices[].logprobs = {tokens: [], token_logprobs: [], top_logprobs: [{token: logprob}]}
    plain                  input_ids, prompt_length, top_ids [[]], top_logprobs [[]] for each token of the answer

where `choices[]` may be left out. Tokens given as text are looked up by their bytes, from which some servers strip a
space; "token_id:7", which vLLM writes with return_tokens_as_token_ids, is exact. Log-probabilities are those at
temperature 1.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard, cast

import numpy as np
import torch
from datasets import Dataset, Features, List, Value
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.distill.chat_template import Chat
from draftsmith.distill.messages import ASSISTANT
from draftsmith.distill.sources import conversation, read_source
from draftsmith.distill.teacher import TargetHead
from draftsmith.errors import ConfigError
from draftsmith.heads.base import Drafter, TeacherSignals

TOKEN_ID = "token_id:"
WORD_START = "\u2581"
"""A space in sentencepiece vocabularies."""
SPACE = "\u0120"
"""A space in byte-level BPE vocabularies."""
REPLACED = "\ufffd"
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
ESCAPED = re.compile(r"\\x([0-9a-f]{2})")


class TokenTable:
    """A vocabulary's token ids by the bytes of each token."""

    def __init__(self, tokenizer: Any) -> None:
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.size = max(vocabulary.values()) + 1
        added = tokenizer.get_added_vocab()
        own = vocabulary.keys() - added  # the special tokens of DeepSeek's byte-level vocabularies have WORD_START
        pieces = any(WORD_START in token for token in own)
        byte_level = not pieces and any(SPACE in token for token in own)
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
            self._ids[raw] = None if raw in self._ids else index  # two tokens with the same bytes are ambiguous
        # Byte tokens are used only for text that no piece covers.
        self._ids = {**fallback, **self._ids}

    def find(self, text: str, raw: Sequence[int] | None = None) -> int | None:
        """Return the token with this text, or with these `raw` bytes; None for no token or several."""
        if text.startswith(TOKEN_ID):
            number = text.removeprefix(TOKEN_ID)
            return int(number) if number.isdecimal() and int(number) < self.size else None
        encoded = text.encode(errors="surrogatepass")
        if REPLACED in text and (raw is None or bytes(raw) == encoded):
            return None  # incomplete characters were replaced, so the bytes are unknown
        if raw is not None:
            return self._ids.get(bytes(raw))
        if text.startswith("bytes:") and ESCAPED.search(text):  # incomplete characters in OpenAI's completions
            parts = ESCAPED.split(text.removeprefix("bytes:"))
            encoded = b"".join(
                bytes.fromhex(part) if i % 2 else part.encode(errors="surrogatepass") for i, part in enumerate(parts)
            )
        return self._ids.get(encoded)


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE's alphabet; printable bytes are their own character."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(own)]
    return {**{chr(byte): byte for byte in own}, **{chr(256 + place): byte for place, byte in enumerate(others)}}


# Shapes: B texts, T positions, H target hidden size, N tokens of an answer, E known tokens of a position.

FEATURES = Features(
    {
        "input_ids": List(Value("int64")),
        "spans": List(List(Value("int64"))),
        "top_ids": List(List(Value("int32"))),
        "top_logprobs": List(List(Value("float32"))),
    }
)
UNKNOWN_LOGPROB = -9999.0
"""Log-probability that APIs report for a token outside the top ones."""
MOST = 1.01
"""Upper bound of the sum of probabilities, which servers round."""
MOST_LOGPROB = 1e-3
"""Upper bound of a log-probability, for the same reason."""
Known = dict[int, float]
"""Log-probability by token."""


def logprob_rows(
    source: str, tokenizer: Any, report: Callable[[str], None] = lambda _: None, chat: Chat | None = None
) -> Dataset:
    """Return training rows from a file of answers and log-probabilities.

    Rows have `input_ids`, `spans` (one span, the answer), and for each token of the answer `top_ids`, padded with -1,
    and `top_logprobs`, padded with -inf. Alternatives that are not exactly one token of the target stay unknown;
    `report` is called with their number.

    Args:
        tokenizer: the target's.
        chat: template for prompts; by default the tokenizer's.

    Raises:
        ConfigError: naming the line, for a row in another layout or whose answer is not in the vocabulary.
    """
    reader = _Reader(chat or Chat(tokenizer), TokenTable(tokenizer))
    samples = [sample for place, row in read_source(source) for sample in reader.samples(place, row)]
    width = max(1, max(sample.top_ids_NE.shape[1] for sample in samples))
    if reader.unknown:
        report(
            f"{reader.unknown} of {reader.alternatives} alternatives in {source} are not a token of the target: ignored"
        )
    columns = {
        "input_ids": [sample.input_ids for sample in samples],
        "spans": [[[sample.start, len(sample.input_ids)]] for sample in samples],
        "top_ids": [_widened(sample.top_ids_NE, width, -1) for sample in samples],
        "top_logprobs": [_widened(sample.top_log_NE, width, -np.inf) for sample in samples],
    }
    return Dataset.from_dict(columns, features=FEATURES)


class _Logprob(NamedTuple):
    """A token of the file: its text, its bytes if there are any, and its log-probability; unchecked."""

    text: str
    raw: Any
    logprob: Any


@dataclass(frozen=True)
class _Sample:
    input_ids: list[int]
    start: int
    top_ids_NE: np.ndarray
    top_log_NE: np.ndarray


@dataclass
class _Reader:
    """Convert rows of a file to samples, and count alternatives that are not found in the vocabulary."""

    chat: Chat
    table: TokenTable
    alternatives: int = 0
    unknown: int = 0

    def samples(self, place: str, row: dict[str, Any]) -> Iterator[_Sample]:
        """Yield one sample for each answer in a row."""
        if "top_ids" in row:
            yield self._finished(place, row, *self._plain(place, row))
            return
        choices = row.get("choices", [row])
        if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
            raise ConfigError(f"{place}: choices={choices!r}; expected a list of answers")
        for choice in choices:
            prompt = self._prompt(place, {**row, **choice})
            logprobs = choice.get("logprobs")
            if isinstance(logprobs, dict) and isinstance(logprobs.get("content"), list):
                answer = [self._chat_token(place, n, entry) for n, entry in enumerate(logprobs["content"], 1)]
            elif isinstance(logprobs, dict) and isinstance(logprobs.get("tokens"), list):
                answer = self._completion(place, logprobs)
            else:
                raise ConfigError(
                    f"{place}: no log-probabilities; expected 'logprobs' with 'content' or 'tokens', in the row "
                    "or in 'choices', or 'input_ids' with 'top_ids'"
                )
            yield self._finished(place, choice, prompt, [token for token, _ in answer], [known for _, known in answer])

    def _prompt(self, place: str, row: dict[str, Any]) -> list[int]:
        text, messages = row.get("prompt"), row.get("messages")
        ids = row.get("prompt_token_ids") or (text if isinstance(text, list) else None)
        if ids is None and isinstance(text, str):
            ids = self.chat.plain(text, place)
        elif ids is None and messages:
            asked = conversation(place, {"messages": messages, "tools": row.get("tools")})
            if asked.messages[-1]["role"] == ASSISTANT:
                raise ConfigError(
                    f"{place}: messages end with the assistant; expected only the messages before the answer"
                )
            ids = self.chat.generation_prompt(asked.messages, asked)
        if not ids:
            raise ConfigError(f"{place}: no prompt; expected 'prompt', 'messages' or 'prompt_token_ids' with a token")
        return self._ids(place, "prompt_token_ids", ids)

    def _ids(self, place: str, key: str, ids: Any, least: int = 0) -> list[int]:
        if not isinstance(ids, list) or not all(_whole(token) and least <= token < self.table.size for token in ids):
            raise ConfigError(f"{place}: {key}={ids!r}; expected token ids below {self.table.size}")
        return ids

    def _plain(self, place: str, row: dict[str, Any]) -> tuple[list[int], list[int], list[Known]]:
        ids, length = self._ids(place, "input_ids", row.get("input_ids")), row.get("prompt_length")
        if not _whole(length) or not 0 < length <= len(ids):
            raise ConfigError(f"{place}: prompt_length={length!r}; expected 1 to {len(ids)}, its input_ids")
        answer = ids[length:]
        top, logs = (_one_a_token(place, row, key, len(answer)) for key in ("top_ids", "top_logprobs"))
        known = []
        for number, (tokens, values) in enumerate(zip(top, logs, strict=True), 1):
            tokens = self._ids(place, f"top_ids of token {number}", tokens, -1)
            values = values if isinstance(values, list) else []
            pairs = [pair for pair in zip(tokens, values, strict=False) if pair[0] >= 0]
            if len(tokens) != len(values) or len({token for token, _ in pairs}) < len(pairs):
                raise ConfigError(
                    f"{place}: token {number} has {tokens} with {values}; expected a number for each, once"
                )
            known.append(_known(place, number, pairs))
        return ids[:length], answer, known

    def _chat_token(self, place: str, number: int, entry: Any) -> tuple[int, Known]:
        others = (entry.get("top_logprobs") or []) if isinstance(entry, dict) else None
        if not isinstance(others, list) or not all(_named(one) for one in (entry, *others)):
            raise ConfigError(
                f"{place}: token {number} is {entry!r}; expected 'token' and 'logprob', also in 'top_logprobs'"
            )
        entries = [_Logprob(one["token"], one.get("bytes"), one["logprob"]) for one in (*others, entry)]
        return self._token(place, number, entries)

    def _completion(self, place: str, logprobs: dict[str, Any]) -> list[tuple[int, Known]]:
        tokens, logs = logprobs["tokens"], logprobs.get("token_logprobs")
        tops = logprobs.get("top_logprobs") or [None] * len(tokens)
        if not isinstance(logs, list) or not isinstance(tops, list) or not len(tokens) == len(logs) == len(tops):
            raise ConfigError(f"{place}: {len(tokens)} tokens; expected as many 'token_logprobs' and 'top_logprobs'")
        if logs and logs[0] is None:
            raise ConfigError(f"{place}: the first token has no probability; expected the answer alone (echo=false)")
        answer = []
        for number, (token, log, top) in enumerate(zip(tokens, logs, tops, strict=True), 1):
            if not isinstance(token, str) or not isinstance(top or {}, dict):
                raise ConfigError(f"{place}: token {number} is {token!r} with {top!r}; expected text and an object")
            others = [_Logprob(text, None, other) for text, other in (top or {}).items()]
            answer.append(self._token(place, number, [*others, _Logprob(token, None, log)]))
        return answer

    def _token(self, place: str, number: int, entries: list[_Logprob]) -> tuple[int, Known]:
        """Return the sampled token, which is the last of `entries`, and the known log-probabilities of all of them."""
        ids = [self.table.find(one.text, one.raw) for one in entries]
        if ids[-1] is None:
            raise ConfigError(
                f"{place}: token {number} is {entries[-1].text!r}; expected one token of the target's vocabulary "
                "(vLLM writes token ids with return_tokens_as_token_ids)"
            )
        self.alternatives += len(ids) - 1
        self.unknown += ids.count(None)
        logs = [(token, one.logprob) for token, one in zip(ids, entries, strict=True)]
        return ids[-1], _known(place, number, logs)

    def _finished(
        self, place: str, row: dict[str, Any], prompt: list[int], answer: list[int], known: list[Known]
    ) -> _Sample:
        """Return the sample, with the end token after an answer that ended by itself: APIs omit it."""
        stop = row.get("stop_reason")  # of vLLM: a stop string, or a token other than the tokenizer's EOS
        end: Any = self.chat.tokenizer.eos_token_id if stop is None else stop
        ended = row.get("finish_reason") == "stop" and _whole(end) and end in range(self.table.size)
        if ended and answer[-1:] != [end]:
            answer, known = [*answer, end], [*known, {}]
        if not answer:
            raise ConfigError(f"{place}: an answer of no token; expected at least one")
        width = max(map(len, known))
        ids = [[*one, *[-1] * (width - len(one))] for one in known]
        logs = [[*one.values(), *[-math.inf] * (width - len(one))] for one in known]
        sizes = (len(known), width)
        return _Sample(
            [*prompt, *answer],
            len(prompt),
            np.array(ids, np.int32).reshape(sizes),
            np.array(logs, np.float32).reshape(sizes),
        )


def _known(place: str, number: int, pairs: Sequence[tuple[int | None, Any]]) -> Known:
    """Return the log-probability by token, without unknown ones."""
    known: Known = {}
    for token, log in pairs:
        if isinstance(log, bool) or not isinstance(log, int | float) or not log <= MOST_LOGPROB:
            raise ConfigError(f"{place}: log-probability {log!r} at token {number}; expected a number up to 0")
        if token is not None and log > UNKNOWN_LOGPROB:
            known.setdefault(token, min(float(log), 0.0))
    mass = sum(map(math.exp, known.values()))
    if mass > MOST:
        raise ConfigError(f"{place}: probabilities of {mass:.2f} at token {number}; expected at most 1 together")
    return known


def _one_a_token(place: str, row: dict[str, Any], key: str, tokens: int) -> list[Any]:
    """Return the list at `key` of a row; ConfigError unless it has an entry for each token of the answer."""
    values = row.get(key)
    if not isinstance(values, list) or len(values) != tokens:
        size = len(values) if isinstance(values, list) else repr(values)
        raise ConfigError(f"{place}: {key} of {size} tokens; expected {tokens}, one list for each response token")
    return values


def _named(entry: Any) -> bool:
    raw = entry.get("bytes") if isinstance(entry, dict) else None
    good = raw is None or (isinstance(raw, list) and all(_whole(byte) and 0 <= byte < 256 for byte in raw))
    return isinstance(entry, dict) and isinstance(entry.get("token"), str) and "logprob" in entry and good


def _whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _widened(values_NE: np.ndarray, width: int, filler: float) -> np.ndarray:
    room = width - values_NE.shape[1]
    return np.pad(values_NE, ((0, 0), (0, room)), constant_values=filler)


class LogprobTeacher:
    """A teacher with the interface of `OnlineTeacher` for the rows of `logprob_rows`; never runs the target."""

    def __init__(self, model: PreTrainedModel, rows: Dataset) -> None:
        self.model = model
        self.lm_head = cast(TargetHead, model.get_output_embeddings())
        self._rows = rows

    def signals(
        self,
        input_ids_BT: Tensor,
        attention_mask_BT: Tensor,
        mask_BT: Tensor,
        source_BS: Tensor | None = None,
        source_mask_BS: Tensor | None = None,
        rows: Sequence[int] = (),
        documents_BT: Tensor | None = None,
        inputs: tuple[()] = (),
    ) -> TeacherSignals:
        """Return the batch with the known log-probabilities; `rows`: indices of its rows in the data.

        The entries of a row, one for each trained token, are placed in order where `mask_BT` is True.
        """
        stored = [self._rows[row] for row in rows]
        ids_NE = torch.tensor([known for row in stored for known in row["top_ids"]])
        log_NE = torch.tensor([known for row in stored for known in row["top_logprobs"]])
        counts_B = torch.tensor([len(row["top_ids"]) for row in stored])
        assert torch.equal(mask_BT.sum(1).cpu(), counts_B), "the mask is not that of the rows"
        top_ids_BTE = torch.full((*mask_BT.shape, ids_NE.shape[1]), -1, device=mask_BT.device)
        top_log_BTE = torch.full(top_ids_BTE.shape, -torch.inf, device=mask_BT.device)
        top_ids_BTE[mask_BT] = ids_NE.to(mask_BT.device)
        top_log_BTE[mask_BT] = log_NE.to(mask_BT.device)
        return TeacherSignals(
            input_ids_BT,
            attention_mask_BT,
            self.lm_head.weight.new_zeros(*mask_BT.shape, 0),
            mask_BT,
            source_BS=source_BS,
            source_mask_BS=source_mask_BS,
            documents_BT=documents_BT,
            top_ids_BTE=top_ids_BTE,
            top_log_BTE=top_log_BTE,
        )


def require_reads_text_alone(drafter: Drafter | type[Drafter]) -> None:
    """Raise ConfigError if a drafter reads hidden states, which a file of log-probabilities does not hold."""
    if drafter.needs.hidden or drafter.needs.layers:
        raise ConfigError(
            f"teacher.kind='logprobs' with drafter.type={drafter.type!r}, which reads the target's hidden states; "
            "expected 'draft_model', or teacher.kind='online' if the target runs here"
        )
