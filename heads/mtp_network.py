"""The network of an MTP module, see heads/mtp.py; targets' own modules are read into it."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.heads.autoregressive import DraftNetwork
from draftsmith.heads.layers import Attend, DecoderLayer, Rope, norm

OPTIONS = ("qk_norm", "gated", "centred")
"""Boolean options of the network, which targets' own modules have."""


class MtpNetwork(DraftNetwork):
    """A projection of the normed state and embedding, decoder layers and a norm.

    Args:
        centred: gains of norms are 1 + weight (Qwen3.5).
        layer: further options of the decoder layers, see `DecoderLayer`.
    """

    def __init__(self, config: LlamaConfig, *, centred: bool = False, **layer: bool) -> None:
        super().__init__(config)
        self.token_layernorm, self.hidden_layernorm = norm(config, centred=centred), norm(config, centred=centred)
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, centred=centred, **layer) for index in range(config.num_hidden_layers)
        )
        self.final_layernorm = norm(config, centred=centred)

    def project(self, features_nF: Tensor) -> Tensor:
        return features_nF

    def step(self, embeds_BTH: Tensor, states_BTH: Tensor, rope: Rope, attend: Attend) -> Tensor:
        both = torch.cat([self.hidden_layernorm(states_BTH), self.token_layernorm(embeds_BTH)], -1)
        x_BTH = self.input_proj(both)
        for layer in self.layers:
            x_BTH = layer(x_BTH, rope, attend)
        return self.final_layernorm(x_BTH)

    def head(self, states_nH: Tensor) -> Tensor:
        return self.target_head(states_nH)
