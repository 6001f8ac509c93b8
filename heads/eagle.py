"""EAGLE-1 and HASS: one decoder layer that predicts the target's next final state, the input of the target's lm_head.

    f_t (final state) ──┐
                        ├─▶ fc ──▶ decoder layer ──▶ f̂_{t+1} ──▶ target's lm_head ──▶ token t+2
    embedding of t+1  ──┘                              └────▶ next step, with the embedding of t+2

EAGLE-1 (Li et al. 2024, arXiv:2401.15077) is trained on the target's states alone, with added noise; HASS (Zhang et
al. 2024, arXiv:2408.15766) also on its own states, over several steps, as in decoding.
"""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from draftsmith.heads.autoregressive import AutoregressiveDrafter, DraftNetwork
from draftsmith.heads.base import FINAL, TeacherSignals
from draftsmith.heads.initial_weights import best_state, copied_share, final_states_of, silence
from draftsmith.heads.layers import Attend, DecoderLayer, Rope, layer_config


class EagleNetwork(DraftNetwork):
    """fc on [embedding; state], then decoder layers, the first without its input norm."""

    def __init__(self, config: LlamaConfig, draft_vocab_size: int | None = None) -> None:
        super().__init__(config, draft_vocab_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, norm_input=layer > 0) for layer in range(config.num_hidden_layers)
        )

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

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        *,
        num_hidden_layers: int = 1,
        draft_vocabulary: list[int] | None = None,
        **options: Any,
    ) -> Self:
        """Return decoder layers of the target's width. At first fc passes the state through unchanged."""
        drafter = cls(layer_config(target, num_hidden_layers), **options)
        drafter.attach(target)
        drafter.body.start_lm_head(target, draft_vocabulary)
        with torch.no_grad():
            hidden = drafter.body.config.hidden_size
            drafter.body.fc.weight[:, hidden:] += torch.eye(hidden)
        return drafter

    @torch.no_grad()
    def start_body(self, signals: TeacherSignals, frequencies_D: Tensor) -> None:
        """Begin with the target's state, drawn towards the state that predicts the tokens' frequencies."""
        body, hidden_nH = self.body, final_states_of(signals)
        hidden, device = body.config.hidden_size, body.fc.weight.device
        mean_H, state_H = hidden_nH.mean(0), best_state(body.target_head, frequencies_D, hidden)
        # The next step reads the state of this one, so its distance from the mean counts as well.
        read = (hidden_nH, torch.stack([state_H, 2 * mean_H - state_H]))
        share = min(copied_share(body.target_head(states_nH).float(), frequencies_D) for states_nH in read)
        silence(body)
        body.fc.weight.zero_()
        body.fc.weight[:, hidden:] = share * torch.eye(hidden, device=device)
        body.fc.bias.copy_(state_H - share * mean_H)

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
