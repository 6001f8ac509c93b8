"""A drafter whose weights change between rounds is lossless: every outcome of the whole decoder is enumerated.

The wrong variant, which learns from a draft before it is verified, is rejected in test_mutants.py.
"""

from collections.abc import Sequence
from copy import deepcopy
from itertools import product

import pytest
import torch
from conftest import make_llama
from exact.enumeration import total_variation, whole_runs
from exact.one_round import DRAFTER_SEEDS, EXACT
from exact.test_lossless import (
    CHOSEN_TREES,
    DRAWN_TREES,
    EXACT_ENOUGH,
    OTHER_PROMPT,
    PROMPT,
    TINY,
    TOP_2,
    _drafter,
    target_alone,
    text_of,
)
from exact.toys import ToyDrafter, ToyModel, ToyTarget
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.policies import Chain, Policy
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.decode.target import TransformersTarget
from draftsmith.heads.base import Drafter
from draftsmith.heads.memory import NgramMemory
from draftsmith.heads.recall import Recall


def history(texts: Sequence[DecodeSequence]) -> int:
    """A number that depends on all committed tokens and on how many draft tokens each round accepted."""
    return hash(tuple((tuple(text.tokens), *(record.accepted for record in text.rounds)) for text in texts))


class Learns:
    """Changes a toy drafter between rounds, as a function of everything so far."""

    def __init__(self, drafter: ToyDrafter) -> None:
        self.drafter, self.first, self.changes = drafter, drafter.model, 0

    def attach(self, target: PreTrainedModel, drafter: Drafter | None) -> Drafter | None:
        return drafter

    def begin(self, texts: Sequence[DecodeSequence], sampling: Sampling) -> None:
        self.texts = list(texts)
        self.restore()

    def restore(self) -> None:
        self.drafter.model = self.first

    def read(self, text: DecodeSequence, hidden_nH: Tensor, features_nF: Tensor | None) -> None: ...

    def between_rounds(self) -> None:
        self.changes += 1
        self.drafter.model = ToyModel(history(self.texts))


@pytest.mark.parametrize("policy", [Chain(2), *DRAWN_TREES, CHOSEN_TREES[0]], ids=str)
def test_a_drafter_that_changes_between_rounds_is_lossless(policy: Policy) -> None:
    processors = Processors(TOP_2)
    for seed in range(2):
        p = ToyModel(seed)
        learns = Learns(ToyDrafter(ToyModel(DRAFTER_SEEDS + seed)))

        def make(p: ToyModel = p, learns: Learns = learns) -> DecodeLoop:
            texts = [text_of(PROMPT, 4)]
            return DecodeLoop(ToyTarget(p), learns.drafter, policy, texts, processors, observer=learns)

        actual = whole_runs(make)
        assert learns.changes > len(actual)
        assert total_variation(actual, target_alone(p.logits, PROMPT, 4, processors)) < EXACT, f"pair {seed}"


def test_texts_of_a_batch_do_not_depend_on_each_other_through_the_drafter() -> None:
    """Its weights depend on both texts; their joint distribution is still the product of the target's."""
    p, learns, processors = ToyModel(5), Learns(ToyDrafter(ToyModel(DRAFTER_SEEDS + 5))), Processors(TOP_2)
    sizes = ((PROMPT, 3), (OTHER_PROMPT, 4))

    def make() -> DecodeLoop:
        texts = [text_of(*size) for size in sizes]
        return DecodeLoop(ToyTarget(p), learns.drafter, Chain(2), texts, processors, observer=learns)

    one, other = (target_alone(p.logits, prompt, count, processors) for prompt, count in sizes)
    expected = {a + b: one[a] * other[b] for a, b in product(one, other)}
    assert total_variation(whole_runs(make), expected) < EXACT


class LearnsWeights(Learns):
    """Moves all weights of a real drafter, whose cache then holds keys of earlier weights."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.changes = drafter, 0
        self.stored = {name: value.clone() for name, value in drafter.state_dict().items()}

    def restore(self) -> None:
        self.drafter.load_state_dict(self.stored)

    def between_rounds(self) -> None:
        self.changes += 1
        generator = torch.Generator().manual_seed(history(self.texts) % 2**62)
        for weight in self.drafter.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, dtype=weight.dtype, generator=generator))


@pytest.mark.parametrize("kind", ["draft_model", "medusa", "mtp"])
@torch.inference_mode()
def test_the_weights_of_transformers_models_may_change(kind: str) -> None:
    target = make_llama(3, **TINY, num_hidden_layers=1).double()
    learns, processors = LearnsWeights(_drafter(kind, target)), Processors(TOP_2)

    def make() -> DecodeLoop:
        texts = [text_of(PROMPT, 4)]
        return DecodeLoop(TransformersTarget(target), learns.drafter, Chain(2), texts, processors, observer=learns)

    def logits(text: tuple[int, ...]) -> Tensor:
        return target(input_ids=torch.tensor([text])).logits[0, -1]

    actual = whole_runs(make)
    assert learns.changes > len(actual)
    assert total_variation(actual, target_alone(logits, PROMPT, 4, processors)) < EXACT_ENOUGH


@pytest.mark.parametrize("policy", [Chain(2), DRAWN_TREES[0], CHOSEN_TREES[0]], ids=str)
def test_drafts_from_earlier_texts_are_lossless(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts of a batch read what the other one commits; their joint distribution is the product of the target's."""
    monkeypatch.setattr("draftsmith.heads.recall.TRUST", 1.5)  # these texts are too short to prefer the memory
    p, processors = ToyModel(6), Processors(TOP_2)
    sizes, recalls = ((PROMPT, 4), (OTHER_PROMPT, 3)), list[Recall]()
    earlier = NgramMemory(1024)
    for prompt in (PROMPT, OTHER_PROMPT):  # texts that the target is likely to write again
        text = list(prompt)
        for _ in range(8):
            text.append(int(p.logits(tuple(text)).argmax()))
        for _ in range(40):
            earlier.read(text, 0)

    def make() -> DecodeLoop:
        texts = [text_of(*size) for size in sizes]
        recalls.append(Recall(ToyDrafter(ToyModel(DRAFTER_SEEDS + 6)), min_match=2))
        recalls[-1].memory = deepcopy(earlier)
        return DecodeLoop(ToyTarget(p), recalls[-1], policy, texts, processors)

    one, other = (target_alone(p.logits, prompt, count, processors) for prompt, count in sizes)
    expected = {a + b: one[a] * other[b] for a, b in product(one, other)}
    assert total_variation(whole_runs(make), expected) < EXACT
    assert sum(recall.recalled for recall in recalls) > len(recalls) / 4
    assert sum(recall.drafted for recall in recalls) > len(recalls) / 4
