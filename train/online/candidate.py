"""The drafter in use and the candidate that is trained beside it."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS
from draftsmith.heads.autoregressive import AutoregressiveDrafter
from draftsmith.heads.base import Drafter, TrainableDrafter
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.lora import adapted_layers, add_lora, check_lora, merged_state
from draftsmith.heads.ngram import Hybrid


def learnable(drafter: Drafter | None, vocabulary: int) -> TrainableDrafter:
    """Return the drafter, or the trained one of a hybrid; ConfigError for one that cannot learn online, by its type.

    `vocabulary`: the target's size.
    """
    if isinstance(drafter, Hybrid):
        drafter = drafter.drafter
    expected = f"a trained drafter of type {', '.join(HEADS)}"
    if drafter is None:
        raise ConfigError(f"learn without a drafter; expected {expected}")
    if not isinstance(drafter, TrainableDrafter) or type(drafter) is not HEADS.get(drafter.type):
        raise ConfigError(
            f"learn with a drafter of type {drafter.type!r}, which has no weights of its own; expected {expected}"
        )
    if drafter.vocab_size != vocabulary:
        raise ConfigError(
            f"learn with a {drafter.type} drafter of {drafter.vocab_size} tokens, whose padding is not the target's; "
            f"expected the target's {vocabulary}"
        )
    if isinstance(drafter, DraftModel) and adapted_layers(drafter.model):
        raise ConfigError("learn with a draft model that has adapters; expected them merged, as when it is saved")
    if not all(weight.is_floating_point() for weight in drafter.parameters()):
        raise ConfigError(f"learn with a quantised {drafter.type} drafter; expected weights in floating point")
    return drafter


AVERAGE = 0.95
"""Weight of the average so far beside the next step's weights; less in the first steps."""
UNROLLED = 2
"""Steps of the training-time test, for later draft positions: each costs as much as the first (docs/online.md)."""


class Candidate:
    """A copy of the drafter in use, in fp32, that is trained; its running average; the weights to return to.

    The average is what is judged and adopted: a few rows at a constant rate leave noise in the weights of single steps
    (Polyak and Juditsky 1992).

    Args:
        lora_rank: train only adapters of this rank, on a draft model.
        seed: of the adapters' initial weights.
    """

    def __init__(
        self, served: TrainableDrafter, target: PreTrainedModel, lora_rank: int | None = None, seed: int = 0
    ) -> None:
        self.served = served
        self.trained, self.drafter = (_copy(served, target, lora_rank, seed) for _ in range(2))
        if isinstance(self.trained, AutoregressiveDrafter):
            self.trained.train_steps = UNROLLED
        self.averaged = 0
        """Steps since the average began."""
        self._adopted = _cloned(self.drafter)

    @torch.no_grad()
    def average(self) -> None:
        """Add the weights of a step to the average."""
        self.averaged += 1
        share = 1 - min(AVERAGE, self.averaged / (self.averaged + 1))
        trained = _weights(self.trained)
        for name, parameter in _weights(self.drafter).items():
            parameter.lerp_(trained[name], share)

    @torch.no_grad()
    def adopt(self) -> None:
        """Copy the average into the drafter in use, in place: compiled passes and caches read the same tensors."""
        if isinstance(self.drafter, DraftModel):
            weights = {f"model.{name}": value for name, value in merged_state(self.drafter.model).items()}
        else:
            weights = self.drafter.state_dict()
        for name, value in self.served.state_dict().items():
            value.copy_(weights[name])
        self._adopted = _cloned(self.drafter)

    @torch.no_grad()
    def roll_back(self) -> None:
        """Return to the weights that were last adopted."""
        for drafter in (self.trained, self.drafter):
            for name, parameter in _weights(drafter).items():
                parameter.copy_(self._adopted[name])
        self.averaged = 0


def _copy(served: TrainableDrafter, target: PreTrainedModel, lora_rank: int | None, seed: int) -> TrainableDrafter:
    weight = next(served.parameters())
    with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
        torch.manual_seed(seed)
        drafter = type(served).from_config(served.config())
        drafter.load_state_dict(served.state_dict())
        if lora_rank is not None:
            if not isinstance(drafter, DraftModel):
                raise ConfigError(f"lora_rank={lora_rank} with a {served.type} drafter; expected a draft model")
            check_lora(drafter.model, "learn", rank=lora_rank)
            add_lora(drafter.model, rank=lora_rank, alpha=2 * lora_rank)
    drafter.attach(target)
    drafter.shared_vocabulary = served.shared_vocabulary
    # Small steps are lost in bf16: the candidate keeps them, the drafter in use gets the rounded weights.
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return drafter.to(device=weight.device, dtype=dtype)


def _weights(drafter: TrainableDrafter) -> dict[str, Tensor]:
    named = drafter.named_parameters()
    return {name: parameter.detach() for name, parameter in named if parameter.requires_grad}


def _cloned(drafter: TrainableDrafter) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in _weights(drafter).items()}
