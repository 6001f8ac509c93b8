"""What drafters with layers of their own share: a network that the decoder's reader drives, and the target's parts.

A body reads, for each token, its embedding and a state: of the target, or of the body itself one step earlier.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.heads.drafter import Needs, TrainableDrafter
from draftsmith.heads.layers import Attend, CachedAttention, Rope, ready, rotary
from draftsmith.heads.vocabulary import DraftVocabulary

# Shapes: B rows, T tokens fed, F features of the target a position, H hidden size, V vocabulary, D draft vocabulary.


@dataclass
class BodyOutput:
    logits: Tensor
    """[B, T, V]"""
    states: Tensor
    """[B, T, H]: what the next step reads."""


class Body(nn.Module, ABC):
    """A few decoder layers on [embedding of a token; state behind the token before it]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = ready(config)
        self.rotary = rotary(config)
        self.vocabulary: DraftVocabulary | None = None
        self._shared: tuple[nn.Module, ...] = ()

    def attach(self, target: nn.Module) -> None:
        """Share the target's embeddings and lm_head. In a tuple, so that they are neither trained nor saved."""
        self._shared = (target.get_input_embeddings(), target.get_output_embeddings())

    def embed(self, ids_BT: Tensor) -> Tensor:
        """The target's embeddings [B, T, H], in the body's dtype."""
        return self._shared[0](ids_BT).to(self.dtype)

    def target_head(self, states_nH: Tensor) -> Tensor:
        """The target's lm_head on states of the body."""
        head = self._shared[1]
        return head(states_nH.to(head.weight.dtype))

    @property
    def dtype(self) -> Any:
        return next(self.parameters()).dtype

    @abstractmethod
    def project(self, features_nF: Tensor) -> Tensor:
        """The target's features as a state [n, H]."""

    @abstractmethod
    def step(self, embeds_BTH: Tensor, states_BTH: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """One step: the states [B, T, H] behind these tokens."""

    @abstractmethod
    def head(self, states_nH: Tensor) -> Tensor:
        """Logits [n, V] of states that `step` returned, or [n, D] over the draft vocabulary."""

    def head_parameters(self) -> tuple[nn.Parameter, ...]:
        """What `head` trains; nothing where it is the target's."""
        return ()

    def full_head(self, states_nH: Tensor) -> Tensor:
        """Logits [n, V], whatever the draft vocabulary."""
        logits_nD = self.head(states_nH)
        return logits_nD if self.vocabulary is None else self.vocabulary.expand(logits_nD)

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Any,
        use_cache: bool = True,
        logits_to_keep: int | Tensor = 0,
    ) -> BodyOutput:
        """As a transformers LM, with a state [B, T, H] beside each token."""
        embeds_BTH = self.embed(input_ids)
        rope = self.rotary(embeds_BTH, position_ids)
        attend = CachedAttention(past_key_values, attention_mask)
        states_BTH = self.step(embeds_BTH, features.to(self.dtype), rope, attend)
        if isinstance(logits_to_keep, Tensor):
            states_BTH = states_BTH[:, logits_to_keep]
        else:
            states_BTH = states_BTH[:, -logits_to_keep:]
        return BodyOutput(self.full_head(states_BTH), states_BTH)


class BodyDrafter(TrainableDrafter):
    """A drafter around a body that reads features of the target's `layers`."""

    needs: ClassVar[Needs] = Needs(hidden=True)

    def __init__(self, body: Body, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.body = body
        self.needs = Needs(hidden=True, layers=layers)
        self.vocab_size, self.context_limit = body.config.vocab_size, body.config.max_position_embeddings

    def attach(self, target: nn.Module) -> None:
        self.body.attach(target)

    @property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        return self.body.vocabulary

    def config(self) -> dict[str, Any]:
        return {"body": self.body.config.to_diff_dict(), "layers": list(self.needs.layers), **self.options()}

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """What else `from_config` has to know, beside the body's config and the layers."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(**{**config, "body": LlamaConfig(**config["body"]), "layers": tuple(config["layers"])})
