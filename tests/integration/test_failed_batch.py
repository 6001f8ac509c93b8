"""A row for which the target's states are not finite: it is named, and left out when the run continues."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import write_rows
from conftest import LETTERS, make_llama, mostly_slow
from run_results import losses_of

from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.train.recipe import load_recipe
from draftsmith.train.run_folder import read_metrics
from draftsmith.train.trainer import train

Start = Callable[..., Path]


@pytest.fixture
def start(recipe_file: Path, tiny_target_folder: Path, tmp_path: Path) -> Start:
    """Train on 12 texts and return the run's folder; the target's states of the one with a 9 are not finite."""
    target = make_llama()
    bad = target.get_input_embeddings().weight
    with torch.no_grad():
        bad[_tokens(tiny_target_folder)["9"]] = torch.inf
    target.save_pretrained(tiny_target_folder)
    texts = [LETTERS[i : i + 9] for i in range(12)]
    texts[5] = texts[5][:4] + "9" + texts[5][5:]
    for name, rows in (("texts", texts), ("held", texts[:2])):
        write_rows(tmp_path / f"{name}.jsonl", ({"text": text} for text in rows))
    overrides = [f"data.prompts={tmp_path}/texts.jsonl", f"evaluation.prompts={tmp_path}/held.jsonl"]
    overrides += ["data.response=text", "data.prompt_tokens=1", "evaluation.count=1", "train.batch_size=4"]

    def started(*others: str) -> Path:
        return train(load_recipe(str(recipe_file), [*overrides, *others])).parent

    return started


def _tokens(folder: Path) -> dict[str, int]:
    return json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]


KINDS = {
    "states": ["drafter.type=medusa"],
    "packed": ["drafter.type=medusa", "data.pack=true", "data.response_tokens=9"],
    "features": ["drafter.type=eagle3", "drafter.layers=[1,2]"],
    "logits": ["drafter.type=draft_model"],
    "cached": ["drafter.type=medusa", "teacher.kind=cached"],
}


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "cached"))
def test_the_row_is_named_and_may_be_left_out(kind: str, start: Start, tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError) as stopped:
        start(*KINDS[kind])
    said, folder = str(stopped.value), tmp_path / "run"
    assert "the teacher's states or logits are not finite in 1 of 4 rows (row 5, which begins \"fghi9klmn" in said
    assert "learning_rate" not in said
    failed = json.loads((folder / "failed_batch.json").read_text())
    assert failed["not_finite"] == [5]
    assert len(failed["rows"]) == 4
    step = failed["step"] - 1
    assert (folder / "checkpoints" / f"step-{step:06d}").is_dir(), "the state before it"
    before = losses_of(folder)
    assert len(before) == step
    advised = re.search(r"data\.exclude_rows=\S+", said)
    assert advised is not None
    start(*KINDS[kind], advised[0])
    assert losses_of(folder)[:step] == before
    assert len(losses_of(folder)) == 12
    start(*KINDS[kind], advised[0], f"output={tmp_path}/whole")
    assert losses_of(tmp_path / "whole") == losses_of(folder), "a run that left it out from the start"


def test_a_row_of_the_validation_is_named_too(start: Start) -> None:
    validated = ("drafter.type=medusa", "data.validation=8")
    with pytest.raises(DraftsmithError, match=r"step=0, .*validation_loss=nan.*row 5, which.*exclude_rows=\[5\]"):
        start(*validated)
    rows = read_metrics(start(*validated, "data.exclude_rows=[5]"))
    assert [row["step"] for row in rows if "validation" in row] == [0, 6, 12]


def test_rows_that_the_data_lacks_are_refused(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"data.exclude_rows=\[12\]; expected rows below 12"):
        start("drafter.type=medusa", "data.exclude_rows=[3,12]")
    with pytest.raises(ConfigError, match=r"data.exclude_rows leaves none of 12 rows"):
        start("drafter.type=medusa", f"data.exclude_rows={list(range(12))}")
