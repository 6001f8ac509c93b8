"""The suffix automaton against a search of the whole text."""

import random

import pytest

from draftsmith.heads.suffix import SuffixAutomaton


def longest_repeated_end(text: list[int]) -> int:
    """Length of the longest suffix that also ends earlier, by trying all."""
    for length in range(len(text) - 1, 0, -1):
        if any(text[end - length : end] == text[-length:] for end in range(length, len(text))):
            return length
    return 0


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8])
def test_the_match_is_the_longest_one(alphabet: int) -> None:
    draw = random.Random(alphabet)
    for _ in range(60):
        text = [draw.randrange(alphabet) for _ in range(draw.randrange(1, 40))]
        automaton, read = SuffixAutomaton(), 0
        while read < len(text):
            chunk = text[read : read + draw.randrange(1, 5)]
            automaton.extend(chunk)
            read += len(chunk)
            length, end = automaton.match()
            assert length == longest_repeated_end(text[:read])
            if length:
                assert end < read
                assert text[end - length : end] == text[read - length : read]
        assert len(automaton) == len(text)


def test_the_continuation_follows_the_match_and_repeats_past_the_end() -> None:
    automaton = SuffixAutomaton([1, 2, 3, 9, 1, 2])
    assert automaton.match() == (2, 2)
    assert automaton.continuation(3) == [3, 9, 1]
    assert automaton.continuation(9) == [3, 9, 1, 2, 3, 9, 1, 2, 3]
    assert SuffixAutomaton([4] * 5).continuation(3) == [4, 4, 4]


def test_of_several_ends_the_one_matched_last_is_taken() -> None:
    # "1 2" ends at 2 and, matched there a second time, at 5; what followed last was 7.
    assert SuffixAutomaton([1, 2, 6, 1, 2, 7, 1, 2]).continuation(1) == [7]


def test_nothing_matches_in_a_text_without_repeats() -> None:
    for text in ([], [1], [1, 2, 3]):
        automaton = SuffixAutomaton(text)
        assert automaton.match() == (0, 0)
        assert automaton.continuation(4) == []
