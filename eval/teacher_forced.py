"""Teacher-forced comparison of target and drafter on texts of the target, at every draft position.

A row of the result is an anchor, the last committed token of a round; column k is draft position k + 1, given that the
draft so far equals the text. For a draft model q depends only on the tokens, so one pass gives all anchors. Heads and
autoregressive drafters read the target's states up to the anchor and their own states after it: they are unrolled from
every anchor, with the same attention as in decoding.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.drafts.builder import fitted
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.distill.teacher import Batch, OnlineTeacher, TargetHead
from draftsmith.errors import ConfigError
from draftsmith.heads.autoregressive import AutoregressiveDrafter
from draftsmith.heads.base import Drafter, DraftStates, TeacherSignals, TrainableDrafter
from draftsmith.heads.dflash import DFlash
from draftsmith.heads.model_config import context_limit, start_token
from draftsmith.heads.retrieval import Hybrid

TOGETHER = 16
"""Texts that are decoded in one batch."""


@dataclass(frozen=True)
class TargetText:
    """A decoded text. A round may begin after every new token except the last."""

    tokens: list[int]
    """The prompt and its continuation; for an encoder-decoder target the decoder's tokens, the start token first."""
    prompt_length: int
    max_length: int
    """Length at which decoding stops without an EOS; it limits drafts near the end."""
    source: list[int] = field(default_factory=list)
    """Tokens of the encoder; empty for decoder-only targets."""

    @property
    def anchors(self) -> int:
        """Number of committed tokens after which a round may begin: all new ones except the last."""
        return max(len(self.tokens) - 1 - self.prompt_length, 0)

    @property
    def decode_tokens(self) -> int:
        """Number of tokens that rounds commit: all new ones except the first, which the prefill gives."""
        return self.anchors

    def room(self, anchor: int) -> int:
        """Return the longest draft that the decoder allows from this anchor, counted from 0."""
        return self.max_length - (self.prompt_length + anchor + 1) - 1


def sample_texts(
    target: PreTrainedModel,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    seed: int = 0,
    done: Callable[..., None] = lambda tokens=1: None,
) -> list[TargetText]:
    """Return continuations by the target; prompt i has seed `seed + i`.

    `done` is called with counts of tokens, in total `max_new_tokens` for each prompt.
    """
    decoder = SpeculativeDecoder(target)
    settings = {"max_new_tokens": max_new_tokens, "temperature": sampling.temperature}
    if not sampling.greedy:
        settings |= {"top_k": sampling.top_k, "top_p": sampling.top_p}
    texts: list[TargetText] = []
    for start in range(0, len(prompts), TOGETHER):
        rows = list(prompts[start : start + TOGETHER])
        outputs = decoder.generate_batch(
            rows, seeds=seed + start, on_tokens=lambda _, tokens, record: done(len(tokens)), **settings
        )
        done(sum(max_new_tokens - len(out.tokens) for out in outputs))
        texts += [target_text(target, out.prompt_tokens, out.tokens, max_new_tokens) for out in outputs]
    return texts


def target_text(target: PreTrainedModel, prompt: list[int], new: list[int], max_new_tokens: int) -> TargetText:
    """Return the text with new tokens `new` after `prompt`, the encoder's input or the beginning of the text."""
    source: list[int] = []
    if target.config.is_encoder_decoder:
        source, prompt = prompt, [start_token(target)]
    longest = min(len(prompt) + max_new_tokens, context_limit(target.config) or len(prompt) + max_new_tokens)
    return TargetText([*prompt, *new], len(prompt), longest, source)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of logits that the target gives for a token: the rows of its lm_head."""
    lm_head = model.get_output_embeddings()
    assert lm_head is not None, "targets without an lm_head are refused when they are loaded"
    return lm_head.weight.shape[0]


# Shapes: B texts, T positions, A anchors of one text, K draft positions, N states of one draft position or of a chunk,
# V vocabulary of the target, H its hidden size, D the drafter's.

CHUNK = 2**23
"""Largest number of logits [N, V] in memory at a time."""
BLOCK = 2**20
"""Largest number of logits that measures read at a time on a CPU: what fits its caches takes a third of the time."""
BATCH = 16
LEAST_LOG = -80.0
"""Lower bound of the log-probability of the text's token: rounding may let top-k or top-p cut a sampled token."""


class ChunkLogits(NamedTuple):
    """Logits of target and drafter for one chunk of positions, before any processor."""

    p_NV: Tensor
    q_NV: Tensor
    """Over the target's vocabulary; -inf for tokens outside the drafter's vocabulary."""
    labels_N: Tensor
    """The text's token at each position."""
    sure_N: Tensor | None
    """The drafter's estimate of the probability that its token is accepted; None without such an estimate."""


Measure = Callable[[ChunkLogits], dict[str, Tensor]]
"""Computes statistics [N] of a chunk by name."""
Done = Callable[[float], None]
PositionStats = dict[str, NDArray[np.float64]]
"""The statistics of a text by name, [A, K]; positions after the end of the text are 0."""


def acceptance_measure(processors: Processors) -> Measure:
    """Return a measure of the statistics that acceptance depends on, after temperature, top-k and top-p.

    log_p, log_q   log-probabilities of the text's token; greedy: 0, and 0 for the drafter's argmax, -inf otherwise
    rank           rank of the text's token in q, 0 for the most likely token; inf where q is zero
    sure           the drafter's estimate that its token is accepted; max q if it makes none
    """

    def measure(rows: ChunkLogits) -> dict[str, Tensor]:
        labels_N1 = rows.labels_N[:, None]
        q_NV = processors.scores(rows.q_NV)
        q_log_N1 = q_NV.log_softmax(-1).gather(1, labels_N1)
        own_N1 = q_NV.gather(1, labels_N1)
        # Equal scores are ordered by token id, as in argmax.
        before_NV = torch.arange(q_NV.shape[1], device=q_NV.device) < labels_N1
        rank_N = ((q_NV > own_N1) | ((q_NV == own_N1) & before_NV)).sum(-1).double()
        rank_N = rank_N.masked_fill(own_N1[:, 0].isneginf(), torch.inf)
        sure_N = q_NV.softmax(-1).amax(-1) if rows.sure_N is None else rows.sure_N
        if processors.greedy:
            log_q_N = torch.zeros_like(rank_N).masked_fill(rank_N > 0, -torch.inf)
            return {"log_p": torch.zeros_like(rank_N), "log_q": log_q_N, "rank": rank_N, "sure": sure_N}
        p_log_N1 = processors.scores(rows.p_NV).log_softmax(-1).gather(1, labels_N1).clamp_min(LEAST_LOG)
        return {"log_p": p_log_N1[:, 0], "log_q": q_log_N1[:, 0], "rank": rank_N, "sure": sure_N}

    return measure


def overlap_measure(processors: Processors) -> Measure:
    """Return a measure of log-probabilities of the text's token, of equal argmax, and of sum_v min(p, q)."""

    def measure(rows: ChunkLogits) -> dict[str, Tensor]:
        p_NV, q_NV = (processors.scores(logits_NV).softmax(-1) for logits_NV in (rows.p_NV, rows.q_NV))
        own_p_N, own_q_N = (values_NV.gather(1, rows.labels_N[:, None])[:, 0] for values_NV in (p_NV, q_NV))
        match_N = rows.p_NV.argmax(-1) == rows.q_NV.argmax(-1)
        overlap_N = match_N.float() if processors.greedy else torch.minimum(p_NV, q_NV).sum(-1)
        log_p_N = own_p_N.log().clamp_min(LEAST_LOG)
        return {"log_p": log_p_N, "log_q": own_q_N.log(), "match": match_N.float(), "overlap": overlap_N}

    return measure


@torch.inference_mode()
def agreement(
    target: PreTrainedModel,
    drafter: Drafter,
    texts: Sequence[TargetText],
    draft_length: int,
    measure: Measure,
    done: Done = lambda _: None,
) -> list[PositionStats]:
    """Return the statistics of every text, [A, K] each; K is `draft_length`, or the drafter's maximum if that is less.

    `done` is called with the number of texts, or the part of one, that has been measured since the last call.

    Raises:
        ConfigError: for a drafter without logits, a target whose logits are not those of its lm_head, or texts that are
            longer than the drafter's context.
    """
    drafter = unrollable(drafter, draft_length, texts)
    positions = min(draft_length, drafter.max_draft_length or draft_length)
    teacher = OnlineTeacher(target, drafter.needs.layers)
    result: list[PositionStats] = []
    order = sorted(range(len(texts)), key=lambda index: len(texts[index].tokens))
    for start in range(0, len(texts), BATCH):
        batch = [texts[index] for index in order[start : start + BATCH]]
        signals = signals_of(teacher, batch)
        result += agreement_of(signals, teacher.lm_head, drafter, batch, positions, measure, done)
    return [stats for _, stats in sorted(zip(order, result, strict=True), key=lambda pair: pair[0])]


def unrollable(drafter: Drafter, draft_length: int, texts: Sequence[TargetText]) -> TrainableDrafter:
    """Return the drafter, or a shallow copy that unrolls `draft_length` positions from every anchor."""
    if isinstance(drafter, Hybrid):
        drafter = drafter.drafter
    if not isinstance(drafter, TrainableDrafter):
        raise ConfigError(f"drafter of type {drafter.type!r}; expected one with logits, not one that only retrieves")
    longest = max((len(text.tokens) for text in texts), default=0)
    if drafter.context_limit is not None and longest > drafter.context_limit:
        raise ConfigError(
            f"texts of {longest} tokens; expected at most the {drafter.type} drafter's context of "
            f"{drafter.context_limit}: shorten max_new_tokens or the prompts"
        )
    if isinstance(drafter, AutoregressiveDrafter):
        drafter = copy(drafter)
        drafter.train_steps = draft_length
    elif isinstance(drafter, DFlash):
        drafter = copy(drafter)
        drafter.anchors = longest
    return drafter


def signals_of(teacher: OnlineTeacher, texts: list[TargetText]) -> TeacherSignals:
    """Return the target's signals for a batch of texts, whose new tokens are marked."""
    device = next(teacher.model.parameters()).device
    ids_BT, attention_BT = _padded([text.tokens for text in texts], device)
    mask_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for row, text in enumerate(texts):
        mask_BT[row, text.prompt_length : len(text.tokens) - 1] = True
    sources = _padded([text.source for text in texts], device) if texts[0].source else (None, None)
    return teacher.signals(Batch(ids_BT, attention_BT, mask_BT, *sources))


def _padded(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows padded on the right, [B, T], and their mask."""
    width = max(map(len, rows))
    ids_BT = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
    mask_BT = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    return ids_BT, mask_BT


def agreement_of(
    signals: TeacherSignals,
    lm_head: TargetHead,
    drafter: TrainableDrafter,
    texts: Sequence[TargetText],
    positions: int,
    measure: Measure,
    done: Done = lambda _: None,
) -> list[PositionStats]:
    """Return the statistics of every text, [A, positions] each, from the target's signals of these texts.

    `drafter`: from `unrollable`. `done`: see `agreement`.
    """
    unrolled = _unrolled(drafter, signals, positions)
    length = signals.mask_BT.shape[1]
    anchored = [_AnchoredStates.of(states, k, texts, length) for k, states in enumerate(unrolled)]
    total = sum(len(at.rows_N) for at in anchored)
    stats: list[PositionStats] = [{} for _ in texts]
    for k, (states, at) in enumerate(zip(unrolled, anchored, strict=True)):
        measured: list[dict[str, Tensor]] = []
        for chunk in _chunks(lm_head, drafter, states, signals, at):
            measured += [measure(block) for block in _blocks(chunk)]
            done(len(texts) * len(chunk.labels_N) / total)
        for name in measured[0] if measured else ():
            values_N = torch.cat([block[name] for block in measured]).double().cpu().numpy()
            for row, text in enumerate(texts):
                table_AK = stats[row].setdefault(name, np.zeros((text.anchors, positions)))
                of_text_N = (at.rows_N == row).numpy()
                table_AK[at.anchors_N.numpy()[of_text_N], k] = values_N[of_text_N]
    if any(states.every_depth for states in unrolled):
        stats = [{name: _diagonals(table_AK) for name, table_AK in tables.items()} for tables in stats]
    return stats


def _unrolled(drafter: TrainableDrafter, signals: TeacherSignals, positions: int) -> list[DraftStates]:
    """Return the drafter's states by draft position; a single entry where they predict every draft position."""
    if drafter.shared_vocabulary is not None:  # ids beyond a smaller vocabulary, as `DraftModel` reads them
        ids_BT = signals.input_ids_BT
        signals = replace(signals, input_ids_BT=ids_BT.where(ids_BT < drafter.vocab_size, 0))
    return drafter.unroll(signals)[:positions]


class _AnchoredStates(NamedTuple):
    """Indices of the states of draft position k + 1 after all anchors of the texts."""

    rows_N: Tensor
    """The text of each state."""
    states_N: Tensor
    """Its index among the drafter's states."""
    positions_N: Tensor
    """The position of the target's p, which is t + k for the draft after token t of the text."""
    anchors_N: Tensor
    """Its anchor, counted from 0."""

    @classmethod
    def of(cls, states: DraftStates, k: int, texts: Sequence[TargetText], length: int) -> "_AnchoredStates":
        """Return the states after anchors; `length`: of each row of the flattened batch."""
        flat_N = states.places_N.cpu()
        rows_N, positions_N = flat_N.clamp_min(0) // length, flat_N % length
        anchors_N = positions_N - k - torch.tensor([text.prompt_length for text in texts])[rows_N]
        anchors_B = torch.tensor([text.anchors for text in texts])
        inside_N = (flat_N >= 0) & (anchors_N >= 0) & (anchors_N + k < anchors_B[rows_N])
        states_N = inside_N.nonzero()[:, 0]
        return cls(rows_N[states_N], states_N, positions_N[states_N], anchors_N[states_N])


def _chunks(
    lm_head: TargetHead,
    drafter: TrainableDrafter,
    states: DraftStates,
    signals: TeacherSignals,
    at: _AnchoredStates,
) -> Iterator[ChunkLogits]:
    """Yield the logits of the states after anchors, at most `CHUNK` at a time."""
    head, size = states.drafting_head or states.head, max(1, CHUNK // lm_head.weight.shape[0])
    for start in range(0, len(at.rows_N), size):
        rows_N, states_N, positions_N = (index_N[start : start + size] for index_N in at[:3])
        states_ND = states.states_ND[states_N]
        p_NV, q_NV = lm_head(signals.hidden_BTH[rows_N, positions_N]), head(states_ND)
        if states.vocabulary_D is not None:
            drafted_ND, q_NV = q_NV, q_NV.new_full(p_NV.shape, -torch.inf)
            q_NV[:, states.vocabulary_D] = drafted_ND
        if drafter.shared_vocabulary is not None:
            q_NV = fitted(q_NV, (drafter.shared_vocabulary, p_NV.shape[1]))
        sure_N = None if states.confidence is None else states.confidence(states_ND).sigmoid()
        yield ChunkLogits(p_NV, q_NV, signals.input_ids_BT[rows_N, positions_N + 1], sure_N)


def _blocks(chunk: ChunkLogits) -> list[ChunkLogits]:
    """Return the chunk in blocks that fit a CPU's caches; on an accelerator as a whole."""
    count = len(chunk.labels_N)
    size = count if chunk.p_NV.is_cuda else max(1, BLOCK // chunk.p_NV.shape[1])
    sure = [None] * count if chunk.sure_N is None else chunk.sure_N.split(size)
    return [ChunkLogits(*block) for block in zip(*(x.split(size) for x in chunk[:3]), sure, strict=False)]


def _diagonals(table_AK: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fill [A, K] from column 0: draft position k + 1 of an anchor is the first draft position k anchors later."""
    A, K = table_AK.shape
    out_AK = np.zeros((A, K))
    for k in range(min(A, K)):
        out_AK[: A - k, k] = table_AK[k:, 0]
    return out_AK
