"""The network of multi-token prediction modules: a projection of the normed state and embedding, layers and a norm.

The module's layer is Llama's, or for targets' own modules with latent attention or experts a layer of the target's own
class in transformers, whose attention is computed by the caller: in decoding with the cache, in training by the
training-time test.
"""

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModel, LlamaConfig, PreTrainedConfig, PreTrainedModel

from draftsmith.heads.autoregressive import DraftNetwork
from draftsmith.heads.layers import Attend, DecoderLayer, Rope, norm

OPTIONS = ("qk_norm", "gated", "centred", "target_norm")
"""Boolean options of the network, which targets' own modules have."""
ATTEND = "draftsmith_mtp"
"""Name in transformers' `AttentionInterface`."""


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attend: Attend | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the output [B, T, h, d] of `attend`, which scales by 1 / sqrt(size of the queries) and has one size."""
    assert attend is not None, "`MtpNetwork.step` passes it"
    size, width = query.shape[-1], value.shape[-1]
    if scaling is not None:
        query = query * (scaling * size**0.5)
    if width < size:  # latent attention
        value = nn.functional.pad(value, (0, size - width))
    return attend(0, query, key, value)[..., :width].transpose(1, 2), None


AttentionInterface.register(ATTEND, _attend)


def target_layer(config: PreTrainedConfig) -> tuple[nn.Module, nn.Module]:
    """Return a new decoder layer and rotary embedding of the classes of the model that `config` describes."""
    with torch.device("meta"):
        decoder = AutoModel.from_config(config).get_decoder()
    config = copy(config)
    config._attn_implementation = ATTEND
    return type(decoder.layers[0])(config, 0), type(decoder.rotary_emb)(config)


class MtpNetwork(DraftNetwork):
    """A projection of the normed state and embedding, decoder layers and a norm.

    Args:
        config: of Llama's layers or, with another model type, of one layer of that model.
        centred: gains of norms are 1 + weight (Qwen3.5).
        target_norm: the norm after the layer is the target's last one, which is not trained (Ernie 4.5).
        layer: further options of Llama's layers, see `DecoderLayer`.
    """

    def __init__(
        self,
        config: LlamaConfig,
        draft_vocab_size: int | None = None,
        *,
        centred: bool = False,
        target_norm: bool = False,
        **layer: bool,
    ) -> None:
        super().__init__(config, draft_vocab_size)
        self.token_layernorm, self.hidden_layernorm = norm(config, centred=centred), norm(config, centred=centred)
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        if config.model_type == "llama":
            layers: list[nn.Module] = [
                DecoderLayer(config, index, centred=centred, **layer) for index in range(config.num_hidden_layers)
            ]
        else:
            own, self.rotary = target_layer(config)
            layers = [own]
        self.layers = nn.ModuleList(layers)
        self.final_layernorm = norm(config, centred=centred).requires_grad_(not target_norm)

    @torch.no_grad()
    def start_from_target(self, target: PreTrainedModel, draft_vocabulary: list[int] | None) -> None:
        """At first input_proj passes the state through unchanged."""
        super().start_from_target(target, draft_vocabulary)
        hidden = self.config.hidden_size
        self.input_proj.weight[:, :hidden] += torch.eye(hidden)

    def step(
        self, embeds_BTH: Tensor, states_BTH: Tensor, rope: Rope, attend: Attend, read_Q: Tensor | None = None
    ) -> Tensor:
        both = torch.cat([self.hidden_layernorm(states_BTH), self.token_layernorm(embeds_BTH)], -1)
        x_BTH = self.input_proj(both)
        *before, last = self.layers
        if not isinstance(last, DecoderLayer):  # the only one
            x_BTH = last(x_BTH, attention_mask=None, position_embeddings=rope, attend=attend)
            return self.final_layernorm(x_BTH if read_Q is None else x_BTH.index_select(1, read_Q))
        for layer in before:
            x_BTH = layer(x_BTH, rope, attend)
        return self.final_layernorm(last(x_BTH, rope, attend, read_Q))
