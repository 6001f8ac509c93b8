"""Run only the drafter along a known text: exact rounds for policies whose draft tokens are chosen, not sampled.

Acceptance of a chosen tree depends only on the target's tokens. The decode loop therefore runs with a target that
returns the known text's next token, and the hidden states of one teacher-forced pass.
"""

from collections.abc import Callable, Sequence
from contextlib import closing

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.policies import Policy
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.sequence import DecodeSequence, Round, Stops
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.eval.teacher_forced import TargetText, states_of, vocabulary_size
from draftsmith.heads.base import Drafter, SequenceState
from draftsmith.heads.draft_tree import ROOT, Parents, depths_of, path_to

# Shapes: B texts, T positions, N draft nodes, H hidden size, F features, V vocabulary.


class KnownTarget:
    """A `Target` for known texts: its p assigns probability 1 to their next token."""

    context_limit: int | None = None

    def __init__(self, texts: list[TargetText], states: list[tuple[Tensor, Tensor | None]], vocab_size: int) -> None:
        self._texts, self._states, self._vocab_size = list(texts), list(states), vocab_size
        self._read: list[int] = []
        """Index of the last committed token that each row has read."""

    def prefill(self, texts: Sequence[SequenceState], layers: tuple[int, ...] = ()) -> Tensor:
        self._read = [text.prompt_length - 1 for text in self._texts]
        return torch.stack([self._next(row, []) for row in range(len(self._texts))])

    def verify(self, tokens_BQ: Tensor, shapes: Sequence[Parents]) -> Tensor:
        self._read = [read + 1 for read in self._read]
        shapes = list(shapes) if len(shapes) == len(self._texts) else [shapes[0]] * len(self._texts)
        self._depths = [depths_of(shape) for shape in shapes]
        logits_BQV = torch.zeros(*tokens_BQ.shape, self._vocab_size)
        for row, (tokens, shape) in enumerate(zip(tokens_BQ.tolist(), shapes, strict=True)):
            for node in range(ROOT, len(shape)):
                logits_BQV[row, node + 1] = self._next(row, [tokens[step + 1] for step in path_to(shape, node)])
        return logits_BQV

    def _next(self, row: int, path: list[int]) -> Tensor:
        """Return logits [V] after a path of draft tokens; uniform where it leaves the text or its end."""
        logits_V = torch.zeros(self._vocab_size)
        tokens, read = self._texts[row].tokens, self._read[row]
        following = read + 1 + len(path)
        if tokens[read + 1 : following] == path and following < len(tokens):
            logits_V.fill_(-torch.inf)
            logits_V[tokens[following]] = 0.0
        return logits_V

    def commit(self, paths: Sequence[list[int]]) -> None:
        self._read = [read + len(path) for read, path in zip(self._read, paths, strict=True)]

    def hidden(self, nodes: Sequence[int]) -> Tensor:
        rows = []
        for row, node in enumerate(nodes):
            depth = 0 if node == ROOT else self._depths[row][node]
            hidden_TH = self._states[row][0]
            # States after the end of the text are never used.
            rows.append(hidden_TH[min(self._read[row] + depth, len(hidden_TH) - 1)])
        return torch.stack(rows)

    def states(self, paths: list[list[int]] | None) -> Tensor:
        counts = [1 if paths is None else 1 + len(paths[row]) for row in range(len(self._read))]
        hidden = [
            states[read : read + n] for (states, _), read, n in zip(self._states, self._read, counts, strict=True)
        ]
        return nn.utils.rnn.pad_sequence(hidden, batch_first=True)

    def features(self, paths: Sequence[list[int]] | None) -> Tensor | None:
        features = [features_TF for _, features_TF in self._states if features_TF is not None]
        if not features:
            return None
        starts = [0] * len(features) if paths is None else self._read
        parts = [of_text[start:end] for of_text, start, end in zip(features, starts, self._ends(paths), strict=True)]
        return nn.utils.rnn.pad_sequence(parts, batch_first=True)

    def _ends(self, paths: Sequence[list[int]] | None) -> list[int]:
        """Return for each text the position after the last token of its path."""
        return [read + 1 + (0 if paths is None else len(paths[row])) for row, read in enumerate(self._read)]

    def drop(self, rows: list[int]) -> None:
        self._texts, self._states = [self._texts[row] for row in rows], [self._states[row] for row in rows]
        self._read = [self._read[row] for row in rows]


@torch.inference_mode()
def replay(
    target: PreTrainedModel,
    drafter: Drafter,
    policy: Policy,
    texts: Sequence[TargetText],
    sampling: Sampling,
    together: int,
    done: Callable[..., None] = lambda texts=1: None,
) -> list[list[Round]]:
    """Return the rounds in which the decoder would generate each text, `together` texts at a time.

    Only for policies whose draft tokens are chosen, not sampled. Seconds and `overlap` of these rounds are meaningless.
    `done` is called with the number of texts of each batch.
    """
    teacher = OnlineTeacher(target, drafter.needs.layers)
    rounds: list[list[Round]] = []
    for start in range(0, len(texts), together):
        batch = list(texts[start : start + together])
        known = KnownTarget(batch, [states_of(teacher, text) for text in batch], vocabulary_size(target))
        rows = [_row(number, text) for number, text in enumerate(batch)]
        decoding = DecodeLoop(known, drafter, policy, rows, Processors(sampling, texts=len(rows)))
        with closing(decoding):
            decoding.prefill()
            while decoding.texts:
                decoding.round()
        rounds += [row.rounds for row in rows]
        done(len(rows))
    return rounds


def _row(number: int, text: TargetText) -> DecodeSequence:
    # A text shorter than its limit ended with an EOS.
    ends = frozenset(text.tokens[-1:] if len(text.tokens) < text.max_length else [])
    prompt = text.tokens[: text.prompt_length]
    return DecodeSequence(prompt, text.max_length, 0, Stops(ends), source=text.source, number=number)
