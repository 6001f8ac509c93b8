"""Rows of a step, their masks, and the draft vocabulary of their responses."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import write_rows
from conftest import make_llama
from datasets import Dataset
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, PreTrainedTokenizerFast

from draftsmith.distill.load_target import LoadedTarget
from draftsmith.distill.objective import Objective
from draftsmith.heads.model_config import eos_tokens
from draftsmith.train import trainer
from draftsmith.train.launch import make_accelerator
from draftsmith.train.models import ROWS_COUNTED, frequent_tokens
from draftsmith.train.progress import Console
from draftsmith.train.recipe import load_recipe
from draftsmith.train.step import batch_indices, collate, response_tokens
from draftsmith.train.training_data import chat_of

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


TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] | upper }}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)


def says(role: str, content: str, **flags: object) -> dict[str, object]:
    return {"role": role, "content": content, **flags}


CHATS = [
    [says("user", "ab"), says("assistant", "cd")],
    [
        says("system", "e", weight=0),
        says("user", "fg"),
        says("assistant", "hi", train=False),
        says("user", "jk", masked=1),
        says("assistant", "lm"),
        says("user", "no"),
        says("assistant", "pq", loss=0),
    ],
]
"""Several messages are marked as not trained."""


@pytest.mark.parametrize(
    ("response", "kind", "pack"),
    [("text", "cached", "false"), ("target", "cached", "true"), ("target", "online", "false")],
)
def test_prompts_are_trained_except_what_the_data_marks(
    response: str, kind: str, pack: str, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sampled answers and cached states are those of training on answers; the loss is the sum over positions."""
    write_rows(tmp_path / "chats.jsonl", ({"messages": chat} for chat in CHATS))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    changes = {"prompts": tmp_path / "chats.jsonl", "chat_template": tmp_path / "template.jinja", "response": response}
    overrides = [f"data.{key}={value}" for key, value in {**changes, "pack": pack, "validation": 1}.items()]
    overrides += ["data.response_tokens=7", f"teacher.kind={kind}", "evaluation.prompts=embedded"]
    runs = []
    for train_on in ("answers", "all"):
        recipe = load_recipe(str(recipe_file), [*overrides, f"data.train_on={train_on}"])
        runs.append(trainer.TrainingRun(recipe, make_accelerator(recipe, tmp_path), tmp_path / train_on))
        said = " ".join(capsys.readouterr().err.split())
        assert ("are new" in said) == (response == "target" and train_on == "answers"), "answers are sampled once"
        assert (" 0 of 1 shards were built now" in said) == (kind == "cached" and train_on == "all")
        trained = sum(end - start for spans in runs[-1].data.rows["spans"] for start, end in spans)
        assert f" {trained} of them trained" in said
    answers, every = runs
    assert every.data.rows["input_ids"] == answers.data.rows["input_ids"]
    assert every.data.rows["answers"] == answers.data.rows["spans"], "a draft vocabulary is that of the answers"
    assert (every.data.trained, every.data.validation) == (1, 1)
    marked = {"text": ["U", "SeAhi<eos>Ujk"], "target": ["U", "Se"]}[response]  # the first token has none before it
    for row, expected in zip(every.data.rows, marked, strict=True):
        untrained = set(range(len(row["input_ids"]))).difference(*(range(*span) for span in row["spans"]))
        assert every.target.tokenizer.decode([row["input_ids"][place] for place in sorted(untrained)]) == expected
    objective = Objective(**every.recipe.objective_options(every.draft_length))
    for run in runs:
        sums = []
        indices = range(len(run.data.rows))
        whole = run.batch(list(indices))
        for mask_BT in (whole.mask_BT, *_single(whole.mask_BT)):
            signals = run.teacher.signals(replace(whole, mask_BT=mask_BT))
            sums.append(objective(run.drafter.unroll(signals), signals, run.teacher.lm_head))
        assert int(sums[0].count_K[0]) == int(whole.mask_BT.sum()) == response_tokens(run.data.rows, list(indices))
        assert sums[0].loss.item() == pytest.approx(sum(one.loss.item() for one in sums[1:]), rel=1e-5)


def test_marks_that_a_template_moves_leave_the_answers_trained(recipe_file: Path, tmp_path: Path) -> None:
    """The template shows the number of messages first: the second answer's sample begins with other tokens."""
    chat = [says("user", "ab", weight=0), says("assistant", "c"), says("user", "d")]
    others = [[says("user", "ef"), says("assistant", "c"), says("user", "d", weight=0)], [says("user", "gh")]]
    write_rows(tmp_path / "chats.jsonl", ({"messages": messages} for messages in (chat, *others)))
    (tmp_path / "template.jinja").write_text("{{ messages | length }}" + TEMPLATE)
    keys = {"prompts": tmp_path / "chats.jsonl", "chat_template": tmp_path / "template.jinja", "turns": "all"}
    overrides = [*(f"data.{key}={value}" for key, value in keys.items()), "data.train_on=all"]
    recipe = load_recipe(str(recipe_file), [*overrides, "data.response_tokens=4", "evaluation.prompts=embedded"])
    run = trainer.TrainingRun(recipe, make_accelerator(recipe, tmp_path), tmp_path / "run")
    found = [(row["spans"], row["answers"], len(row["input_ids"])) for row in run.data.rows]
    answered = [answers for _, answers, _ in found]
    assert (
        [spans for spans, _, _ in found]
        == [
            [[4, found[0][2]]],  # "1Uab" is not trained
            *answered[1:4],  # of the second turn, and of a conversation whose later turn is marked
            [[1, found[4][2]]],
        ]
    )


def _single(mask_BT: torch.Tensor) -> list[torch.Tensor]:
    """Return a mask for each trained position."""
    return [torch.zeros_like(mask_BT).index_put(tuple(place), torch.tensor(True)) for place in mask_BT.nonzero()]


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
