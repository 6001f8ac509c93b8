"""P-EAGLE: EAGLE-3's network that drafts all positions in one pass, with mask tokens in place of unknown ones.

    position     t          t+1     t+2     t+3
    state        g_t        mask    mask    mask        (a learned state stands in for those not known yet)
    token        x_{t+1}    mask    mask    mask
                  │          │       │       │
                  └─▶ d1     └─▶ d2  └─▶ d3  └─▶ d4      each sees what is committed and the masks before it

So q at a depth does not depend on the draft tokens before it. P-EAGLE (Amazon, 2026), in the shapes that vLLM's
speculators document; mask tokens as in PARD, arXiv:2504.18583.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.errors import ConfigError
from draftsmith.heads.autoregressive import NetworkDrafter, shifted
from draftsmith.heads.base import Context, DraftStates, TeacherSignals
from draftsmith.heads.eagle3 import Eagle3Network, start_from_target, three_depths, vocabulary_size
from draftsmith.heads.hidden_states import positions_like
from draftsmith.heads.layers import UnrolledAttention, layer_config
from draftsmith.heads.multi_head import PathIndependentDrafter

# Shapes: B rows, T positions, H hidden size, K draft tokens.


@dataclass
class Line:
    """Tokens one after the other, as a tree."""

    tokens: list[int]

    def __post_init__(self) -> None:
        self.parents = list(range(-1, len(self.tokens) - 1))
        self.depths = list(range(1, len(self.tokens) + 1))


class ParallelEagle(NetworkDrafter, PathIndependentDrafter):
    """EAGLE-3's network, asked once a round."""

    type: ClassVar[str] = "peagle"

    def __init__(
        self,
        body: LlamaConfig,
        *,
        layers: tuple[int, ...],
        num_tokens: int,
        mask_token: int,
        draft_vocab_size: int | None = None,
        **options: bool,
    ) -> None:
        super().__init__(Eagle3Network(body, len(layers), draft_vocab_size=draft_vocab_size, **options), layers)
        self._options = options
        self.mask_hidden = nn.Parameter(torch.zeros(body.hidden_size))
        self.num_tokens = self.max_draft_length = num_tokens
        self.mask_token = mask_token

    @classmethod
    def from_target(
        cls,
        target: nn.Module,
        *,
        num_tokens: int = 5,
        num_hidden_layers: int = 1,
        layers: list[int] | None = None,
        mask_token: int | None = None,
        draft_vocabulary: list[int] | None = None,
    ) -> Self:
        """As EAGLE-3; the mask token is any token of the target that texts hardly hold, by default its last."""
        if num_tokens < 1:
            raise ConfigError.of("drafter.num_tokens", num_tokens, ">= 1")
        drafter = cls(
            layer_config(target, num_hidden_layers),
            layers=three_depths(target) if layers is None else tuple(layers),
            num_tokens=num_tokens,
            mask_token=default_mask_token(target, mask_token),
            draft_vocab_size=None if draft_vocabulary is None else len(draft_vocabulary),
        )
        drafter.attach(target)
        start_from_target(drafter.body, target, draft_vocabulary)
        return drafter

    def options(self) -> dict[str, Any]:
        sizes = {"num_tokens": self.num_tokens, "mask_token": self.mask_token}
        return {**sizes, **vocabulary_size(self), **self._options}

    def start(self, context: Context) -> None:
        super().start(context)
        self._runner = context.runner(self.body, padded=False)
        unread = [text.tokens[1:-1] for text in context.texts]
        if any(unread):
            states = self._states([len(row) for row in unread])
            self._runner.append(unread, states)

    def _states(self, counts: list[int]) -> list[Tensor]:
        """The next committed tokens' states."""
        features = [text.take_features(count) for text, count in zip(self.context.texts, counts, strict=True)]
        return [self.body.project(features_nF.to(self.body.dtype)) for features_nF in features]

    def begin(self, rows: list[int]) -> Tensor:
        """One pass over what is new and the masks behind it; the masks are forgotten at once."""
        unread: list[list[int]] = [[] for _ in self.context.texts]
        for row in rows:
            unread[row] = self.context.texts[row].tokens[self._runner.lengths[row] + 1 :]
        counts = [len(row) for row in unread]
        masks = self.num_tokens - 1
        lines = [Line([*row, *[self.mask_token] * masks] if row else []) for row in unread]
        states = [
            torch.cat([known_nH, self.mask_hidden.expand(masks, -1)]) if count else known_nH
            for known_nH, count in zip(self._states(counts), counts, strict=True)
        ]
        logits = self._runner.branch(lines, [list(range(len(line.tokens))) for line in lines], states)
        self._runner.commit([list(range(count)) for count in counts])
        some = logits[rows[0]].new_zeros(self.num_tokens, logits[rows[0]].shape[-1])
        behind = [rows_nV[count - 1 :] if count else some for rows_nV, count in zip(logits, counts, strict=True)]
        self._logits_KBV = torch.stack(behind, 1)
        return self._logits_KBV[0]

    def logits_at(self, depth: int) -> Tensor:
        return self._logits_KBV[depth]

    def drop(self, rows: list[int]) -> None:
        self._runner.drop(rows)

    def unroll(self, signals: TeacherSignals) -> list[DraftStates]:
        """Behind every position a line of masks, which is what the training-time test's attention shows them."""
        body, ids_BT = self.body, signals.input_ids_BT
        positions_BT = positions_like(ids_BT, signals.documents_BT)
        states_BTH = body.project(signals.features_BTF.to(body.dtype))
        embeds_BTH = body.embed(shifted(ids_BT, 1))
        mask_BT = torch.full_like(ids_BT, self.mask_token)
        tokens_D = None if body.vocabulary is None else body.vocabulary.tokens_D
        attend, unrolled = UnrolledAttention(signals.documents_BT), []
        for k in range(self.num_tokens):
            if k > 0:
                embeds_BTH, states_BTH = body.embed(mask_BT), self.mask_hidden.expand_as(states_BTH)
            out_BTH = body.step(embeds_BTH, states_BTH, body.rotary(embeds_BTH, positions_BT + k), attend)
            # The mask's state has to get a gradient, which it gets nowhere else where a draft is one token.
            trained = (*body.head_parameters(), self.mask_hidden)
            unrolled.append(
                DraftStates(out_BTH, body.head, offset=k + 1, vocabulary_D=tokens_D, head_parameters=trained)
            )
        return unrolled


def default_mask_token(target: nn.Module, wanted: int | None) -> int:
    """`wanted`, or the target's last token; ConfigError for one that it does not have."""
    vocab_size = target.get_input_embeddings().weight.shape[0]
    token = vocab_size - 1 if wanted is None else wanted
    if not 0 <= token < vocab_size:
        raise ConfigError.of("drafter.mask_token", token, f"0 to {vocab_size - 1}")
    return token
