"""Drafters that feed their own state back: EAGLE, HASS, EAGLE-3, MTP. One file each describes its network.

    target's features  f0   f1   f2                     drafter's states  s3    s4
                        │    │    │                                        │     │
    tokens         x1 ──┤x2 ─┤x3 ─┤ ──▶ s3 ──▶ d1 = x4?   d1 ─────────────┤ d2 ─┤ ──▶ s5 ──▶ d3
                        └────┴────┴── committed: with the target's         └─────┴── drafted: with its own

What is committed is read again with the target's features, so errors never outlive a round.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from draftsmith.errors import ConfigError
from draftsmith.heads.body import Body, BodyDrafter
from draftsmith.heads.documents import positions_like
from draftsmith.heads.draft import ROOT
from draftsmith.heads.drafter import Context, TeacherSignals, Tree, Unrolled
from draftsmith.heads.layers import UnrolledAttention

# Shapes: B rows, T positions, n nodes, H hidden size.


class Recurrent(BodyDrafter):
    """Drives a `Body` step by step, on text and on trees."""

    regresses: ClassVar[bool] = False
    """States are guesses of the target's final hidden state."""

    def __init__(self, body: Body, layers: tuple[int, ...], train_steps: int) -> None:
        super().__init__(body, layers)
        if train_steps < 1:
            raise ConfigError.of("drafter.train_steps", train_steps, ">= 1")
        self.train_steps = train_steps

    def start(self, context: Context) -> None:
        super().start(context)
        self._reader = context.reader(self.body)
        self._states: list[dict[int, Tensor]] = [{} for _ in context.texts]
        # All of the prompt but its last token, whose logits `begin` returns.
        unread = [text.tokens[1:-1] for text in context.texts]
        if any(unread):
            self._read(unread)

    def begin(self, rows: list[int]) -> Tensor:
        unread: list[list[int]] = [[] for _ in self.context.texts]
        for row in rows:
            unread[row] = self.context.texts[row].tokens[self._reader.lengths[row] + 1 :]
        logits_BV = self._read(unread)
        self._states = [{ROOT: state_1H[0]} for state_1H in self._reader.states]
        return logits_BV

    def _read(self, tokens: list[list[int]]) -> Tensor:
        """Read committed tokens, each with the target's features of the token before it."""
        features = [text.take_features(len(row)) for text, row in zip(self.context.texts, tokens, strict=True)]
        states = [self.body.project(features_nF.to(self.body.dtype)) for features_nF in features]
        return self._reader.append(tokens, states)

    def extend(self, trees: Sequence[Tree], nodes: list[list[int]]) -> list[Tensor]:
        width = self.body.config.hidden_size
        parents = []
        for row, (tree, wanted) in enumerate(zip(trees, nodes, strict=True)):
            states = [self._states[row][tree.parents[node]] for node in wanted]
            parents.append(torch.stack(states) if states else self._reader.states[row].new_empty(0, width))
        logits = self._reader.branch(trees, nodes, parents)
        for row, wanted in enumerate(nodes):
            self._states[row].update(zip(wanted, self._reader.states[row], strict=True))
        return logits

    def observe(self, paths: list[list[int]]) -> None:
        self._reader.commit([[] for _ in paths])

    def drop(self, rows: list[int]) -> None:
        self._reader.drop(rows)

    def unroll(self, signals: TeacherSignals) -> list[Unrolled]:
        """The training-time test: each step reads the last one's states, as in decoding; step k has offset k + 1."""
        body, ids_BT = self.body, signals.input_ids_BT
        states_BTH = self._teacher_states(signals)
        positions_BT = positions_like(ids_BT, signals.documents_BT)
        tokens = None if body.vocabulary is None else body.vocabulary.tokens_D
        attend, unrolled = UnrolledAttention(signals.documents_BT), []
        for k in range(self.train_steps):
            embeds_BTH = body.embed(shifted(ids_BT, k + 1))
            rope = body.rotary(embeds_BTH, positions_BT + k)
            states_BTH = body.step(embeds_BTH, states_BTH, rope, attend)
            unrolled.append(
                Unrolled(
                    states_BTH,
                    body.head,
                    offset=k + 1,
                    vocabulary_D=tokens,
                    regresses=self.regresses,
                    head_parameters=body.head_parameters(),
                )
            )
        return unrolled

    def _teacher_states(self, signals: TeacherSignals) -> Tensor:
        return self.body.project(signals.features_BTF.to(self.body.dtype))

    def options(self) -> dict[str, Any]:
        return {"train_steps": self.train_steps}


def shifted(ids_BT: Tensor, by: int) -> Tensor:
    """Ids moved left; zeros fill the end, where nothing is trained."""
    by = min(by, ids_BT.shape[1])
    return nn.functional.pad(ids_BT[:, by:], (0, by))
