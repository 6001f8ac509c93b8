"""Texts of recurrent models, of models without rollback and with indexers have the target's distribution.

Every outcome of several rounds is enumerated.
"""

import pytest
import torch
from drawn_tree import ChosenTree
from exact.enumeration import Tokens, total_variation, whole_runs
from exact.test_lossless import HEADS_OF_TARGETS, PROMPT, target_alone, text_of
from exact.toys import VOCAB
from recurrent_models import INDEXED_TREES, OTHERS, build
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.passes import eager
from draftsmith.decode.passes.attention import run_with
from draftsmith.decode.passes.capability import capability_of
from draftsmith.decode.passes.recurrent import Mixer
from draftsmith.decode.policies import Chain, Policy
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.target import TransformersTarget
from draftsmith.heads import HEADS, DraftModel
from draftsmith.heads.base import Drafter

COUNT = 4
CHAIN, TREE = Chain(2), ChosenTree(((0,), (1,), (0, 0)))
ROUNDING = {"lfm2": 1e-10}
"""It computes in float64; the scans, states and norms of the others, in float32, have 1e-5."""
SMALL = {"num_hidden_layers": 2, "eos_token_id": None, "vocab_size": VOCAB}
LAYERS = {"lfm2": {"layer_types": ["conv", "full_attention"]}, "deepseek_v32": {"index_topk": 2}}


def small(family: str, seed: int) -> PreTrainedModel:
    model = build(family, seed, **SMALL, **LAYERS.get(family, {}))
    if family in OTHERS:
        capability_of(model)
    return model


@torch.inference_mode()
def drafter_of(kind: str, target: PreTrainedModel, family: str) -> Drafter:
    """Return a drafter with random weights: with a vocabulary of five, some of its tokens are accepted."""
    if kind == "draft_model":
        return DraftModel(small(family, 1))
    torch.manual_seed(6)
    options = {"layers": (1, 1, 2)} if kind == "eagle3" else {}
    drafter = HEADS[kind].from_target(target, **HEADS_OF_TARGETS[kind], **options).double().eval()
    for parameter in drafter.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3)
    return drafter


@torch.inference_mode()
def gap(family: str, kind: str, policy: Policy = CHAIN) -> float:
    """Return the total variation between the texts of the decoder and those of the target alone."""
    target, processors = small(family, 0), Processors(Sampling(0.8, top_k=2))
    drafter = drafter_of(kind, target, family)

    def logits(text: Tokens) -> Tensor:
        return target(input_ids=torch.tensor([text])).logits[0, -1]

    def make() -> DecodeLoop:
        return DecodeLoop(TransformersTarget(target), drafter, policy, [text_of(PROMPT, COUNT)], processors)

    return total_variation(whole_runs(make), target_alone(logits, PROMPT, COUNT, processors))


@pytest.mark.parametrize(
    ("family", "kind"),
    [("lfm2", "draft_model"), ("falcon_h1", "draft_model"), ("jamba", "medusa"), ("falcon_h1", "eagle3")],
)
def test_recurrent_targets_are_lossless(family: str, kind: str) -> None:
    assert gap(family, kind) < ROUNDING.get(family, 1e-5)


@pytest.mark.parametrize(
    ("family", "policy"), [("rwkv", CHAIN), ("deepseek_v32", CHAIN), *[("deepseek_v32", TREE)] * INDEXED_TREES]
)
@pytest.mark.filterwarnings("ignore:model_type=")
def test_models_without_rollback_and_with_an_indexer_are_lossless(family: str, policy: Policy) -> None:
    """The indexer chooses two tokens; the other model reads what follows a copied cache."""
    assert gap(family, "draft_model", policy) < ROUNDING.get(family, 1e-5)


@pytest.mark.filterwarnings("ignore:model_type=")
def test_a_cache_that_is_not_copied_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "deepcopy", lambda cache: cache)
    monkeypatch.setitem(globals(), "capability_of", lambda model: run_with(model, "copied"))  # or it would not be used
    assert gap("rwkv", "draft_model") > 1e-2


def test_a_state_that_is_not_restored_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a control: the state after the draft is kept, whatever was accepted."""

    def keep(self: Mixer, counts: list[int]) -> None:
        if self._last is not None:
            self._saved, self._last, self._inputs, self._drafted = self._last, None, {}, 0

    monkeypatch.setattr(Mixer, "keep", keep)
    assert gap("lfm2", "draft_model") > 1e-2
