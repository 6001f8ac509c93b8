"""Recurrent targets, those without rollback, with indexers, and with images: every outcome of several rounds."""

from typing import Any

import pytest
import torch
from conftest import make_llama
from drawn_tree import ChosenTree
from exact.enumeration import Tokens, total_variation, whole_runs
from exact.test_lossless import HEADS_OF_TARGETS, PROMPT, target_alone, text_of
from exact.toys import VOCAB
from recurrent_models import INDEXED_TREES, OTHERS, build
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, SuppressTokensLogitsProcessor
from vision_models import ImagePrompt, prompt
from vision_models import build as build_vision

from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.passes import eager
from draftsmith.decode.passes.attention import run_with
from draftsmith.decode.passes.capability import capability_of
from draftsmith.decode.passes.recurrent import Mixer
from draftsmith.decode.policies import Chain, Policy, SampledTree
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.target import TransformersTarget
from draftsmith.heads import HEADS, DraftModel
from draftsmith.heads.base import Drafter
from draftsmith.heads.hidden_states import extended

COUNT = 4
CHAIN, TREE = Chain(2), ChosenTree(((0,), (1,), (0, 0)))
ROUNDING = {"lfm2": 1e-10}
"""It computes in float64; the scans, states and norms of the others, in float32, have 1e-5."""
SMALL = {"num_hidden_layers": 2, "eos_token_id": None, "vocab_size": VOCAB}
LAYERS = {"lfm2": {"layer_types": ["conv", "full_attention"]}, "deepseek_v32": {"index_topk": 2}}
IMAGE = VOCAB
"""The placeholder of images is a token after those that are generated."""


def small(family: str, seed: int = 0) -> PreTrainedModel:
    model = build(family, seed, **SMALL, **LAYERS.get(family, {}))
    if family in OTHERS:
        capability_of(model)
    return model


@torch.inference_mode()
def head_of(kind: str, target: PreTrainedModel) -> Drafter:
    """Return a drafter with random weights: with a vocabulary of five, some of its tokens are accepted."""
    torch.manual_seed(6)
    options = {"layers": (1, 1, 2)} if kind == "eagle3" else {}
    drafter = HEADS[kind].from_target(target, **HEADS_OF_TARGETS[kind], **options).double().eval()
    for parameter in drafter.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3)
    return drafter


@torch.inference_mode()
def gap(
    target: PreTrainedModel,
    drafter: Drafter,
    policy: Policy = CHAIN,
    start: Tokens = PROMPT,
    inputs: dict[str, Any] | None = None,
    read: dict[str, Any] | None = None,
    extra: tuple[LogitsProcessor, ...] = (),
) -> float:
    """Return the total variation between texts of the decoder, with images `read`, and of the target with `inputs`."""
    processors = Processors(Sampling(0.8, top_k=2), extra)

    def logits(text: Tokens) -> Tensor:
        given = extended(inputs or {}, len(start), len(text))
        return target(input_ids=torch.tensor([text]), **given).logits[0, -1]

    def make() -> DecodeLoop:
        text = text_of(start, COUNT)
        text.inputs = read or inputs or {}
        return DecodeLoop(TransformersTarget(target), drafter, policy, [text], processors)

    return total_variation(whole_runs(make), target_alone(logits, start, COUNT, processors))


@pytest.mark.parametrize(
    ("family", "kind", "policy"),
    [
        ("lfm2", "draft_model", CHAIN),
        ("falcon_h1", "draft_model", CHAIN),
        ("jamba", "medusa", CHAIN),
        ("falcon_h1", "eagle3", CHAIN),
        ("rwkv", "draft_model", CHAIN),  # it reads what follows a copied cache
        ("deepseek_v32", "draft_model", CHAIN),  # its indexer chooses two tokens
        *[("deepseek_v32", "draft_model", TREE)] * INDEXED_TREES,
    ],
)
@pytest.mark.filterwarnings("ignore:model_type=")
def test_other_targets_are_lossless(family: str, kind: str, policy: Policy) -> None:
    target = small(family)
    drafter = DraftModel(small(family, 1)) if kind == "draft_model" else head_of(kind, target)
    assert gap(target, drafter, policy) < ROUNDING.get(family, 1e-5)


@pytest.mark.filterwarnings("ignore:model_type=")
def test_a_cache_that_is_not_copied_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "deepcopy", lambda cache: cache)
    monkeypatch.setitem(globals(), "capability_of", lambda model: run_with(model, "copied"))  # or it would not be used
    assert gap(small("rwkv"), DraftModel(small("rwkv", 1))) > 1e-2


def test_a_state_that_is_not_restored_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a control: the state after the draft is kept, whatever was accepted."""

    def keep(self: Mixer, counts: list[int]) -> None:
        if self._last is not None:
            self._saved, self._last, self._inputs, self._drafted = self._last, None, {}, 0

    monkeypatch.setattr(Mixer, "keep", keep)
    assert gap(small("lfm2"), DraftModel(small("lfm2", 1))) > 1e-2


def asked(family: str, seed: int) -> ImagePrompt:
    return prompt(family, seed, [1], [2, 3], image=IMAGE)


def gap_of_images(family: str, kind: str, policy: Policy, read: int = 0) -> float:
    """Return the gap between texts after one image and those of the target after the first one."""
    target = build_vision(family, 4, special=(IMAGE,), vocab_size=VOCAB + 1, num_hidden_layers=2)
    shown, extra = asked(family, 0), (SuppressTokensLogitsProcessor([IMAGE]),)
    own = DraftModel(make_llama(5, vocab_size=VOCAB + 1, eos_token_id=None, hidden_size=16).double())
    drafter = own if kind == "draft_model" else head_of(kind, target)
    return gap(target, drafter, policy, tuple(shown.ids), shown.inputs, asked(family, read).inputs, extra)


@pytest.mark.parametrize(
    ("family", "kind", "policy"),
    [
        ("qwen3_vl", "draft_model", CHAIN),
        ("qwen2_5_vl", "eagle3", SampledTree(2, 2)),
        pytest.param("gemma3", "eagle3", CHAIN, marks=pytest.mark.slow),
        pytest.param("smolvlm", "draft_model", SampledTree(2, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_texts_have_the_distribution_given_the_image(family: str, kind: str, policy: Policy) -> None:
    assert gap_of_images(family, kind, policy) < 1e-10


def test_the_distribution_depends_on_the_image() -> None:
    """As a control: the texts after one image differ from those after another."""
    assert gap_of_images("qwen3_vl", "draft_model", CHAIN, read=1) > 1e-2
