"""P-EAGLE: EAGLE-3's network drafts all positions in one pass, with mask tokens in place of unknown tokens.

    position     t          t+1     t+2     t+3
    state        g_t        mask    mask    mask        (one learned state for all unknown states)
    token        x_{t+1}    mask    mask    mask
                  │          │       │       │
                  └─▶ d1     └─▶ d2  └─▶ d3  └─▶ d4      each sees the committed tokens and the masks before it

The probabilities at a depth do not depend on the draft tokens before it. P-EAGLE (Amazon, 2026), in the shapes of
vLLM's speculators; mask tokens as in PARD, arXiv:2504.18583.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from draftsmith.errors import ConfigError
from draftsmith.heads.autoregressive import NetworkDrafter
from draftsmith.heads.base import Context, DraftStates, FirstBatch, TeacherSignals, unread
from draftsmith.heads.eagle3 import Eagle3Network, three_depths, vocabulary_size
from draftsmith.heads.layers import layer_config, windows_of
from draftsmith.heads.lm_head import weight_of
from draftsmith.heads.multi_head import PathIndependentDrafter
from draftsmith.heads.read_positions import ReadPositions
from draftsmith.heads.rows import Rows
from draftsmith.heads.start import final_states_of
from draftsmith.heads.unrolled_attention import UnrolledAttention

# Shapes: B rows, T positions, H hidden size, K draft tokens.


class ParallelEagle(NetworkDrafter[Eagle3Network], PathIndependentDrafter):
    """EAGLE-3's network with one pass per round."""

    type: ClassVar[str] = "peagle"

    def __init__(
        self,
        body: LlamaConfig,
        *,
        layers: tuple[int, ...],
        num_tokens: int,
        mask_token: int,
        draft_vocab_size: int | None = None,
        mask_before_fc: bool = False,
        **options: bool,
    ) -> None:
        super().__init__(Eagle3Network(body, len(layers), draft_vocab_size=draft_vocab_size, **options), layers)
        self._options, self.mask_before_fc = options, mask_before_fc
        self.mask_hidden = nn.Parameter(torch.zeros(body.hidden_size * (len(layers) if mask_before_fc else 1)))
        self.num_tokens = self.max_draft_length = num_tokens
        self.mask_token = mask_token

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        *,
        num_tokens: int = 5,
        num_hidden_layers: int = 1,
        layers: list[int] | None = None,
        mask_token: int | None = None,
        mask_before_fc: bool = False,
        draft_vocabulary: list[int] | None = None,
    ) -> Self:
        """Return layers of the target's width, initialised as EAGLE-3's.

        Args:
            mask_token: by default the target's last; it should be rare in texts.
            mask_before_fc: the trained state of masks is an input of `fc`, as in speculators, and not its output.
        """
        if num_tokens < 1:
            raise ConfigError.of("drafter.num_tokens", num_tokens, ">= 1")
        drafter = cls(
            layer_config(target, num_hidden_layers),
            layers=three_depths(target) if layers is None else tuple(layers),
            num_tokens=num_tokens,
            mask_token=default_mask_token(target, mask_token),
            mask_before_fc=mask_before_fc,
            draft_vocab_size=None if draft_vocabulary is None else len(draft_vocabulary),
        )
        drafter.attach(target)
        drafter.body.start_from_target(target, draft_vocabulary)
        return drafter

    def choose_tokens(self, target: PreTrainedModel, tokens: list[int]) -> None:
        self.body.start_lm_head(target, tokens)

    def own_lm_heads(self) -> list[nn.Linear]:
        return [self.body.lm_head] * self.num_tokens

    def feature_layer(self) -> nn.Linear:
        return self.body.fc

    @torch.no_grad()
    def start_body(self, first: FirstBatch) -> None:
        """Begin as EAGLE-3; masks begin with the state of median features."""
        body = self.body
        features_nF = self.feature_inputs(first.signals)
        body.start(features_nF, final_states_of(first.signals))
        median_F = features_nF.median(0).values
        self.mask_hidden.copy_(median_F if self.mask_before_fc else body.fc(median_F))

    def options(self) -> dict[str, Any]:
        sizes = {"num_tokens": self.num_tokens, "mask_token": self.mask_token, "mask_before_fc": self.mask_before_fc}
        return {**sizes, **vocabulary_size(self), **self._options}

    def _mask_state(self) -> Tensor:
        """Return the state [H] of masks."""
        return self.body.project(self.mask_hidden) if self.mask_before_fc else self.mask_hidden

    def start(self, context: Context) -> None:
        super().start(context)
        # At most num_tokens + 1 committed tokens of a round, the first of which is not a mask, and the other masks.
        self._runner = context.runner(self.body, width=2 * self.num_tokens)
        known = [text.tokens[1:-1] for text in context.texts]
        if any(known):
            self._runner.append(known, self._states([len(row) for row in known]))

    def _states(self, counts: Sequence[int]) -> Tensor:
        """Return the states [B, most, H] of the next `counts` committed tokens of each text, padded on the right."""
        return self.body.project(self.context.take_features(counts).to(self.body.dtype))

    def begin(self, rows: list[int]) -> Tensor:
        """Read new committed tokens and the masks after them in one pass; then the masks are dropped from the cache."""
        new = Rows(unread(self.context, rows, self._runner, first=1), self.mask_hidden.device)
        # Rows are padded with masks on the right, which the tokens and masks before them do not see.
        width = new.width + self.num_tokens - 1
        count_B1 = new.counts.on_device_B[:, None]
        is_known_BQ = torch.arange(width, device=new.device) < count_B1
        tokens_BQ = nn.functional.pad(new.values_BW, (0, self.num_tokens - 1)).where(is_known_BQ, self.mask_token)
        known_BQH = nn.functional.pad(self._states(new.counts), (0, 0, 0, self.num_tokens - 1))
        logits_BQV = self._runner.line(tokens_BQ, torch.where(is_known_BQ[..., None], known_BQH, self._mask_state()))
        self._runner.commit(Rows.rising(new.counts))
        first_B1 = count_B1.clamp_min(1) - 1
        asked_BK = first_B1 + torch.arange(self.num_tokens, device=tokens_BQ.device)
        rows_B1 = torch.arange(len(new), device=tokens_BQ.device)[:, None]
        self._logits_BKV = logits_BQV[rows_B1, asked_BK]
        return self._logits_BKV[:, 0]

    def logits_at(self, depth: int) -> Tensor:
        return self._logits_BKV[:, depth]

    def chain_logits(self, length: int) -> Tensor:
        return self._logits_BKV[:, :length]

    def drop(self, rows: list[int]) -> None:
        self._runner.drop(rows)

    def unroll(self, signals: TeacherSignals) -> list[DraftStates]:
        """Return states of masks after every position, with the attention of the training-time test."""
        body, read = self.body, ReadPositions(signals, self.num_tokens)
        assert signals.features_BTF is not None, "the drafter's needs name layers"
        features_1XF = read.values(signals.features_BTF, read.first_X)
        embeds_1XH, states_1XH = body.embed(read.tokens(read.first_X, 1)), body.project(features_1XF.to(body.dtype))
        mask_1N, mask_H = torch.full_like(read.queries_N, self.mask_token)[None], self._mask_state()
        tokens_D = None if body.vocabulary is None else body.vocabulary.tokens_D
        attend, unrolled = UnrolledAttention(read, windows_of(body.config)), []
        for k in range(self.num_tokens):
            if k > 0:
                embeds_1XH = body.embed(mask_1N)
                states_1XH = mask_H.expand_as(embeds_1XH)
            rope = body.rotary(embeds_1XH, read.positions(read.queries_N if k else read.first_X) + k)
            out_1NH = body.step(embeds_1XH, states_1XH, rope, attend, None if k else read.among_N)
            # The mask's state needs a gradient in every batch; with one draft token nothing else gives it one.
            trained = (*body.head_parameters(), self.mask_hidden)
            places_N = read.towards(k + 1)
            unrolled.append(
                DraftStates(out_1NH[0], body.head, places_N=places_N, vocabulary_D=tokens_D, head_parameters=trained)
            )
        return unrolled


def default_mask_token(target: PreTrainedModel, wanted: int | None) -> int:
    """Return `wanted`, by default the target's last token whose embedding is not zero, as that of padding may be.

    Raises:
        ConfigError: for a token outside the vocabulary, or one whose embedding is zero.
    """
    weight_VH = weight_of(target.get_input_embeddings())
    last = len(weight_VH) - 1
    tokens = range(last, -1, -1) if wanted is None else (wanted,)
    for token in tokens:
        if not 0 <= token <= last:
            raise ConfigError.of("drafter.mask_token", token, f"0 to {last}")
        if not (weight_VH[token] == 0).all():
            return token
    raise ConfigError.of("drafter.mask_token", wanted, "a token whose embedding is not zero")
