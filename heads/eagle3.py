"""EAGLE-3: reads features of three depths of the target, and has its own hidden states and its own lm_head.

    low, middle, high ──▶ fc ──▶ g_t ──▶ norm ─┐
                                  │            ├─▶ attention ──▶ (+) ──▶ MLP ──▶ s_{t+1} ──▶ norm ──▶ lm_head ──▶ t+2
    embedding of t+1 ───────────── │ ─▶ norm ──┘                  ▲                 └──▶ next step as g
                                  └──────── residual ─────────────┘

Trained with the training-time test: several steps, each on the states of the last. Li et al. 2025, arXiv:2503.01840.
"""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from draftsmith.errors import ConfigError
from draftsmith.heads.autoregressive import AutoregressiveDrafter, DraftNetwork, NetworkDrafter
from draftsmith.heads.base import FirstBatch
from draftsmith.heads.layers import Attend, Attention, DecoderLayer, Rope, layer_config, norm
from draftsmith.heads.lm_head import DraftVocabulary, scaled_weight
from draftsmith.heads.model_config import text_config
from draftsmith.heads.start import final_states_of, silence, typical_sizes


class FirstLayer(nn.Module):
    """A decoder layer whose attention reads the concatenation of embedding and state."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool, qk_norm: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.self_attn = Attention(config, 0, input_size=2 * config.hidden_size, qk_norm=qk_norm)
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
        super().__init__(config)
        hidden = config.hidden_size
        self.norm_output = norm_output
        self.input_norm = norm(config, features * hidden) if norm_before_fc else nn.Identity()
        self.fc_norm = nn.ModuleList(norm(config) for _ in range(features if fc_norm else 0))
        self.fc = nn.Linear(features * hidden, hidden, bias=False)
        rest = (DecoderLayer(config, layer, qk_norm=qk_norm) for layer in range(1, config.num_hidden_layers))
        self.layers = nn.ModuleList([FirstLayer(config, norm_before_residual, qk_norm), *rest])
        self.norm = norm(config)
        self.lm_head = nn.Linear(hidden, draft_vocab_size or config.vocab_size, bias=False)
        if draft_vocab_size is not None:
            self.vocabulary = DraftVocabulary(config.vocab_size, draft_vocab_size)

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
        return self.lm_head(states_nH if self.norm_output else self.norm(states_nH))

    @torch.no_grad()
    def start_from_target(self, target: PreTrainedModel, draft_vocabulary: list[int] | None) -> None:
        """Start the lm_head as the target's. fc selects the highest feature, which is closest to that one's input."""
        self.start_lm_head(target, draft_vocabulary)
        hidden = self.config.hidden_size
        self.fc.weight.zero_()
        self.fc.weight[:, -hidden:] = torch.eye(hidden)

    @torch.no_grad()
    def start_lm_head(self, target: PreTrainedModel, draft_vocabulary: list[int] | None) -> None:
        """Copy the target's lm_head, or its rows of the draft vocabulary, with the target's scale of logits."""
        weight_VH = scaled_weight(target)
        if draft_vocabulary is not None:
            self.vocabulary = DraftVocabulary.of(draft_vocabulary, weight_VH.shape[0]).to(self.lm_head.weight.device)
            weight_VH = weight_VH[self.vocabulary.tokens_D.to(weight_VH.device)]
        self.lm_head.weight.copy_(weight_VH)

    def start(self, features_nF: Tensor, hidden_nH: Tensor) -> None:
        """Give state and lm_head inputs of typical size 1, whatever the target's sizes are.

        The features of published models have sizes of up to a thousand, and single values of a hundred thousand: next
        to them the layers' outputs would be nothing, and updates of `fc` and lm_head would move the logits by hundreds.
        """
        silence(self)
        self.fc.weight.div_(typical_sizes(features_nF))
        self.lm_head.weight.mul_(typical_sizes(hidden_nH))

    def head_parameters(self) -> tuple[nn.Parameter, ...]:
        own = tuple(self.lm_head.parameters())
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
    def from_target(
        cls,
        target: PreTrainedModel,
        *,
        num_hidden_layers: int = 1,
        intermediate_size: int | None = None,
        layers: list[int] | None = None,
        draft_vocabulary: list[int] | None = None,
        train_steps: int = 7,
        **options: Any,
    ) -> Self:
        """Return layers of the target's width, initialised from the target, see `Eagle3Network.start_from_target`."""
        drafter = cls(
            layer_config(target, num_hidden_layers, intermediate_size=intermediate_size),
            layers=three_depths(target) if layers is None else tuple(layers),
            train_steps=train_steps,
            draft_vocab_size=None if draft_vocabulary is None else len(draft_vocabulary),
            **options,
        )
        drafter.attach(target)
        drafter.body.start_from_target(target, draft_vocabulary)
        return drafter

    def choose_tokens(self, target: PreTrainedModel, tokens: list[int]) -> None:
        self.body.start_lm_head(target, tokens)

    def own_lm_heads(self) -> list[nn.Linear]:
        return [self.body.lm_head] * self.train_steps

    def feature_layer(self) -> nn.Linear:
        return self.body.fc

    @torch.no_grad()
    def start_body(self, first: FirstBatch) -> None:
        self.body.start(self.feature_inputs(first.signals), final_states_of(first.signals))

    def options(self) -> dict[str, Any]:
        return {**super().options(), **vocabulary_size(self), **self._options}


def vocabulary_size(drafter: NetworkDrafter[Any]) -> dict[str, int | None]:
    """Return the entry of a stored config for the size of the draft vocabulary."""
    return {"draft_vocab_size": None if drafter.draft_vocabulary is None else len(drafter.draft_vocabulary)}


def three_depths(target: PreTrainedModel) -> tuple[int, ...]:
    """Return the layers whose outputs are the inputs of EAGLE-3's layers 2, L/2 and L - 3, counted from 0."""
    depth = text_config(target).num_hidden_layers
    if depth < 4:
        raise ConfigError(
            f"target has {depth} layers; expected at least 4 for features of three depths, or drafter.layers"
        )
    return (min(2, depth // 2), depth // 2, depth - 3) if depth > 6 else (1, depth // 2, depth - 1)
