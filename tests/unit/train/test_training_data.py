"""Rows of a step, their masks, and the draft vocabulary of their responses."""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import make_llama
from datasets import Dataset
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, PreTrainedTokenizerFast

from draftsmith.distill.load_target import LoadedTarget
from draftsmith.heads.model_config import eos_tokens
from draftsmith.train import trainer
from draftsmith.train.progress import Console
from draftsmith.train.recipe import load_recipe
from draftsmith.train.step import batch_indices, collate, response_tokens
from draftsmith.train.training_data import ROWS_COUNTED, chat_of, frequent_tokens

ROWS = Dataset.from_list(
    [{"input_ids": [9, 8, 7, 6, 5], "spans": [[2, 5]]}, {"input_ids": [4, 3, 2], "spans": [[1, 3]]}]
)


def test_answers_end_as_the_target_ends_them(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Its generation config may name several tokens; without one, its config's are those."""
    target = LoadedTarget(make_llama(), tiny_tokenizer, "tiny", None)
    for ends in (1, [1, 7]):
        target.model.generation_config.eos_token_id = ends
        found = chat_of(load_recipe("draft_model/any_prompts", []).data, target).ends
        assert found == {1, *([7] if isinstance(ends, list) else [])}
    assert eos_tokens(LlamaConfig(eos_token_id=[2, 3]), GenerationConfig()) == {2, 3}
    assert eos_tokens(LlamaConfig(eos_token_id=None)) == frozenset()


def test_every_row_once_an_epoch() -> None:
    seen = [index for step in range(5) for index in batch_indices(3, step, 4, 10)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert seen == [index for step in range(5) for index in batch_indices(3, step, 4, 10)]
    assert seen[:10] != [index for step in range(3) for index in batch_indices(4, step, 4, 10)][:10]
    others = [index for step in range(5) for index in batch_indices(3, step, 4, 10, {6, 7})]
    assert others == [8 if index in (6, 7) else index for index in seen], "the next row takes their place"


def test_the_mask_marks_positions_that_predict_responses() -> None:
    batch = collate(ROWS, [0, 1], torch.device("cpu"))
    assert batch.input_ids_BT.tolist() == [[9, 8, 7, 6, 5, *[0] * 11], [4, 3, 2, *[0] * 13]]
    assert batch.attention_mask_BT.tolist() == [[1] * 5 + [0] * 11, [1] * 3 + [0] * 13]
    assert batch.mask_BT.int().tolist() == [[0, 1, 1, 1] + [0] * 12, [1, 1] + [0] * 14]
    assert int(batch.mask_BT.sum()) == response_tokens(ROWS, [0, 1])


@pytest.mark.parametrize(("longest", "limit", "expected"), [(17, None, 32), (32, None, 32), (17, 20, 20), (17, 9, 17)])
def test_rows_are_padded_to_few_lengths_within_the_context(longest: int, limit: int | None, expected: int) -> None:
    rows = Dataset.from_list([{"input_ids": [5] * length, "spans": [[1, length]]} for length in (3, longest)])
    batch = collate(rows, [0, 1], torch.device("cpu"), limit=limit)
    assert batch.input_ids_BT.shape == batch.attention_mask_BT.shape == batch.mask_BT.shape == (2, expected)
    assert batch.attention_mask_BT.sum(1).tolist() == [3, longest]
    assert batch.mask_BT.sum(1).tolist() == [2, longest - 1]


def test_a_target_with_learned_positions_is_trained_on_up_to_its_last_one(
    recipe_file: Path, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Its context of 20 tokens is no multiple of the length to which rows are padded."""
    sizes = {"n_positions": 20, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": len(tiny_tokenizer)}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt2")
    tiny_tokenizer.save_pretrained(tmp_path / "gpt2")
    own = [f"target.model={tmp_path / 'gpt2'}", "data.prompt_tokens=8", "data.response_tokens=12", "train.steps=2"]
    trainer.train(load_recipe(str(recipe_file), [*own, "evaluation.max_new_tokens=8"]))


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
    said = f"draft vocabulary: 10 of 64 tokens, {share:.2%} of the responses"
    assert said in " ".join(capsys.readouterr().err.split())
