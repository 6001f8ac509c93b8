"""The memory of decoded texts: what it predicts, how sure it is, and that it does not grow."""

from random import Random

import pytest

from draftsmith.heads.ngram_memory import LEAST, MOST, RECENT, NgramMemory

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


def test_only_tokens_from_the_start_are_learned_and_earlier_ones_are_their_context() -> None:
    memory, whole = NgramMemory(4096), NgramMemory(4096)
    memory.read(STORY, 4)
    assert memory.propose(STORY[:2], room=1) == ([], 0.0)
    read_often(memory, STORY[:5], 4)
    for position in range(len(STORY)):
        whole.read(STORY[: position + 1], position)
    other = NgramMemory(4096)
    other.read(STORY, 0)
    for end in range(1, len(STORY)):
        assert other.propose(STORY[:end], room=4) == whole.propose(STORY[:end], room=4)


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


def test_scores_stay_at_the_largest_one() -> None:
    memory = NgramMemory(4096)
    read_often(memory, STORY)
    for _ in range(40):
        memory.read(STORY, 0)
        assert memory.propose(STORY[:4], room=20)[0] == STORY[4:]


def test_a_token_that_is_wrong_again_and_again_is_replaced() -> None:
    memory = NgramMemory(4096)
    read_often(memory, [1, 2, 3, 4], 30)
    read_often(memory, [1, 2, 3, 5], 30)
    assert memory.propose([1, 2, 3], room=1)[0] == [5]


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


def test_a_draft_ends_before_it_is_unlikely() -> None:
    memory = NgramMemory(4096)
    memory.read(STORY, 0)  # seen once: each token is expected to be right in a third of the cases
    assert memory.propose(STORY[:3], room=8)[1] == pytest.approx(1 / 3)
    assert len(memory.propose(STORY[:3], room=8)[0]) == 1
    assert 1 / 3 > LEAST > 1 / 9


def test_no_draft_is_longer_than_the_longest() -> None:
    memory, text = NgramMemory(), list(range(100, 150))
    read_often(memory, text)
    assert memory.propose(text[:10], room=40)[0] == text[10 : 10 + MOST]
