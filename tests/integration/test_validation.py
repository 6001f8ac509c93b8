"""The loss over samples that are kept out of training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from run_results import metrics_of
from safetensors.torch import load_file

from draftsmith.distill.dataset import hold_back
from draftsmith.distill.objective import Objective
from draftsmith.errors import ConfigError
from draftsmith.train import trainer
from draftsmith.train.launch import make_accelerator
from draftsmith.train.recipe import load_recipe
from draftsmith.train.step import batch_indices

VALIDATED = ("drafter.type=eagle", "drafter.noise=0.2", "data.validation=5", "train.checkpoint_every=1")
VALIDATED += ("train.keep_checkpoints=12",)


def test_the_loss_is_the_mean_objective_over_samples_that_are_not_trained_on(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is computed without the noise of training, and the training loss is another one."""
    trained: list[int] = []

    def recorded(*arguments: Any) -> list[int]:
        indices = batch_indices(*arguments)
        trained.extend(indices)
        return indices

    monkeypatch.setattr(trainer, "batch_indices", recorded)
    recipe = load_recipe(str(recipe_file), [*VALIDATED])
    trainer.train(recipe)
    assert set(trained) == set(range(40 - 4 - 5)), "the last 4 prompts are decoded, the 5 before them are validated"
    validated = {row["step"]: row["validation"] for row in metrics_of(tmp_path / "run") if "validation" in row}
    assert list(validated) == [0, 6, 12]
    said = capsys.readouterr().err
    assert f"validation loss {validated[12]['loss']:.3f}" in said

    recipe = load_recipe(str(recipe_file), [*VALIDATED, f"output={tmp_path / 'new'}"])  # which resumes nothing
    run = trainer.TrainingRun(recipe, make_accelerator(recipe, tmp_path), tmp_path / "new")
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    held = [run.target.tokenizer.decode(run.data.rows[i]["input_ids"]) for i in range(run.data.trained, 36)]
    for text, prompt in zip(held, prompts[31:36], strict=True):
        assert prompt in text.replace(" ", "")
    for step, found in validated.items():
        if step:
            state = load_file(tmp_path / "run" / "checkpoints" / f"step-{step:06d}" / "model.safetensors")
            run.drafter.load_state_dict({key.removeprefix("drafter."): value for key, value in state.items()}, False)
        run.drafter.eval()
        objective = Objective(**recipe.objective_options(run.draft_length))
        sums = []
        for index in range(run.data.trained, 36):
            signals = run.teacher.signals(run.batch([index]))
            sums.append(objective(run.drafter.unroll(signals), signals, run.teacher.lm_head))
        tokens = sum(int(one.count_K[0]) for one in sums)
        assert found["loss"] == pytest.approx(float(sum(one.loss for one in sums)) / tokens, rel=1e-5)
        assert found["alpha"][0] == pytest.approx(float(sum(one.alpha_K[0] for one in sums)) / tokens, rel=1e-5)


@pytest.mark.parametrize(
    ("value", "message"), [("36", "samples of 36 prompts; expected fewer"), ("0", "expected >= 1")]
)
def test_too_many_or_none_are_refused(value: str, message: str, recipe_file: Path) -> None:
    with pytest.raises(ConfigError, match=f"data.validation={value}.*{message}"):
        trainer.train(load_recipe(str(recipe_file), [f"data.validation={value}"]))


@pytest.mark.parametrize("column", ["question", "opening"])
def test_all_samples_of_a_prompt_are_kept_out_together(column: str) -> None:
    """Several responses to a prompt are apart in the data, and one prompt may have more of them than another."""
    rows = Dataset.from_dict({"input_ids": [[i] for i in range(6)], column: ["a", "b", "c", "a", "b", "a"]})
    kept, held = hold_back(rows, 2)
    assert kept["input_ids"][:] == [[2]]
    assert held["input_ids"][:] == [[0], [1], [3], [4], [5]]


@pytest.mark.parametrize("pack", ["false", "true"])
def test_responses_and_packed_rows_share_no_prompt_with_training(pack: str, recipe_file: Path, tmp_path: Path) -> None:
    overrides = ["drafter.type=medusa", "data.validation=5", "data.responses=2", f"data.pack={pack}"]
    recipe = load_recipe(str(recipe_file), [*overrides, "data.prompt_tokens=88", "train.steps=2"])
    trainer.train(recipe)
    run = trainer.TrainingRun(recipe, make_accelerator(recipe, tmp_path), tmp_path / "run")
    assert 0 < run.data.validation < run.data.trained
    openings: list[set[tuple[int, ...]]] = []
    for part in (range(run.data.trained), range(run.data.trained, len(run.data.rows))):
        rows, openings = run.data.rows.select(part), [*openings, set()]
        for row in rows:
            start = 0
            for length in row.get("documents") or [len(row["input_ids"])]:
                openings[-1].add(tuple(row["input_ids"][start : start + 5]))
                start += length
    assert not openings[0] & openings[1]
    assert torch.isfinite(
        torch.tensor([row["validation"]["loss"] for row in metrics_of(tmp_path / "run") if "validation" in row])
    ).all()
