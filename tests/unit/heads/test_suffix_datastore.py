"""The datastore against a scan of the corpus."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from draftsmith.errors import ConfigError
from draftsmith.heads.suffix import SEPARATOR, Datastore


def scan(documents: list[list[int]], context: list[int], count: int, longest: int) -> tuple[int, list[int]]:
    """The same answer by looking at every place of every document."""
    corpus = [token for document in documents for token in [*document, SEPARATOR]]
    for length in range(min(longest, len(context)), 0, -1):
        places = [i for i in range(len(corpus) - length) if corpus[i : i + length] == context[-length:]]
        if not places:
            continue
        tokens: list[int] = []
        while len(tokens) < count:
            offset = length + len(tokens)
            following = Counter(corpus[i + offset] for i in places if i + offset < len(corpus))
            following.pop(SEPARATOR, None)
            if not following:
                break
            token = min(following, key=lambda t: (-following[t], t))
            tokens.append(token)
            places = [i for i in places if i + offset < len(corpus) and corpus[i + offset] == token]
        return (length, tokens) if tokens else (0, [])
    return 0, []


@pytest.mark.parametrize("alphabet", [2, 4, 30])
def test_lookup_is_what_a_scan_finds(alphabet: int) -> None:
    draw = random.Random(alphabet)
    for _ in range(40):
        documents = [[draw.randrange(alphabet) for _ in range(draw.randrange(30))] for _ in range(draw.randrange(1, 5))]
        datastore = Datastore.build(documents)
        for _ in range(5):
            context = [draw.randrange(alphabet) for _ in range(draw.randrange(8))]
            assert datastore.lookup(context, 4, max_match=5) == scan(documents, context, 4, 5)


def test_suffixes_are_sorted() -> None:
    draw = random.Random(0)
    tokens = [draw.randrange(3) for _ in range(300)]
    datastore = Datastore.build([tokens])
    text = [*tokens, SEPARATOR]
    assert datastore._suffixes.tolist() == sorted(range(len(text)), key=lambda i: text[i:])


def test_short_matches_can_be_ignored_and_an_empty_corpus_has_none() -> None:
    datastore = Datastore.build([[1, 2, 3, 4]])
    assert datastore.lookup([9, 2, 3], 2) == (2, [4])
    assert datastore.lookup([9, 2, 3], 2, min_match=3) == (0, [])
    assert Datastore.build([]).lookup([1], 2) == (0, [])


def test_saved_and_loaded_it_answers_the_same(tmp_path: Path) -> None:
    datastore = Datastore.build([[1, 2, 3, 1, 2, 4], [1, 2, 4]])
    datastore.save(tmp_path / "corpus.safetensors")
    again = Datastore.load(tmp_path / "corpus.safetensors")
    assert len(again) == len(datastore) == 11
    assert again.lookup([1, 2], 3) == datastore.lookup([1, 2], 3) == (2, [4])


def test_files_that_are_not_datastores_are_refused(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"no tensors here")
    foreign = tmp_path / "foreign.safetensors"
    save_file({"tokens": np.zeros(3, np.int32)}, foreign)
    for path, message in {
        damaged: "cannot be read",
        foreign: "is no datastore",
        tmp_path / "absent": "cannot be read",
    }.items():
        with pytest.raises(ConfigError, match=f"datastore={path} {message}"):
            Datastore.load(path)
