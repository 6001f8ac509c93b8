"""Small targets and drafters whose compiled passes are tested: one case for each kind of pass.

In fp64, in which the order of additions decides no token.
"""

from collections.abc import Callable

import torch
from conftest import make_llama

from draftsmith.heads.base import FINAL, Drafter
from draftsmith.heads.dflash import DFlash
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.eagle3 import Eagle3, ParallelEagle
from draftsmith.heads.medusa import Medusa
from draftsmith.heads.mtp import Mtp

PROMPTS = [[5, 9, 33, 2], [7], [40, 41, 42, 43, 44, 45, 46, 47, 48]]
SETTINGS = {"max_new_tokens": 24, "eos_token_id": [1, 6, 19, 20]}


def target_model() -> torch.nn.Module:
    """A model with two query heads for each key/value head."""
    return make_llama(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2).double()


def noisy(drafter: Drafter, scale: float = 0.02) -> Drafter:
    """Return a drafter that agrees with the target less often than it did."""
    for parameter in drafter.parameters():
        parameter.data += scale * torch.randn_like(parameter)
    return drafter


def draft_model(target: torch.nn.Module) -> Drafter:
    return noisy(DraftModel(target_model()))


def eagle(target: torch.nn.Module) -> Drafter:
    return noisy(Eagle3.from_target(target, layers=[1, FINAL], draft_vocabulary=list(range(0, 60, 2))).double())


def mtp(target: torch.nn.Module) -> Drafter:
    return noisy(Mtp.from_target(target).double(), 0.05)


def mtp_modules(target: torch.nn.Module) -> Drafter:
    return noisy(Mtp.from_target(target, num_modules=3).double(), 0.05)


def peagle(target: torch.nn.Module) -> Drafter:
    return noisy(ParallelEagle.from_target(target, num_tokens=3, layers=[1, FINAL]).double())


def dflash(target: torch.nn.Module) -> Drafter:
    """A block drafter of 4 tokens, which see the last 2 features."""
    drafter = DFlash.from_target(target, block_size=4, layers=[1, FINAL], num_hidden_layers=1).double()
    drafter.body.sees.windows = (2,)
    return noisy(drafter)


def dspark(target: torch.nn.Module) -> Drafter:
    options = {"sample_from_anchor": True, "markov_rank": 4, "markov_type": "rnn", "confidence_head": True}
    return noisy(DFlash.from_target(target, block_size=4, layers=[1, FINAL], **options).double(), 0.1)


def medusa(target: torch.nn.Module) -> Drafter:
    return noisy(Medusa.from_target(target, draft_vocabulary=list(range(0, 64, 2))).double())


CASES: dict[str, tuple[Callable[[torch.nn.Module], Drafter] | None, dict[str, object]]] = {
    "target alone": (None, {}),
    "draft_model": (draft_model, {"draft_length": 3}),
    "best-first": (draft_model, {"policy": "best-first:size=7,depth=3"}),
    "eagle3": (eagle, {"draft_length": 3}),
    "mtp": (mtp, {"draft_length": 3}),
    "mtp of 3 modules": (mtp_modules, {"draft_length": 3}),
    "peagle": (peagle, {"draft_length": 3}),
    "dflash": (dflash, {"draft_length": 3}),
    "dspark": (dspark, {"draft_length": 4}),
    "dspark, tree": (dspark, {"policy": "best-first:size=9,depth=3"}),
    "medusa": (medusa, {"draft_length": 3}),
}
