"""Rows of a step, and their masks."""

import torch
from datasets import Dataset

from draftsmith.train.data import batch_indices, collate, response_tokens

ROWS = Dataset.from_list(
    [{"input_ids": [9, 8, 7, 6, 5], "spans": [[2, 5]]}, {"input_ids": [4, 3, 2], "spans": [[1, 3]]}]
)


def test_every_row_once_an_epoch() -> None:
    seen = [index for step in range(5) for index in batch_indices(3, step, 4, 10)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert seen == [index for step in range(5) for index in batch_indices(3, step, 4, 10)]
    assert seen[:10] != [index for step in range(3) for index in batch_indices(4, step, 4, 10)][:10]


def test_the_mask_marks_positions_that_predict_responses() -> None:
    batch = collate(ROWS, [0, 1], torch.device("cpu"))
    assert batch.input_ids_BT.tolist() == [[9, 8, 7, 6, 5], [4, 3, 2, 0, 0]]
    assert batch.attention_mask_BT.tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    assert batch.mask_BT.int().tolist() == [[0, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
    assert int(batch.mask_BT.sum()) == response_tokens(ROWS, [0, 1])
