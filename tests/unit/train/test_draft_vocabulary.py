"""Tokens of a draft vocabulary, and the line that a run prints about it."""

import random
from collections import Counter

import pytest
from conftest import make_llama
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from draftsmith.distill.load_target import LoadedTarget
from draftsmith.train.data import ROWS_COUNTED, frequent_tokens
from draftsmith.train.progress import Console


def test_the_tokens_that_responses_hold_most_often(
    tiny_tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture
) -> None:
    dice = random.Random(0)
    rows, counts = [], Counter()
    for _ in range(ROWS_COUNTED + 40):
        ids = [min(63, int(dice.expovariate(0.1))) for _ in range(12)]
        spans = [[2, 5], [8, 12]]
        rows.append({"input_ids": ids, "spans": spans})
        counts.update(ids[2:5] + ids[8:12])
    target = LoadedTarget(make_llama(), tiny_tokenizer, "tiny", None)
    eos = tiny_tokenizer.eos_token_id
    found = frequent_tokens(Dataset.from_list(rows), 10, target, Console(True))
    others = sorted((token for token in range(64) if token != eos), key=lambda token: (-counts[token], token))
    assert found == sorted([eos, *others[:9]])
    share = sum(counts[token] for token in found) / counts.total()
    assert f"draft vocabulary: 10 of 64 tokens, {share:.2%} of the responses" in capsys.readouterr().err
