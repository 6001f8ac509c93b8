"""Drafts from earlier texts: what the memory reads, when it is preferred, and that texts stay the target's own."""

from collections import defaultdict
from random import Random
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
from draftsmith.heads.earlier_texts import (
    EXPLORED,
    PRIOR,
    RECENT,
    RECENT_ROUNDS,
    NgramMemory,
    Recall,
    Situation,
    memories,
)
from draftsmith.heads.retrieval import Hybrid

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
    for _ in range(int(2 * RECENT_ROUNDS)):
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


STORY = [3, 8, 1, 9, 4, 7, 2, 6, 11, 15, 12, 10]


def read_often(memory: NgramMemory, text: list[int], times: int = 40) -> None:
    for _ in range(times):
        memory.read(text, 0)


def test_it_continues_what_it_has_read() -> None:
    memory = NgramMemory(4096)
    read_often(memory, STORY)
    draft, expected = memory.propose([20, 3, 8, 1], room=20)
    assert draft == STORY[3:], "and nothing after the end of the text"
    assert 0.7 * len(draft) < expected < len(draft)
    assert memory.propose([20, 3, 8, 1], room=2)[0] == STORY[3:5]
    assert memory.propose([20, 3, 8, 1], room=0) == ([], 0.0)


def test_it_proposes_nothing_after_tokens_that_it_has_not_read() -> None:
    memory = NgramMemory()
    assert memory.propose([1, 2, 3], room=4) == ([], 0.0)
    read_often(memory, STORY)
    # Places are those of hashes, so only the tags tell these tokens from those that were read.
    random = Random(0)
    for _ in range(2000):
        assert memory.propose([random.randrange(100, 10**6) for _ in range(3)], room=4) == ([], 0.0)


def test_a_longer_context_decides_where_shorter_ones_are_often_wrong() -> None:
    memory, random = NgramMemory(), Random(1)
    for _ in range(200):
        first = random.choice([30, 40])
        memory.read([first, 5, 6, first + 1], 0)
    assert memory.propose([30, 5, 6], room=1)[0] == [31]
    assert memory.propose([40, 5, 6], room=1)[0] == [41]


def test_a_shorter_context_decides_where_it_has_been_right_more_often() -> None:
    memory, random = NgramMemory(), Random(1)
    for _ in range(200):
        memory.read([random.randrange(100, 10**6), 5, 6, 7], 0)
    memory.read([30, 5, 6, 9], 0)
    memory.read([31, 5, 6, 7], 0)
    assert memory.propose([30, 5, 6], room=1)[0] == [7]


def test_recent_predictions_count_more() -> None:
    memory = NgramMemory(2**14)
    read_often(memory, STORY, 4 * RECENT)
    assert memory.propose(STORY[:2], room=1)[1] > 0.99
    for place in range(100, 100 + 2 * RECENT, 2):  # right until the score is the largest, then wrong once
        read_often(memory, [place, place + 1, 7], 16)
        memory.read([place, place + 1, 8], 0)
    read_often(memory, [20, 21, 7], 16)
    assert memory.propose([20, 21], room=1)[1] < 0.8


def test_a_small_memory_forgets_and_does_not_grow() -> None:
    memory, random = NgramMemory(256), Random(2)
    before = memory.bytes
    assert before == 8 * 256
    read_often(memory, STORY)
    memory.read([random.randrange(1000) for _ in range(4000)], 0)
    assert memory.bytes == before
    assert memory.propose(STORY[:4], room=8)[0] != STORY[4:]
    read_often(memory, STORY, 20)
    assert memory.propose(STORY[:4], room=8)[0] == STORY[4:], "new entries replace old ones"


@pytest.mark.parametrize("certainty", [0.5, 0.8, 0.95])
def test_as_many_tokens_are_right_as_are_expected(certainty: float) -> None:
    """A source whose next token is one of two, so that no draft is right more often than `certainty` for each token."""
    memory, random, text = NgramMemory(), Random(3), [0]
    expected = right = drafted = 0.0
    for number in range(8000):
        text.append((text[-1] * 7 + (1 if random.random() < certainty else 2)) % 50)
        memory.read(text, len(text) - 1)
        if number < 4000 or len(text) % 5:
            continue
        future, last = [], text[-1]
        for _ in range(4):
            last = (last * 7 + (1 if random.random() < certainty else 2)) % 50
            future.append(last)
        draft, hoped = memory.propose(text, room=4)
        agreed = next((k for k, (a, b) in enumerate(zip(draft, future, strict=False)) if a != b), len(draft))
        expected, right, drafted = expected + hoped, right + agreed, drafted + len(draft)
    assert drafted > 400
    assert right == pytest.approx(expected, rel=0.15)
