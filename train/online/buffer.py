"""Verified positions in bounded memory: rows of decoded text with the target's states, and batches of them.

    text       t0  t1  t2 | t3  t4  t5          prompt | decoded
    hidden             h2   h3  h4              from the last token of the prompt
    features   f0  f1  f2   f3  f4              of all positions that have been read

A row holds the committed path only: accepted tokens and those that replaced a rejected draft token. States after a
rejected draft token condition on text that the target does not write; a draft that reaches them has ended before.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from draftsmith.decode.sampling import Sampling
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.eval.teacher_forced import TargetText
from draftsmith.heads.base import TeacherSignals

# Shapes: B rows, T positions, n decoded positions, H hidden size, F size of the features.

ROW_TOKENS = 64
"""Decoded tokens of a row; longer texts are divided."""
CONTEXT = 32
"""Tokens before them that a row keeps, for drafters that attend to the text: they cost as much as trained ones."""
LEAST_TOKENS = 4
"""Decoded tokens of a row at least: shorter ones hold hardly any draft."""
BLOCK_ROWS = 8
"""Consecutive rows of a text that count as one observation: they are alike."""


States = Callable[[int, int], tuple[Tensor, Tensor | None]]
"""Returns the inputs of the lm_head and the features (None if the drafter reads none) from one position to another."""


@dataclass(frozen=True, eq=False)
class Row:
    """A piece of decoded text with the target's states."""

    text: TargetText
    hidden_nH: Tensor
    """Inputs of the lm_head at the last positions up to T - 2, from prompt_length - 1 or earlier."""
    features_TF: Tensor | None
    """Features at positions 0 to T - 2; None where the drafter reads none."""
    sampling: Sampling
    block: tuple[int, int] = (0, 0)
    """Number of the text, and of the block of `BLOCK_ROWS` rows in it."""

    @property
    def bytes(self) -> int:
        """Memory of the row."""
        tensors = {id(tensor): tensor for tensor in (self.hidden_nH, self.features_TF) if tensor is not None}.values()
        return 8 * len(self.text.tokens) + sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass
class OpenRow:
    """The row of a text that is still decoded.

    Args:
        context: tokens before the decoded ones that are kept; 0 for drafters that read one position at a time.
        final: the features are the inputs of the lm_head, which are then known in the prompt too, and stored once.
        number: of the text, see `Row.block`.
    """

    sequence: DecodeSequence
    sampling: Sampling
    context: int
    final: bool = False
    number: int = 0
    rows: int = 0
    """Rows of the text that were closed."""
    prompt_length: int = 0
    """Position of the first decoded token of this row."""
    start: int = 0
    """Position of the first token that the row keeps."""
    hidden: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    reads: int = 0
    """Calls of `add` for this text: one for its prompt and one for each round."""
    committed: int = 0
    """Tokens that its rounds have committed."""

    def __post_init__(self) -> None:
        self._begin(len(self.sequence.tokens))

    @property
    def decoded(self) -> int:
        """Number of decoded tokens of this row."""
        return len(self.sequence.tokens) - self.prompt_length

    def add(self, hidden_nH: Tensor, features_nF: Tensor | None) -> None:
        """Copy the states of the tokens that the target has just read."""
        self.committed += len(hidden_nH) if self.reads else 0
        self.reads += 1
        if not self.final:
            self.hidden.append(hidden_nH.clone())
        if features_nF is not None:
            skipped = 0 if self.features else max(len(features_nF) - 1 - self.context, 0)
            self.features.append(features_nF[skipped:].clone())

    @torch.inference_mode(False)  # inference tensors cannot be trained on; what is joined from them here can
    def close(self) -> Row | None:
        """Return the row so far, None for one that is too short; and continue with a new one."""
        tokens, first = self.sequence.tokens, self.prompt_length
        features = torch.cat(self.features) if self.features else None
        row = None
        if self.decoded >= LEAST_TOKENS and not self.sequence.inputs:
            own = tokens[self.start :]
            text = TargetText(own, first - self.start, self.sequence.max_length - self.start, self.sequence.source)
            # A text may have ended inside a draft: then states follow its last token.
            read_TF = None if features is None else features[: len(own) - 1]
            hidden_nH = None if self.final else torch.cat(self.hidden)[: len(tokens) - first]
            states_nH = cast(Tensor, read_TF if hidden_nH is None else hidden_nH)
            row = Row(text, states_nH, read_TF, self.sampling, (self.number, self.rows // BLOCK_ROWS))
            self.rows += 1
        self._begin(len(tokens))
        self.hidden, self.features = [], []
        if features is not None:
            self.features = [features[-max(self.prompt_length - 1 - self.start, 1) :].clone()]
        return row

    def _begin(self, length: int) -> None:
        self.prompt_length, self.start = length, max(length - 1 - self.context, 0)


def rows_of(
    text: TargetText, states: States, sampling: Sampling, context: int, final: bool, number: int
) -> Iterator[Row]:
    """Divide a text whose states are known into rows, as `OpenRow` does while it is decoded."""
    for place, start in enumerate(range(text.prompt_length, len(text.tokens), ROW_TOKENS)):
        tokens = text.tokens[: start + ROW_TOKENS]
        begin = max(start - 1 - context, 0)
        if len(tokens) - start < LEAST_TOKENS:
            continue
        hidden_nH, features_nF = states(begin, len(tokens) - 1)
        known_nF = None if features_nF is None else features_nF.clone()
        hidden_nH = cast(Tensor, known_nF) if final else hidden_nH[start - 1 - begin :].clone()
        own = TargetText(tokens[begin:], start - begin, text.max_length - begin, text.source)
        yield Row(own, hidden_nH, known_nF, sampling, (number, place // BLOCK_ROWS))


class RowBuffer:
    """The most recent rows, as many as fit into `limit` bytes, but at most `most`."""

    def __init__(self, limit: int, most: int | None = None) -> None:
        self._rows: deque[Row] = deque()
        self._limit, self._most, self.bytes = limit, most, 0

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __getitem__(self, place: int) -> Row:
        return self._rows[place]

    def add(self, row: Row) -> None:
        """Append a row, and drop the oldest ones that no longer fit."""
        self._rows.append(row)
        self.bytes += row.bytes
        while self._rows and (self.bytes > self._limit or len(self._rows) > (self._most or len(self._rows))):
            self.bytes -= self._rows.popleft().bytes


def signals_of(rows: Sequence[Row], device: torch.device) -> TeacherSignals:
    """Return the stored signals of some rows as a batch; trained are the positions from their first decoded token."""
    ids_BT = _padded([torch.tensor(row.text.tokens) for row in rows]).to(device)
    T = ids_BT.shape[1]
    attention_BT, mask_BT = torch.zeros_like(ids_BT), torch.zeros_like(ids_BT, dtype=torch.bool)
    hidden = []
    for number, row in enumerate(rows):
        first, length, known = row.text.prompt_length, len(row.text.tokens), len(row.hidden_nH)
        attention_BT[number, :length] = 1
        mask_BT[number, first : length - 1] = True
        hidden.append(nn.functional.pad(row.hidden_nH, (0, 0, length - 1 - known, T - length + 1)))
    features = [row.features_TF for row in rows if row.features_TF is not None]
    features_BTF = None
    if features:
        features_BTF = torch.stack([nn.functional.pad(one, (0, 0, 0, T - len(one))) for one in features])
    sources = None, None
    if rows[0].text.source:
        source_BS = _padded([torch.tensor(row.text.source) for row in rows]).to(device)
        source_mask_BS = _padded([torch.ones(len(row.text.source), dtype=torch.int64) for row in rows]).to(device)
        sources = source_BS, source_mask_BS
    return TeacherSignals(ids_BT, attention_BT, torch.stack(hidden), mask_BT, features_BTF, *sources)


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
