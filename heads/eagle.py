"""EAGLE-1 and HASS: one decoder layer that predicts the target's next final state, the input of the target's lm_head.

    f_t (final state) ──┐
                        ├─▶ fc ──▶ decoder layer ──▶ f̂_{t+1} ──▶ target's lm_head ──▶ token t+2
    embedding of t+1  ──┘                              └────▶ next step, with the embedding of t+2

EAGLE-1 (Li et al. 2024, arXiv:2401.15077) is trained on the target's states alone, with added noise; HASS (Zhang et
al. 2024, arXiv:2408.15766) also on its own states, over several steps, as in decoding.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from draftsmith.heads.autoregressive import AutoregressiveDrafter, DraftNetwork
from draftsmith.heads.base import FINAL, TeacherSignals
from draftsmith.heads.initial_weights import Regression, silence
from draftsmith.heads.layers import Attend, DecoderLayer, Rope


class EagleNetwork(DraftNetwork):
    """fc on [embedding; state], then decoder layers, the first without its input norm."""

    def __init__(self, config: LlamaConfig, draft_vocab_size: int | None = None) -> None:
        super().__init__(config, draft_vocab_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, norm_input=layer > 0) for layer in range(config.num_hidden_layers)
        )

    @torch.no_grad()
    def start_from_target(self, target: PreTrainedModel, draft_vocabulary: list[int] | None) -> None:
        """At first fc passes the state through unchanged."""
        super().start_from_target(target, draft_vocabulary)
        hidden = self.config.hidden_size
        self.fc.weight[:, hidden:] += torch.eye(hidden)

    def step(
        self, embeds_BTH: Tensor, states_BTH: Tensor, rope: Rope, attend: Attend, read_Q: Tensor | None = None
    ) -> Tensor:
        *before, last = self.layers
        x_BTH = self.fc(torch.cat([embeds_BTH, states_BTH], -1))
        for layer in before:
            x_BTH = layer(x_BTH, rope, attend)
        return last(x_BTH, rope, attend, read_Q)


class Eagle(AutoregressiveDrafter[EagleNetwork]):
    """EAGLE-1; with the policy `best-first` it drafts as EAGLE-2."""

    type: ClassVar[str] = "eagle"
    regresses: ClassVar[bool] = True
    divides_texts: ClassVar[bool] = True

    def __init__(
        self,
        body: LlamaConfig,
        *,
        train_steps: int = 1,
        noise: float = 0.1,
        layers: tuple[int, ...] = (FINAL,),
        draft_vocab_size: int | None = None,
    ) -> None:
        super().__init__(EagleNetwork(body, draft_vocab_size), layers, train_steps)
        self.noise = noise

    @torch.no_grad()
    def start_on_next_states(self, batches: Iterable[TeacherSignals]) -> None:
        """Begin with the linear prediction of the target's next state from the embedding and the state."""
        body = self.body

        def inputs(states_nH: Tensor, tokens_n: Tensor) -> Tensor:
            both_nF = torch.cat([body.embed(tokens_n), states_nH.to(body.dtype)], -1)
            return nn.functional.pad(both_nF, (0, 1), value=1.0)  # the bias

        weight_HF = Regression.of(batches, inputs).weight_HF
        silence(body)
        body.fc.weight.copy_(weight_HF[:, :-1])
        body.fc.bias.copy_(weight_HF[:, -1])

    def options(self) -> dict[str, Any]:
        return {**super().options(), "noise": self.noise}

    def _teacher_states(self, features_1XF: Tensor) -> Tensor:
        states_1XH = super()._teacher_states(features_1XF)
        if not (self.training and self.noise):
            return states_1XH
        # Uniform noise makes the drafter robust to errors of its own states (EAGLE, section 4).
        return states_1XH + (torch.rand_like(states_1XH) * 2 - 1) * self.noise


class Hass(Eagle):
    """EAGLE-1's network trained on its own states, by default over three steps."""

    type: ClassVar[str] = "hass"

    def __init__(self, body: LlamaConfig, *, train_steps: int = 3, **options: Any) -> None:
        super().__init__(body, train_steps=train_steps, **options)
