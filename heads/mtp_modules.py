"""Decoding with several multi-token prediction modules: module k drafts token k from the states of module k - 1.

    module 0    f0,x1   f1,x2   f2,x3 ──▶ d1            f    final states of the target
    module 1            s1,x2   s2,x3   s3,d1 ──▶ d2    s, u states of modules 0 and 1
    module 2                    u2,x3   u3,d1   u4,d2 ──▶ d3

Each module has a cache of its own, whose first token is one later than in the module before. A draft ends with the last
module, as in transformers' `MtpModel` and SGLang's multi-layer worker, whose states these are. DeepSeek-AI 2024
(DeepSeek-V3), arXiv:2412.19437, section 2.2.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftsmith.heads.base import Level, Runner
from draftsmith.heads.rows import Columns, Counts, Rows, rows_of

# Shapes: B rows, Q tokens read, n nodes, K modules, H hidden size.


class ModuleRunner:
    """Runs the modules with one runner each, in place of the runner of one network; see `Runner`.

    `states` are those of all modules, side by side: [B, K * H] or [B, n, K * H].

    Args:
        runners: of networks that return states in place of logits.
        head: maps states to logits.
        blank_BH: states of texts that are too short for a module. Its logits have no meaning there.
    """

    def __init__(self, runners: Sequence[Runner], head: Callable[[Tensor], Tensor], blank_BH: Tensor) -> None:
        self._runners, self._head = runners, head
        self._last = [blank_BH] * len(runners)
        """The state of each module after the last token that it has read of each row."""
        self.states = torch.cat(self._last, -1)

    @property
    def lengths(self) -> Sequence[int]:
        return self._runners[0].lengths

    def append(self, tokens: Sequence[list[int]], features_BQF: Tensor) -> Tensor:
        """Read committed tokens and return the logits [B, V] after the last one of each row."""
        rows = Rows.of(tokens, features_BQF.device)
        for k, runner in enumerate(self._runners):
            if not rows.width:
                break
            is_first = [int(length == 0) for length in runner.lengths]
            states_BQH = runner.append(rows, features_BQF, every=True)
            states_BQH = torch.cat([self._last[k][:, None], states_BQH], 1)
            self._last[k] = Columns(rows.counts).of(states_BQH)[:, 0]
            # The next module reads each token with the state at the token before, which the first one does not have.
            if any(is_first):
                rows = Rows([row[skip:] for row, skip in zip(rows, is_first, strict=True)], rows.device)
            features_BQF = Columns(Counts(is_first, rows.device), rows.width).of(states_BQH)
        self.states = torch.cat(self._last, -1)
        return self._head(self._last[0])

    def extend(self, level: Level, features_BnF: Tensor) -> Tensor:
        """Read the next level with its parents' states, and return the logits [B, n, V] after it."""
        states = list(features_BnF.chunk(len(self._runners), -1))
        states[level.depth :] = [
            runner.extend(level, before_BnH)
            for runner, before_BnH in zip(self._runners[level.depth :], states[level.depth - 1 :], strict=False)
        ]
        self.states = torch.cat(states, -1)
        return self._head(states[level.depth])

    def commit(self, slots: Sequence[list[int]]) -> None:
        """End the round: keep these draft slots of each row."""
        for runner in self._runners:
            runner.commit(slots)

    def drop(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        for runner in self._runners:
            runner.drop(rows)
        self._last = [rows_of(state_BH, rows) for state_BH in self._last]
