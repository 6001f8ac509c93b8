"""Drafts from earlier texts are lossless: every outcome of the whole decoder is enumerated."""

from copy import deepcopy
from itertools import product

import pytest
from exact.enumeration import total_variation, whole_runs
from exact.one_round import DRAFTER_SEEDS, EXACT
from exact.test_lossless import CHOSEN_TREES, DRAWN_TREES, OTHER_PROMPT, PROMPT, TOP_2, target_alone, text_of
from exact.toys import ToyDrafter, ToyModel, ToyTarget

from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.policies import Chain, Policy
from draftsmith.decode.sampling import Processors
from draftsmith.heads.earlier_texts import NgramMemory, Recall


@pytest.mark.parametrize("policy", [Chain(2), DRAWN_TREES[0], CHOSEN_TREES[0], None], ids=str)
def test_drafts_from_earlier_texts_are_lossless(policy: Policy | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts of a batch read what the other one commits; their joint distribution is the product of the target's."""
    monkeypatch.setattr("draftsmith.heads.earlier_texts.TRUST", 1.5)  # these texts are too short to prefer the memory
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
        drafter = None if policy is None else ToyDrafter(ToyModel(DRAFTER_SEEDS + 6))  # `suffix:memory=on`
        recalls.append(Recall(drafter, min_match=2))
        recalls[-1].memory = deepcopy(earlier)
        return DecodeLoop(ToyTarget(p), recalls[-1], policy, texts, processors)

    one, other = (target_alone(p.logits, prompt, count, processors) for prompt, count in sizes)
    expected = {a + b: one[a] * other[b] for a, b in product(one, other)}
    assert total_variation(whole_runs(make), expected) < EXACT
    assert sum(recall.recalled for recall in recalls) > len(recalls) / 4
    assert sum(recall.drafted for recall in recalls) > len(recalls) / 4
