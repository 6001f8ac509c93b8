"""The teacher in the loop: the target's final hidden states, from which p is made again chunk by chunk."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from draftsmith.decode.features import Features
from draftsmith.errors import ConfigError
from draftsmith.heads.drafter import TeacherSignals
from draftsmith.heads.final_states import final_states

# Shapes: B batch, T positions, H hidden size.


class OnlineTeacher:
    """Runs the frozen target without its lm_head: H numbers a token instead of a vocabulary's worth.

    `layers`: whose outputs are wanted as features, see `Needs.layers`.
    """

    def __init__(self, model: nn.Module, layers: tuple[int, ...] = ()) -> None:
        self.model = model
        self._features = Features(model, layers) if layers else None
        self.lm_head = model.get_output_embeddings()
        self._require_plain_head()

    def signals(
        self,
        input_ids_BT: Tensor,
        attention_mask_BT: Tensor,
        mask_BT: Tensor,
        source_BS: Tensor | None = None,
        source_mask_BS: Tensor | None = None,
        rows: Sequence[int] = (),
        *,
        gradient: bool = False,
    ) -> TeacherSignals:
        """The batch as the target sees it; see `TeacherSignals` for what the mask and the source mean.

        `rows` are for a teacher that has been asked before (distill/signal_cache.py). `gradient`: the signals lead back
        into the target, whose adapters are trained with the drafter.
        """
        text = (input_ids_BT, attention_mask_BT)
        with torch.set_grad_enabled(gradient):
            hidden_BTH = final_states(self.model, *text, source_BS, source_mask_BS)
        features_BTF = None if self._features is None else self._features.take()
        return TeacherSignals(*text, hidden_BTH, mask_BT, features_BTF, source_BS, source_mask_BS)

    @torch.no_grad()
    def _require_plain_head(self) -> None:
        """Some models scale or cap their logits behind the lm_head; for them lm_head(hidden) would be another p."""
        name = type(self.model).__name__
        if self.lm_head is None:
            raise ConfigError(f"target {name} has no lm_head; expected a causal language model")
        device = next(self.model.parameters()).device
        probe_1T = torch.arange(1, 4, device=device)[None]
        if self.model.config.is_encoder_decoder:
            source = probe_1T
            logits = self.model(input_ids=probe_1T, decoder_input_ids=probe_1T, use_cache=False).logits.float()
        else:
            source = None
            logits = self.model(input_ids=probe_1T, use_cache=False).logits.float()
        again = self.lm_head(final_states(self.model, probe_1T, torch.ones_like(probe_1T), source)).float()
        # The same product twice, so all but equal; half precision may round once more (bf16 has 8 bits).
        room = (1e-4 if self.lm_head.weight.dtype == torch.float32 else 1e-2) * logits.abs().max()
        capped = getattr(self.model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
        if again.shape != logits.shape or (again - logits).abs().max() > room or capped:
            raise ConfigError(
                f"target {name} transforms its logits behind the lm_head; expected logits = lm_head(last hidden state)"
            )
