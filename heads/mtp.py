"""Multi-token prediction: a module of one decoder layer, included in some targets and shared by all draft steps.

    final state of t ──▶ norm ─┐
                               ├─▶ input_proj ──▶ decoder layer ──▶ norm ──▶ target's lm_head ──▶ token t+2
    embedding of t+1 ──▶ norm ─┘                                     └──▶ next step, in place of the final state

DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437, section 2.2. Drafting several tokens with one shared module, trained
on its own states with weights that decrease with the step: FastMTP (Cai et al. 2025, arXiv:2509.18362).
"""

from pathlib import Path
from typing import ClassVar, Literal, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from draftsmith.errors import ConfigError
from draftsmith.heads.autoregressive import AutoregressiveDrafter, DraftNetwork
from draftsmith.heads.base import FINAL
from draftsmith.heads.layers import Attend, DecoderLayer, Rope, layer_config, norm

PREFIXES = ("mtp_layers.0.", "model.mtp_layers.0.")
"""Prefixes of the first module's tensors in targets with modules of this shape (MiMo's names)."""


class MtpNetwork(DraftNetwork):
    """A projection of the normed state and embedding, decoder layers and a norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.token_layernorm, self.hidden_layernorm = norm(config), norm(config)
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.final_layernorm = norm(config)

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


class Mtp(AutoregressiveDrafter[MtpNetwork]):
    """One shared MTP module with the target's embeddings and lm_head."""

    type: ClassVar[str] = "mtp"

    def __init__(self, body: LlamaConfig, *, train_steps: int = 3, layers: tuple[int, ...] = (FINAL,)) -> None:
        super().__init__(MtpNetwork(body), layers, train_steps)

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        *,
        init: Literal["random", "native"] = "random",
        num_hidden_layers: int = 1,
        train_steps: int = 3,
    ) -> Self:
        """Return a module of the target's width; `init="native"` loads the one of the target's own checkpoint."""
        if init == "native":
            return cls._native(target, train_steps)
        drafter = cls(layer_config(target, num_hidden_layers), train_steps=train_steps)
        drafter.attach(target)
        with torch.no_grad():
            hidden = drafter.body.config.hidden_size
            drafter.body.input_proj.weight[:, :hidden] += torch.eye(hidden)
        return drafter

    @classmethod
    def _native(cls, target: PreTrainedModel, train_steps: int) -> Self:
        """Return a drafter with the weights of the target's first MTP module."""
        weights = native_weights(Path(target.config._name_or_path))
        bias = "self_attn.q_proj.bias" in weights
        drafter = cls(layer_config(target, 1, attention_bias=bias), train_steps=train_steps)
        drafter.attach(target)
        try:
            drafter.body.load_state_dict(as_ours(weights))
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"drafter.init='native': the target's MTP module has another shape ({reason})") from error
        return drafter


def native_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the first MTP module in a target's folder, by their names inside the module."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    for prefix in PREFIXES:
                        if name.startswith(prefix):
                            weights[name.removeprefix(prefix)] = tensors.get_tensor(name).float()
        except SafetensorError as error:
            raise ConfigError(f"{file} cannot be read ({error}); expected whole safetensors weights") from error
    if not weights:
        raise ConfigError(
            f"drafter.init='native': {folder} holds no tensors named {' or '.join(PREFIXES)}*; expected a target with "
            "an MTP module, as a local folder, or init='random'"
        )
    return weights


def as_ours(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with the decoder layer's tensors named as those of the first in a list of layers."""
    layer = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
    return {f"layers.0.{name}" if name.startswith(layer) else name: value for name, value in weights.items()}
