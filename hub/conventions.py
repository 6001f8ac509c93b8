"""The self-test of an imported drafter: its alpha as it was read, and under the conventions nearest to that.

No tensor shows which layer an id means, or which position of a block predicts the first token. A drafter that is read
by another convention than it was trained with loads, and drafts badly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.sampling import Sampling
from draftsmith.distill.chat_template import Chat
from draftsmith.distill.conversation import question
from draftsmith.distill.draft_probabilities import at_least_float32
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.errors import ConfigError
from draftsmith.eval.prompts import PromptRows
from draftsmith.eval.teacher_forced import ChunkLogits, TargetText, agreement_of, sample_texts, signals_of, unrollable
from draftsmith.heads.base import TrainableDrafter
from draftsmith.heads.dflash import DFlash
from draftsmith.heads.model_config import context_limit, text_config

# Shapes: U texts, A anchors of a text, N those of all texts, K draft positions, V vocabulary.

PROMPTS = (
    "Once upon a time",
    "The capital of France is",
    "def main(arguments):",
    "Question: what is 7 times 8?\nAnswer:",
    "Dear all, thank you for",
    "1. Wash the vegetables",
    "In this paper, we show that",
    "Yesterday evening the weather",
)
FIRST = "sample_from_anchor"
"""The key of the first position of a block that predicts."""
COUNT = 32
"""Most prompts of a file or a data set."""
TOKENS = 48
"""Tokens that the target continues each prompt with, at temperature 1."""
POSITIONS = 4
"""Draft positions that are compared, if the drafter has as many: the first does not read states that are fed back."""
GAIN, ERRORS, FEWEST = 0.005, 4.0, 6
"""How much higher alpha must be under another convention to be reported: absolutely, and in standard errors, which at
least this many texts give. For 8 texts, 4 standard errors are the 95 % interval of ten conventions together."""
LEAST = 0.25
"""Alpha at the first draft position that published drafters exceed on texts of their target: 0.5 to 0.8 on those that
they are trained for."""


@dataclass(frozen=True)
class ConventionAlpha:
    """Alpha under one convention."""

    convention: str
    alphas: tuple[float, ...]
    """Mean over the texts at each draft position."""
    tokens: int
    texts: int
    gain: float = 0.0
    """Difference of alpha, as a mean over the draft positions, from that of the drafter as it was read."""
    interval: float = 0.0
    """Half of the width of the gain's interval; infinite for too few texts."""

    @property
    def better(self) -> bool:
        """Whether alpha is clearly higher than as the drafter was read."""
        return self.gain > max(GAIN, self.interval)

    @property
    def worse(self) -> bool:
        """Whether alpha is clearly lower than as the drafter was read."""
        return -self.gain > max(GAIN, self.interval)

    @property
    def alpha(self) -> float:
        """Alpha at the first draft position."""
        return self.alphas[0]

    @property
    def shown(self) -> str:
        """Alpha by draft position, in words."""
        first, last = (f"{alpha:.3f}" for alpha in (self.alphas[0], self.alphas[-1]))
        return f"{first} at the first draft position" + (
            f" and {last} at position {len(self.alphas)}" if len(self.alphas) > 1 else ""
        )


class Change(NamedTuple):
    """Another convention of a drafter: the layers that it reads, or the first position of a block that predicts."""

    convention: str
    layers: tuple[int, ...]
    first: int | None = None


def prompts_of(
    source: str | None, tokenizer: PreTrainedTokenizerBase, context: int | None, chat_template: str | None = None
) -> tuple[list[list[int]], list[str]]:
    """Return the prompts of the self-test as token ids, and notes; see `PromptRows` for `source` and the errors.

    By default, without a source, these are `PROMPTS`, as questions where the target has a chat template.
    """
    if source is None:
        chats = bool(chat_template or tokenizer.chat_template)
        rows = [{"messages": [{"role": "user", "content": text}]} if chats else {"prompt": text} for text in PROMPTS]
        return [Chat(tokenizer, chat_template).prompt(question("self-test", row)) for row in rows], []
    rows = PromptRows.read(source)
    if rows.images:
        raise ConfigError(f"prompts={source} has images; expected prompts of text for the self-test")
    prompts, notes = rows.encode(tokenizer, count=COUNT, context=context, chat_template=chat_template)
    return [prompt.input_ids for prompt in prompts], notes


def readings_of(
    target: PreTrainedModel, drafter: TrainableDrafter, prompts: Sequence[list[int]]
) -> list[ConventionAlpha]:
    """Return the reading of `drafter` as it is, then those of the conventions nearest to its own.

    None are returned where no text has room for a draft: the contexts are too short, or the target ends at once.

    Args:
        drafter: attached to `target`; unchanged on return.
        prompts: token ids, which the target continues.
    """
    limits = [limit for limit in (context_limit(target.config), drafter.context_limit) if limit is not None]
    prompts = [ids for ids in prompts if ids and all(len(ids) < limit for limit in limits)]
    whole = [ids for ids in prompts if all(len(ids) + TOKENS <= limit for limit in limits)]
    prompts = whole if len(whole) >= FEWEST else prompts
    room = min([TOKENS, *(limit - len(ids) for limit in limits for ids in prompts)])
    texts = sample_texts(target, prompts, Sampling(1.0), max_new_tokens=room)
    if not any(text.anchors for text in texts):
        return []
    changes = [*_changes(target, drafter)]
    compared = _Alphas(target, drafter, texts, [change.layers for change in changes])
    own = compared.under(Change("as read", drafter.needs.layers))
    size = {"tokens": sum(map(len, own)), "texts": len(own)}
    found = [ConventionAlpha("as read", _means(own), **size)]
    for change in changes:
        changed = compared.under(change)
        gain, error = mean_of_texts([np.nanmean(after - before, 1) for before, after in zip(own, changed, strict=True)])
        found.append(ConventionAlpha(change.convention, _means(changed), **size, gain=gain, interval=ERRORS * error))
    return found


def settle(drafter: TrainableDrafter, readings: Sequence[ConventionAlpha]) -> list[str]:
    """Give `drafter` the first position that fits the target's text, if that is unstated, and return a line on it.

    Raises:
        ConfigError: where the readings do not tell which value fits.
    """
    if not drafter.unstated:
        return []
    assert isinstance(drafter, DFlash), "a key of block drafters"
    other = next((reading for reading in readings if reading.convention.startswith(f"{FIRST}=")), None)
    if other is None or not (other.better or other.worse):
        found = "no text to tell" if other is None else f"{other.gain:+.3f} ± {other.interval:.3f} of alpha between"
        raise ConfigError(
            f"{FIRST} is missing in config.json, and the self-test does not show it ({found} true and false); "
            "expected true or false there, or more --prompts"
        )
    if other.better:
        drafter.body.first = 1 - drafter.body.first
        drafter.max_draft_length = drafter.steps
    drafter.unstated = ()
    fits, less = sorted((readings[0].alpha, other.alpha), reverse=True)
    return [
        f"self-test: {FIRST} is missing in config.json; {str(drafter.body.first == 0).lower()} fits the target's text "
        f"(alpha {fits:.3f} at the first draft position, otherwise {less:.3f})"
    ]


def mean_of_texts(gains: Sequence[NDArray]) -> tuple[float, float]:
    """Return the mean of the gains of all texts' positions, and its standard error: texts are independent, positions
    of a text are not (Cochran 1977, section 6.3)."""
    sums_U, sizes_U = (np.array([of(gains_A) for gains_A in gains]) for of in (np.sum, len))
    mean, U = sums_U.sum() / sizes_U.sum(), len(gains)
    if U < FEWEST:
        return float(mean), float("inf")
    spread = ((sums_U - mean * sizes_U) ** 2).sum() * U / (U - 1)
    return float(mean), float(spread**0.5 / sizes_U.sum())


def self_test_lines(readings: Sequence[ConventionAlpha]) -> list[str]:
    """Return the lines that say what the self-test found: alpha, a better convention, an alpha that is too low."""
    if not readings:
        return []
    own, *others = readings
    lines = [f"self-test: alpha {own.shown}, {own.tokens} tokens of {own.texts} texts"]
    better = max((other for other in others if other.better), key=lambda other: sum(other.alphas), default=None)
    if better is not None:
        said = f"alpha would be {better.shown} with {better.convention}, a gain of {better.gain:.3f} "
        said += f"± {better.interval:.3f}"
        lines.append(f"warning: {said}: config.json may mean another convention than the one it was read by")
    elif own.alpha < LEAST:
        lines.append(
            f"warning: alpha {own.alpha:.3f} is far below that of published drafters (at least {LEAST}), and no "
            "convention that was tried is better: the target may be another one, the training short, or the file wrong"
        )
    return lines


def _means(alphas: Sequence[NDArray]) -> tuple[float, ...]:
    return tuple(float(np.nanmean(alphas_N)) for alphas_N in np.concatenate(alphas).T)


class _Alphas:
    """Alphas of a drafter on texts of the target, which reads them once, for the features of all conventions."""

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: TrainableDrafter,
        texts: Sequence[TargetText],
        layers: Sequence[tuple[int, ...]],
    ) -> None:
        most = max(text.anchors for text in texts)
        self._positions = min(POSITIONS, drafter.max_draft_length or POSITIONS, most)
        self._drafter, self._texts = drafter, texts
        self._layers = tuple(dict.fromkeys(layer for row in (drafter.needs.layers, *layers) for layer in row))
        self._teacher = OnlineTeacher(target, self._layers)
        with torch.inference_mode():
            self._signals = signals_of(self._teacher, [*texts])

    @torch.inference_mode()
    def under(self, change: Change) -> list[NDArray[np.float64]]:
        """Return the sum over v of min(p_v, q_v) at temperature 1, [A, K] of each text; NaN after its end."""
        signals = self._signals
        if signals.features_BTF is not None:
            by_layer = dict(zip(self._layers, signals.features_BTF.chunk(len(self._layers), -1), strict=True))
            signals = replace(signals, features_BTF=torch.cat([by_layer[layer] for layer in change.layers], -1))
        body = self._drafter.body if isinstance(self._drafter, DFlash) else None
        before = 0 if body is None else body.first
        if body is not None and change.first is not None:
            body.first = change.first
        try:
            drafter = unrollable(self._drafter, self._positions, self._texts)
            tables = agreement_of(signals, self._teacher.lm_head, drafter, [*self._texts], self._positions, _alpha)
        finally:
            if body is not None:
                body.first = before
        rows: list[NDArray[np.float64]] = []
        for table in (stats["alpha"] for stats in tables if stats):
            left_AK = np.arange(len(table))[::-1, None] >= np.arange(table.shape[1])
            rows.append(np.where(left_AK, table, np.nan))
        return rows


def _alpha(rows: ChunkLogits) -> dict[str, Tensor]:
    p_NV, q_NV = (at_least_float32(logits_NV).softmax(-1) for logits_NV in (rows.p_NV, rows.q_NV))
    return {"alpha": torch.minimum(p_NV, q_NV).sum(-1)}


def _changes(target: PreTrainedModel, drafter: TrainableDrafter) -> Iterator[Change]:
    """Yield the conventions nearest to the drafter's own."""
    layers = drafter.needs.layers
    for convention, others in _other_layers(layers, text_config(target).num_hidden_layers):
        yield Change(convention, others)
    if isinstance(drafter, DFlash):
        first = drafter.body.first
        yield Change(f"{FIRST}={first == 1}", layers, 1 - first)


def _other_layers(layers: tuple[int, ...], depth: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the layers that the drafter may have been trained with: all ids or one of them shifted by one; reversed."""
    if not layers or not _within(layers, depth):
        return
    tried = {layers}
    for shift, words in ((-1, "lower"), (1, "higher")):
        options = [(f"layer ids one {words}", tuple(layer + shift for layer in layers))]
        for index, layer in enumerate(layers):
            one = (*layers[:index], layer + shift, *layers[index + 1 :])
            options.append((f"layer id {layer + shift} in place of {layer}", one))
        for convention, others in options:
            if others not in tried and _within(others, depth):
                tried.add(others)
                yield convention, others
    if layers[::-1] not in tried:
        yield "layer ids in reverse", layers[::-1]


def _within(layers: Sequence[int], depth: int) -> bool:
    return all(1 <= layer <= depth for layer in layers)
