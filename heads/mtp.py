"""Multi-token prediction: a module of one decoder layer, included in some targets and shared by all draft steps.

    final state of t ──▶ norm ─┐
                               ├─▶ input_proj ──▶ decoder layer ──▶ norm ──▶ target's lm_head ──▶ token t+2
    embedding of t+1 ──▶ norm ─┘                                     └──▶ next step, in place of the final state

DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437, section 2.2. Drafting several tokens with one shared module, trained
on its own states with weights that decrease with the step: FastMTP (Cai et al. 2025, arXiv:2509.18362).
"""

from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig, PreTrainedModel

from draftsmith.heads.autoregressive import AutoregressiveDrafter
from draftsmith.heads.base import FINAL, TeacherSignals
from draftsmith.heads.formats.native_mtp import expected_layer, read_native
from draftsmith.heads.initial_weights import best_state, constant_reader, copied_share, final_states_of, silence
from draftsmith.heads.layers import layer_config
from draftsmith.heads.mtp_network import MtpNetwork


class Mtp(AutoregressiveDrafter[MtpNetwork]):
    """One shared MTP module with the target's embeddings and lm_head."""

    type: ClassVar[str] = "mtp"

    def __init__(
        self,
        body: LlamaConfig,
        *,
        train_steps: int = 3,
        layers: tuple[int, ...] = (FINAL,),
        draft_vocab_size: int | None = None,
        **options: bool,
    ) -> None:
        super().__init__(MtpNetwork(body, draft_vocab_size, **options), layers, train_steps)
        self._options = options

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        *,
        init: Literal["random", "native"] = "random",
        num_hidden_layers: int = 1,
        draft_vocabulary: list[int] | None = None,
        **options: Any,
    ) -> Self:
        """Return a module of the target's width; `init="native"` loads the one of the target's own checkpoint."""
        if init == "native":
            body, own, weights = read_native(target)
            drafter = cls(body, layers=(FINAL,), **own, **options)
            drafter.attach(target)
            drafter.body.load_state_dict(weights)
            drafter.body.start_lm_head(target, draft_vocabulary)
            return drafter
        drafter = cls(layer_config(target, num_hidden_layers), **options)
        drafter.attach(target)
        drafter.body.start_lm_head(target, draft_vocabulary)
        with torch.no_grad():
            hidden = drafter.body.config.hidden_size
            drafter.body.input_proj.weight[:, :hidden] += torch.eye(hidden)
        return drafter

    @classmethod
    def like_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        # A module with random weights is about as large as that of the target's checkpoint.
        layer = expected_layer(target) if options.get("init") == "native" else None
        if layer is None:
            return cls.from_target(target, **{**options, "init": "random"})
        drafter = cls(layer, train_steps=options["train_steps"])
        drafter.attach(target)
        drafter.body.start_lm_head(target, options.get("draft_vocabulary"))
        return drafter

    @torch.no_grad()
    def start_body(self, signals: TeacherSignals, frequencies_D: Tensor) -> None:
        """Begin with the target's normed state, drawn towards the state that predicts the tokens' frequencies."""
        body = self.body
        hidden, device = body.config.hidden_size, body.input_proj.weight.device
        state_H = best_state(body.target_head, frequencies_D, hidden)
        gain = state_H.square().mean().sqrt().clamp_min(1e-3)
        normed_nH = body.hidden_layernorm(final_states_of(signals))
        share = copied_share(body.target_head(gain * normed_nH).float(), frequencies_D)
        # The next step reads the state of this one, for which m.z should be 1, too.
        fed_back_nH = body.hidden_layernorm(state_H).expand(max(1, len(normed_nH) // 4), -1)
        silence(body)
        body.input_proj.weight.zero_()
        body.input_proj.weight[:, :hidden] = share * torch.eye(hidden, device=device)
        body.input_proj.weight[:, :hidden].addr_(state_H / gain, constant_reader(torch.cat([normed_nH, fed_back_nH])))
        nn.init.constant_(body.final_layernorm.weight, float(gain))

    def unfreeze(self) -> None:
        super().unfreeze()
        self.body.final_layernorm.requires_grad_(not self._options.get("target_norm"))

    def options(self) -> dict[str, Any]:
        return {**super().options(), **self._options}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        body = config["body"]
        if body.get("model_type", "llama") == "llama":
            return super().from_config(config)
        return cls(**{**config, "body": AutoConfig.for_model(**body), "layers": tuple(config["layers"])})
