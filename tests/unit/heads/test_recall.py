"""Drafts from earlier texts: what the memory reads, when it is preferred, and that texts stay the target's own."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import make_llama
from transformers import LlamaForCausalLM

from draftsmith import SpeculativeDecoder, load_drafter
from draftsmith.errors import ConfigError
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_model import DraftModel, first_layers
from draftsmith.heads.draft_tree import Draft
from draftsmith.heads.ngram import Hybrid
from draftsmith.heads.recall import EXPLORED, PRIOR, RECENT, Recall, Situation, memories

PROMPTS = [[5, 9, 33], [7, 7, 8], [40], [11, 2, 3, 4], [21, 22], [50, 51, 52]]
GREEDY: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None}


def rounds(decoder: SpeculativeDecoder, prompts: list[list[int]] = PROMPTS) -> int:
    return sum(len(decoder.generate(prompt, **GREEDY).rounds) for prompt in prompts)


def test_texts_are_the_targets_own_and_known_ones_take_few_rounds(tiny_target: LlamaForCausalLM) -> None:
    expected = [SpeculativeDecoder(tiny_target).generate(prompt, **GREEDY).tokens for prompt in PROMPTS]
    recall = Recall(DraftModel(make_llama(1)))
    decoder = SpeculativeDecoder(tiny_target, recall, draft_length=3)
    first = [decoder.generate(prompt, **GREEDY) for prompt in PROMPTS]
    for _ in range(3):
        again = [decoder.generate(prompt, **GREEDY) for prompt in PROMPTS]
    assert [output.tokens for output in first] == [output.tokens for output in again] == expected
    assert [output.tokens for output in decoder.generate_batch(PROMPTS, **GREEDY)] == expected
    assert sum(len(output.rounds) for output in again) < 0.6 * sum(len(output.rounds) for output in first)
    assert recall.recalled > 0


def test_without_texts_in_memory_it_decodes_as_the_hybrid(tiny_target: LlamaForCausalLM) -> None:
    for prompt in PROMPTS:
        decoders = [SpeculativeDecoder(tiny_target, kind(DraftModel(make_llama(1)))) for kind in (Hybrid, Recall)]
        found = [decoder.generate(prompt, max_new_tokens=3, eos_token_id=None) for decoder in decoders]
        assert found[0].tokens == found[1].tokens
        assert [record.drafted for record in found[0].rounds] == [record.drafted for record in found[1].rounds]


@pytest.mark.parametrize("together", [1, 6])
def test_every_token_of_a_text_is_read_once(tiny_target: LlamaForCausalLM, together: int) -> None:
    recall, read, alive = Recall(DraftModel(make_llama(1))), defaultdict(list), []
    learned = recall.memory.read

    def spied(tokens: list[int], start: int) -> None:
        alive.append(tokens)  # so that no later list gets its id
        read[id(tokens)] += tokens[start:]
        learned(tokens, start)

    recall.memory.read = spied  # pyright: ignore[reportAttributeAccessIssue]
    decoder, texts = SpeculativeDecoder(tiny_target, recall, draft_length=3), []
    for start in range(0, len(PROMPTS), together):
        batch = PROMPTS[start : start + together]
        # Texts of a batch end one after another, by a token that is the end for some of them.
        settings: dict[str, Any] = {"temperature": 1.0, "seeds": 6, "max_new_tokens": 40, "eos_token_id": [3, 9, 60]}
        texts += [output.prompt_tokens + output.tokens for output in decoder.generate_batch(batch, **settings)]
    decoder.generate([1], **GREEDY)  # what was committed in a last round is read by the next texts
    assert len({len(text) for text in texts}) > 2
    for text in texts:
        assert text in read.values()
    assert len(read) == len(texts) + 1


def test_a_drafter_that_is_right_more_often_keeps_drafting() -> None:
    target = make_llama()
    drafter = DraftModel(first_layers(target, target.config.num_hidden_layers))  # the target itself
    settings: dict[str, Any] = {"temperature": 0.4, "max_new_tokens": 40, "eos_token_id": None}
    hybrid, recall = Hybrid(drafter), Recall(drafter)
    counts = []
    offered, propose = [], recall.memory.propose

    def spied(tokens: list[int], room: int) -> tuple[list[int], float]:
        offered.append(propose(tokens, room))
        return offered[-1]

    recall.memory.propose = spied  # pyright: ignore[reportAttributeAccessIssue]
    for one in (hybrid, recall):
        decoder = SpeculativeDecoder(target, one, draft_length=6)
        counts.append(sum(len(decoder.generate(p, seed=n, **settings).rounds) for n, p in enumerate(PROMPTS * 5)))
    assert counts[1] < 1.03 * counts[0]
    known = sum(len(tokens) > 0 for tokens, _ in offered)
    assert known > 4, "the memory never had a draft: the test would prove nothing"
    assert recall.recalled < known / 2


@pytest.mark.parametrize("drafted", [True, False], ids=["beside a drafter", "alone"])
def test_drafts_from_memory_leave_room_for_the_token_after_them(drafted: bool, tiny_target: LlamaForCausalLM) -> None:
    """Texts that the memory knows, and that end earlier than it: by the length or by the context of 128."""
    recall = Recall(DraftModel(make_llama(1)) if drafted else None, min_match=99)
    decoder = SpeculativeDecoder(tiny_target, recall)
    for _ in range(4):
        whole = decoder.generate(PROMPTS[0], max_new_tokens=125, eos_token_id=None).tokens
    before, longest = recall.recalled, 0
    for context, count in [(0, 2), (0, 3), (0, 6), (0, 9), (110, 50), (122, 50)]:
        prompt = [*PROMPTS[0], *whole[:context]]
        text = decoder.generate(prompt, max_new_tokens=count, eos_token_id=None)
        left = min(count, 128 - len(prompt)) - 1
        assert len(text.tokens) == left + 1
        for record in text.rounds:
            assert record.drafted <= left - 1
            left -= record.committed
            longest = max(longest, record.drafted)
    assert recall.recalled > before
    assert longest > 5


class Text:
    source: list[int] = []  # noqa: RUF012

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens


def test_the_draft_with_more_accepted_tokens_is_preferred_and_the_other_one_tried_again() -> None:
    seen = Situation()
    assert seen.prefers_known(2.0, 1.9)
    assert not seen.prefers_known(1.9, 2.0)
    for _ in range(10):
        seen.count(3, 2)
    assert seen.prefers_known(1.0, 2.0)
    for _ in range(10):
        seen.count(3, 5)
    assert not seen.prefers_known(1.0, 2.0)
    for _ in range(int(2 * RECENT)):
        seen.count(3, 0)
    assert seen.prefers_known(1.0, 2.0), "old rounds count less"
    rare, choices = Situation(), []
    for _ in range(2 * EXPLORED):
        choices.append(rare.prefers_known(8.0, 1.0))
        rare.count(8, None if choices[-1] else 1)
    assert choices.count(False) == 2
    assert all(choices[: int(PRIOR)])


class Nothing(Drafter):
    """A drafter that retrieves nothing."""

    type = "nothing"


def test_matches_that_are_accepted_less_often_leave_the_round_to_the_drafter() -> None:
    recall = Recall(Nothing(), min_match=2)
    recall.memory.propose = lambda tokens, room: ([], 0.0)  # pyright: ignore[reportAttributeAccessIssue]
    last = {}
    for matches_are_right in (False, True):
        for _ in range(300):
            text = Text([1, 2, 3, 4, 9])
            context: Any = SimpleNamespace(texts=[text])
            recall.start(context)
            text.tokens += [1, 2]
            last[matches_are_right] = draft = recall.retrieve(0, 4)
            by_match, by_drafter = ([3, 4, 60], [3]) if matches_are_right else ([60], [50, 51, 60])
            text.tokens += by_drafter if draft is None else by_match
    assert last == {False: None, True: Draft.chain([3, 4, 9, 1])}


def test_a_retrieval_drafter_remembers_without_a_trained_one(tiny_target: LlamaForCausalLM) -> None:
    expected = [SpeculativeDecoder(tiny_target).generate(prompt, **GREEDY).tokens for prompt in PROMPTS]
    for name in ("suffix:memory=on", "hybrid:drafter=suffix,memory=on"):
        decoders = [SpeculativeDecoder(tiny_target, load_drafter(one, tiny_target)) for one in (name, "suffix")]
        for decoder in decoders:
            assert [decoder.generate(prompt, **GREEDY).tokens for prompt in PROMPTS] == expected
        again = [rounds(decoder) for decoder in decoders]
        assert again[0] < 0.6 * again[1]
        remembering = decoders[0].drafter
        assert remembering is not None
        (recall,) = memories(remembering)
        recall.forget()
        assert rounds(decoders[0], PROMPTS[:1]) > 0.8 * rounds(decoders[1], PROMPTS[:1])
    assert memories(load_drafter("suffix:memory=off", tiny_target)) == []
    with pytest.raises(ConfigError, match="memory='yes'; expected on or off"):
        load_drafter("suffix:memory=yes", tiny_target)
