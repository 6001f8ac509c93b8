"""Multi-token prediction: a module of one decoder layer, included in some targets and shared by all draft steps.

    final state of t ──▶ norm ─┐
                               ├─▶ input_proj ──▶ decoder layer ──▶ norm ──▶ target's lm_head ──▶ token t+2
    embedding of t+1 ──▶ norm ─┘                                     └──▶ next step, in place of the final state

DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437, section 2.2. Drafting several tokens with one shared module, trained
on its own states with weights that decrease with the step: FastMTP (Cai et al. 2025, arXiv:2509.18362).

The module's layer is Llama's, or for targets' own modules with latent attention or experts a layer of the target's own
class in transformers, whose attention is computed by the caller: in decoding with the cache, in training by the
training-time test.
"""

from copy import copy
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModel, LlamaConfig, PreTrainedConfig, PreTrainedModel

from draftsmith.heads.autoregressive import AutoregressiveDrafter, DraftNetwork
from draftsmith.heads.base import FINAL, TeacherSignals
from draftsmith.heads.initial_weights import best_state, constant_reader, copied_share, final_states_of, silence
from draftsmith.heads.layers import Attend, DecoderLayer, Rope, layer_config, norm

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

    def __init__(self, config: LlamaConfig, *, centred: bool = False, target_norm: bool = False, **layer: bool) -> None:
        super().__init__(config)
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


class Mtp(AutoregressiveDrafter[MtpNetwork]):
    """One shared MTP module with the target's embeddings and lm_head."""

    type: ClassVar[str] = "mtp"

    def __init__(
        self, body: LlamaConfig, *, train_steps: int = 3, layers: tuple[int, ...] = (FINAL,), **options: bool
    ) -> None:
        super().__init__(MtpNetwork(body, **options), layers, train_steps)
        self._options = options

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        *,
        init: Literal["random", "native"] = "random",
        num_hidden_layers: int = 1,
        **options: Any,
    ) -> Self:
        """Return a module of the target's width; `init="native"` loads the one of the target's own checkpoint."""
        if init == "native":
            from draftsmith.heads.formats.native_mtp import read_native

            body, own, weights = read_native(target)
            drafter = cls(body, layers=(FINAL,), **own, **options)
            drafter.attach(target)
            drafter.body.load_state_dict(weights)
            return drafter
        drafter = cls(layer_config(target, num_hidden_layers), **options)
        drafter.attach(target)
        with torch.no_grad():
            hidden = drafter.body.config.hidden_size
            drafter.body.input_proj.weight[:, :hidden] += torch.eye(hidden)
        return drafter

    @classmethod
    def like_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        from draftsmith.heads.formats.native_mtp import expected_layer

        # A module with random weights is about as large as that of the target's checkpoint.
        layer = expected_layer(target) if options.get("init") == "native" else None
        if layer is None:
            return cls.from_target(target, **{**options, "init": "random"})
        drafter = cls(layer, train_steps=options["train_steps"])
        drafter.attach(target)
        return drafter

    @torch.no_grad()
    def start_body(self, signals: TeacherSignals, frequencies_V: Tensor) -> None:
        """Begin with the target's normed state, drawn towards the state that predicts the tokens' frequencies."""
        body = self.body
        hidden, device = body.config.hidden_size, body.input_proj.weight.device
        state_H = best_state(body.target_head, frequencies_V, hidden)
        gain = state_H.square().mean().sqrt().clamp_min(1e-3)
        normed_nH = body.hidden_layernorm(final_states_of(signals))
        share = copied_share(body.target_head(gain * normed_nH).float(), frequencies_V)
        # The next step reads the state of this one, for which m.z should be 1, too.
        fed_back_nH = body.hidden_layernorm(state_H).expand(max(1, len(normed_nH) // 4), -1)
        silence(body)
        body.input_proj.weight.zero_()
        body.input_proj.weight[:, :hidden] = share * torch.eye(hidden, device=device)
        body.input_proj.weight[:, :hidden].addr_(state_H / gain, constant_reader(torch.cat([normed_nH, fed_back_nH])))
        nn.init.constant_(body.final_layernorm.weight, float(gain))

    def options(self) -> dict[str, Any]:
        return {**super().options(), **self._options}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        body = config["body"]
        if body.get("model_type", "llama") == "llama":
            return super().from_config(config)
        return cls(**{**config, "body": AutoConfig.for_model(**body), "layers": tuple(config["layers"])})
