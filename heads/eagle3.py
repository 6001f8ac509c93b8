"""EAGLE-3: reads features of three depths of the target, and has its own hidden states and its own lm_head.

    low, middle, high ──▶ fc ──▶ g_t ──▶ norm ─┐
                                  │            ├─▶ attention ──▶ (+) ──▶ MLP ──▶ s_{t+1} ──▶ norm ──▶ lm_head ──▶ t+2
    embedding of t+1 ───────────── │ ─▶ norm ──┘                  ▲                 └──▶ next step as g
                                  └──────── residual ─────────────┘

Trained with the training-time test: several steps, each on the states of the last. Li et al. 2025, arXiv:2503.01840.
P-EAGLE's drafter has the same network.
"""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from draftsmith.errors import ConfigError
from draftsmith.heads.autoregressive import AutoregressiveDrafter, DraftNetwork, NetworkDrafter
from draftsmith.heads.base import Context, Level, TeacherSignals, unread
from draftsmith.heads.initial_weights import final_states_of, silence, typical_sizes
from draftsmith.heads.layers import Attend, DecoderLayer, Rope, SelfAttention, norm
from draftsmith.heads.lm_head import weight_of
from draftsmith.heads.model_config import text_config
from draftsmith.heads.rows import Columns, Rows


class FirstLayer(nn.Module):
    """A decoder layer whose attention reads the concatenation of embedding and state."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool, qk_norm: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.self_attn = SelfAttention(config, 0, input_size=2 * config.hidden_size, qk_norm=qk_norm)
        self.mlp = LlamaMLP(config)
        self.input_layernorm, self.hidden_norm = norm(config), norm(config)
        self.post_attention_layernorm = norm(config)

    def forward(
        self, embeds_BTH: Tensor, states_BTH: Tensor, rope: Rope, attend: Attend, read_Q: Tensor | None = None
    ) -> Tensor:
        normed_BTH = self.hidden_norm(states_BTH)
        residual_BTH = normed_BTH if self.norm_before_residual else states_BTH
        if read_Q is not None:
            residual_BTH = residual_BTH.index_select(1, read_Q)
        both_BT2H = torch.cat([self.input_layernorm(embeds_BTH), normed_BTH], -1)
        x_BTH = residual_BTH + self.self_attn(both_BT2H, rope, attend, read_Q)
        return x_BTH + self.mlp(self.post_attention_layernorm(x_BTH))


class Eagle3Network(DraftNetwork):
    """EAGLE-3's network. EAGLE-3.1's norms are options: of the features before fc, of the states that are fed back."""

    def __init__(
        self,
        config: LlamaConfig,
        features: int,
        *,
        draft_vocab_size: int | None = None,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        qk_norm: bool = False,
    ) -> None:
        super().__init__(config, draft_vocab_size)
        hidden = config.hidden_size
        self.norm_output = norm_output
        self.input_norm = norm(config, features * hidden) if norm_before_fc else nn.Identity()
        self.fc_norm = nn.ModuleList(norm(config) for _ in range(features if fc_norm else 0))
        self.fc = nn.Linear(features * hidden, hidden, bias=False)
        rest = (DecoderLayer(config, layer, qk_norm=qk_norm) for layer in range(1, config.num_hidden_layers))
        self.layers = nn.ModuleList([FirstLayer(config, norm_before_residual, qk_norm), *rest])
        self.norm = norm(config)
        rows = draft_vocab_size or config.vocab_size
        self.lm_head: nn.Linear = nn.Linear(hidden, rows, bias=False)  # pyright: ignore[reportIncompatibleVariableOverride]

    def project(self, features_nF: Tensor) -> Tensor:
        features_nF = self.input_norm(features_nF)
        if len(self.fc_norm):
            parts = features_nF.chunk(len(self.fc_norm), -1)
            features_nF = torch.cat([own(part) for own, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features_nF)

    def step(
        self, embeds_BTH: Tensor, states_BTH: Tensor, rope: Rope, attend: Attend, read_Q: Tensor | None = None
    ) -> Tensor:
        first, *others = self.layers
        x_BTH = first(embeds_BTH, states_BTH, rope, attend, None if others else read_Q)
        for layer in others:
            x_BTH = layer(x_BTH, rope, attend, read_Q if layer is others[-1] else None)
        return self.norm(x_BTH) if self.norm_output else x_BTH

    def head(self, states_nH: Tensor) -> Tensor:
        return super().head(states_nH if self.norm_output else self.norm(states_nH))

    @torch.no_grad()
    def start_from_target(self, target: PreTrainedModel, draft_vocabulary: list[int] | None) -> None:
        """Start the lm_head as the target's. fc selects the highest feature, which is closest to that one's input."""
        super().start_from_target(target, draft_vocabulary)
        hidden = self.config.hidden_size
        self.fc.weight.zero_()
        self.fc.weight[:, -hidden:] = torch.eye(hidden)

    def start(self, features_nF: Tensor, hidden_nH: Tensor) -> None:
        """Give state and lm_head inputs of typical size 1, whatever the target's sizes are.

        The features of published models have sizes of up to a thousand, and single values of a hundred thousand: next
        to them the layers' outputs would be nothing, and updates of `fc` and lm_head would move the logits by hundreds.
        """
        silence(self)
        self.fc.weight.div_(typical_sizes(features_nF))
        self.lm_head.weight.mul_(typical_sizes(hidden_nH))

    def head_parameters(self) -> tuple[nn.Parameter, ...]:
        own = super().head_parameters()
        return own if self.norm_output else (*own, *self.norm.parameters())


OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Boolean options of the network that other projects' layouts may have."""


class Eagle3(AutoregressiveDrafter[Eagle3Network]):
    """EAGLE-3, with its options EAGLE-3.1."""

    type: ClassVar[str] = "eagle3"
    divides_texts: ClassVar[bool] = True

    def __init__(
        self,
        body: LlamaConfig,
        *,
        layers: tuple[int, ...],
        train_steps: int = 7,
        draft_vocab_size: int | None = None,
        **options: bool,
    ) -> None:
        network = Eagle3Network(body, len(layers), draft_vocab_size=draft_vocab_size, **options)
        super().__init__(network, layers, train_steps)
        self._options = options

    @classmethod
    def default_layers(cls, target: PreTrainedModel) -> tuple[int, ...]:
        return three_depths(target)

    def feature_layer(self) -> nn.Linear:
        return self.body.fc

    @torch.no_grad()
    def start_body(self, signals: TeacherSignals, frequencies_D: Tensor) -> None:
        self.body.start(self.feature_inputs(signals), final_states_of(signals))

    def options(self) -> dict[str, Any]:
        return {**super().options(), **self._options}


def three_depths(target: PreTrainedModel) -> tuple[int, ...]:
    """Return the layers whose outputs are the inputs of EAGLE-3's layers 2, L/2 and L - 3, counted from 0."""
    depth = text_config(target).num_hidden_layers
    if depth < 4:
        raise ConfigError(
            f"target has {depth} layers; expected at least 4 for features of three depths, or drafter.layers"
        )
    return (min(2, depth // 2), depth // 2, depth - 3) if depth > 6 else (1, depth // 2, depth - 1)


# Shapes: B rows, T positions, H hidden size, K draft tokens.


class ParallelEagle(NetworkDrafter[Eagle3Network]):
    """P-EAGLE: EAGLE-3's network drafts all positions in one pass, with mask tokens in place of unknown tokens.

        position     t          t+1     t+2     t+3
        state        g_t        mask    mask    mask        (one learned state for all unknown states)
        token        x_{t+1}    mask    mask    mask
                      │          │       │       │
                      └─▶ d1     └─▶ d2  └─▶ d3  └─▶ d4      each sees the committed tokens and the masks before it

    The probabilities at a depth do not depend on the draft tokens before it. P-EAGLE (Amazon, 2026), in the shapes of
    vLLM's speculators; mask tokens as in PARD, arXiv:2504.18583.
    """

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
        cls, target: PreTrainedModel, *, num_tokens: int = 5, mask_token: int | None = None, **options: Any
    ) -> Self:
        """Return layers of the target's width, initialised as EAGLE-3's; for the options see `ParallelEagleSection`."""
        if num_tokens < 1:
            raise ConfigError.of("drafter.num_tokens", num_tokens, ">= 1")
        token = default_mask_token(target, mask_token)
        return super().from_target(target, num_tokens=num_tokens, mask_token=token, **options)

    @classmethod
    def default_layers(cls, target: PreTrainedModel) -> tuple[int, ...]:
        return three_depths(target)

    def feature_layer(self) -> nn.Linear:
        return self.body.fc

    @torch.no_grad()
    def start_body(self, signals: TeacherSignals, frequencies_D: Tensor) -> None:
        """Begin as EAGLE-3; masks begin with the state of median features."""
        body = self.body
        features_nF = self.feature_inputs(signals)
        body.start(features_nF, final_states_of(signals))
        median_F = features_nF.median(0).values
        self.mask_hidden.copy_(median_F if self.mask_before_fc else body.fc(median_F))

    def options(self) -> dict[str, Any]:
        sizes = {"num_tokens": self.num_tokens, "mask_token": self.mask_token, "mask_before_fc": self.mask_before_fc}
        return {**sizes, "draft_vocab_size": self.draft_vocab_size, **self._options}

    def _mask_state(self) -> Tensor:
        """Return the state [H] of masks."""
        return self.body.project(self.mask_hidden) if self.mask_before_fc else self.mask_hidden

    def start(self, context: Context) -> None:
        super().start(context)
        # At most num_tokens + 1 committed tokens of a round, the first of which is not a mask, and the other masks.
        self._runner = context.runner(self.body, width=2 * self.num_tokens)
        self._read([sequence.tokens[1:] for sequence in context.sequences])

    def begin(self, rows: list[int]) -> Tensor:
        tokens = unread(self.context, rows, self._runner, first=1)
        if any(tokens):  # not in the first round, whose masks were read with the prompt
            self._read(tokens)
        return self._logits_BKV[:, 0]

    def _read(self, tokens: list[list[int]]) -> None:
        """Read new committed tokens and the masks after them in one pass; then the masks are dropped from the cache."""
        new = Rows(tokens, self.mask_hidden.device)
        # Rows are padded with masks on the right, which the tokens and masks before them do not see.
        width = new.width + self.num_tokens - 1
        count_B1 = new.counts.on_device_B[:, None]
        is_known_BQ = torch.arange(width, device=new.device) < count_B1
        tokens_BQ = nn.functional.pad(new.values_BW, (0, self.num_tokens - 1)).where(is_known_BQ, self.mask_token)
        known_BCH = self.body.project(self.context.take_features(new.counts).to(self.body.dtype))
        known_BQH = nn.functional.pad(known_BCH, (0, 0, 0, self.num_tokens - 1))
        states_BQH = torch.where(is_known_BQ[..., None], known_BQH, self._mask_state())
        last = new.counts.map(lambda count: count - 1 + (count == 0))
        self._logits_BKV = self._runner.line(tokens_BQ, states_BQH, Columns(last, self.num_tokens))
        self._runner.commit(Rows.rising(new.counts))

    @property
    def steps(self) -> int:
        return self.num_tokens

    def extend(self, level: Level) -> Tensor:
        return self._logits_BKV[:, level.depth, None].expand(-1, level.tokens_Bn.shape[1], -1)

    def chain_logits(self, length: int) -> Tensor:
        return self._logits_BKV[:, :length]

    def _inputs(self, k: int, tokens_1X: Tensor, states_1XH: Tensor) -> tuple[Tensor, Tensor]:
        if k == 0:
            return super()._inputs(k, tokens_1X, states_1XH)
        embeds_1XH = self.body.embed(torch.full_like(tokens_1X, self.mask_token))
        return embeds_1XH, self._mask_state().expand_as(embeds_1XH)

    def _head_parameters(self) -> tuple[nn.Parameter, ...]:
        # The mask's state needs a gradient in every batch; with one draft token nothing else gives it one.
        return (*super()._head_parameters(), self.mask_hidden)


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
