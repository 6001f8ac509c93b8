"""Multi-token prediction: modules of one decoder layer, included in some targets. One module is shared by all steps.

    final state of t ──▶ norm ─┐
                               ├─▶ input_proj ──▶ decoder layer ──▶ norm ──▶ target's lm_head ──▶ token t+2
    embedding of t+1 ──▶ norm ─┘                                     └──▶ next step, in place of the final state

Of several modules each drafts one token, and reads the states of the module before it, see heads/mtp_network.py.

DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437, section 2.2. Drafting several tokens with one shared module, trained
on its own states with weights that decrease with the step: FastMTP (Cai et al. 2025, arXiv:2509.18362).
"""

from collections.abc import Iterable
from typing import Any, ClassVar, Literal, Self, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig, PreTrainedModel

from draftsmith.heads.autoregressive import AutoregressiveDrafter
from draftsmith.heads.base import FINAL, Context, DraftStates, Runner, TeacherSignals
from draftsmith.heads.formats.native_mtp import expected_layer, read_native, stated_modules
from draftsmith.heads.initial_weights import Regression, silence
from draftsmith.heads.layers import windows_of
from draftsmith.heads.mtp_network import ModuleRunner, MtpNetwork
from draftsmith.heads.read_positions import ReadPositions
from draftsmith.heads.unrolled_attention import UnrolledAttention


class Mtp(AutoregressiveDrafter[MtpNetwork]):
    """MTP modules with the target's embeddings and lm_head; a single one is shared by all draft steps."""

    type: ClassVar[str] = "mtp"

    def __init__(
        self,
        body: LlamaConfig,
        *,
        train_steps: int = 3,
        layers: tuple[int, ...] = (FINAL,),
        draft_vocab_size: int | None = None,
        num_modules: int = 1,
        **options: bool,
    ) -> None:
        super().__init__(MtpNetwork(body, draft_vocab_size, **options), layers, train_steps)
        self._options = options
        self.later = nn.ModuleList(MtpNetwork(body, **options) for _ in range(num_modules - 1))
        if num_modules > 1:
            self.max_draft_length = num_modules
            for network in self.networks:
                network.returns_logits = False

    @property
    def networks(self) -> list[MtpNetwork]:
        """The modules in the order in which they draft."""
        return [self.body, *(network for network in self.later if isinstance(network, MtpNetwork))]

    @property
    def steps(self) -> int:
        return len(self.networks) if self.later else self.train_steps

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        *,
        init: Literal["random", "native"] = "random",
        num_modules: int | None = None,
        draft_vocabulary: list[int] | None = None,
        **options: Any,
    ) -> Self:
        """Return modules of the target's width; `init="native"` loads those of the target's own checkpoint."""
        if init == "random":
            return super().from_target(
                target, num_modules=num_modules or 1, draft_vocabulary=draft_vocabulary, **options
            )
        options.pop("num_hidden_layers", None)  # the checkpoint's
        body, own, weights = read_native(target, num_modules)
        drafter = cls.on_target(target, body, num_modules=len(weights), **own, **options)
        for network, values in zip(drafter.networks, weights, strict=True):
            network.load_state_dict(values)
        drafter.body.start_lm_head(target, draft_vocabulary)
        return drafter

    @classmethod
    def on_target(
        cls, target: PreTrainedModel, body: LlamaConfig, draft_vocabulary: list[int] | None = None, **options: Any
    ) -> Self:
        drafter = super().on_target(target, body, draft_vocabulary, **options)
        for network in drafter.networks[1:]:
            network.start_from_target(target, None)
        return drafter

    @classmethod
    def like_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        # Modules with random weights are about as large as those of the target's checkpoint.
        if options.get("init") == "native":
            options["num_modules"] = options.get("num_modules") or stated_modules(target)
        layer = expected_layer(target) if options.get("init") == "native" else None
        if layer is None:
            return cls.from_target(target, **{**options, "init": "random"})
        shapes = {key: options[key] for key in ("train_steps", "num_modules")}
        return cls.on_target(target, layer, options.get("draft_vocabulary"), **shapes)

    def attach(self, target: PreTrainedModel) -> None:
        super().attach(target)
        for network in self.networks[1:]:
            network.attach(target)

    @torch.no_grad()
    def start_on_next_states(self, batches: Iterable[TeacherSignals]) -> None:
        """Begin with the linear prediction of the target's next state from the normed state and embedding."""
        body = self.body

        def inputs(states_nH: Tensor, tokens_n: Tensor) -> Tensor:
            normed = body.hidden_layernorm(states_nH.to(body.dtype)), body.token_layernorm(body.embed(tokens_n))
            return torch.cat(normed, -1)

        fitted = Regression.of(batches, inputs)
        gain_H = fitted.wanted_nH.square().mean(0).sqrt()
        gain_H = gain_H.clamp_min(float(gain_H.mean()) / 100 + 1e-6)
        silence(body)
        body.input_proj.weight.copy_(fitted.weight_HF / gain_H[:, None])
        # The norm gives every prediction the same size; the factor is that of the smallest squared error.
        predicted_nH = gain_H * nn.functional.normalize(fitted.inputs_nF @ body.input_proj.weight.T, dim=-1)
        predicted_nH = predicted_nH * len(gain_H) ** 0.5
        share = (predicted_nH * fitted.wanted_nH / gain_H**2).sum() / (predicted_nH / gain_H).square().sum()
        body.final_layernorm.weight.copy_(share.clamp(0.1, 1) * gain_H)
        weights = {name: value for name, value in body.state_dict().items() if not name.startswith("vocabulary.")}
        for network in self.networks[1:]:  # which read the states of this one
            network.load_state_dict(weights)

    def _new_runner(self, context: Context) -> Runner:
        if not self.later:
            return super()._new_runner(context)
        weight = self.body.input_proj.weight
        blank_BH = weight.new_zeros(len(context.sequences), len(weight))
        runner = ModuleRunner([context.runner(network) for network in self.networks], self.body.full_head, blank_BH)
        return cast(Runner, runner)  # the part of it that is called here

    def unroll(self, signals: TeacherSignals) -> list[DraftStates]:
        """Return the states of each step; those of several modules are over the whole sequence, as in decoding."""
        if not self.later:
            return super().unroll(signals)
        body, read = self.body, ReadPositions(signals, self.steps, signals.part)
        assert signals.features_BTF is not None, "the drafter's needs name layers"
        states_1XH = self._teacher_states(read.values(signals.features_BTF, read.first_X))
        tokens = None if body.vocabulary is None else body.vocabulary.tokens_D
        rope, windows, unrolled = body.rotary(states_1XH, read.positions(read.first_X)), windows_of(body.config), []
        for k, network in enumerate(self.networks):
            embeds_1XH, attend = body.embed(read.tokens(read.first_X, k + 1)), UnrolledAttention(read, windows)
            states_1XH = network.step(embeds_1XH, states_1XH, rope, attend)
            trained_1NH = states_1XH if read.among_N is None else states_1XH.index_select(1, read.among_N)
            unrolled.append(DraftStates(trained_1NH[0], read.towards(k + 1), body.head, vocabulary_D=tokens))
        return unrolled

    def unfreeze(self) -> None:
        super().unfreeze()
        self.body.final_layernorm.requires_grad_(not self._options.get("target_norm"))

    def options(self) -> dict[str, Any]:
        return {**super().options(), "num_modules": len(self.networks), **self._options}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        body = config["body"]
        if body.get("model_type", "llama") == "llama":
            return super().from_config(config)
        return cls(**{**config, "body": AutoConfig.for_model(**body), "layers": tuple(config["layers"])})
