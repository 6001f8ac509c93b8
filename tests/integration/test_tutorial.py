"""The notebook docs/guide/tutorial.ipynb runs, and its stored outputs are those of its cells."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.train.recipe import load_recipe

NOTEBOOK = Path(__file__).parents[2] / "docs" / "guide" / "tutorial.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_every_cell_that_prints_has_its_output() -> None:
    for number, cell in enumerate(CELLS, 1):
        assert cell["execution_count"] == number, "a run from the first cell to the last"
        assert [output["name"] for output in cell["outputs"]] == ["stdout"]


def test_the_stored_outputs_are_of_the_recipe() -> None:
    (cell,) = (cell for cell in CELLS if "load_recipe(" in "".join(cell["source"]))
    name, overrides = re.search(r'load_recipe\("(.+?)", (\[.+?\])\)', "".join(cell["source"])).groups()
    recipe, printed = load_recipe(name, json.loads(overrides)), "".join(cell["outputs"][0]["text"])
    assert f"data: {recipe.data.count:,} samples" in printed
    assert f"{recipe.train.batch_size} sequences a step" in printed
    every, last = recipe.train.evaluate_every, recipe.train.steps
    steps = [int(step) for step in re.findall(r"^ +step (\d+): alpha", printed, re.MULTILINE)]
    assert steps == [*range(0, last, every), last]


@pytest.mark.slow
def test_the_cells_run_in_order(tmp_path: Path) -> None:
    """In a process of its own, on the embedded target."""
    program = "\n".join("".join(cell["source"]) for cell in CELLS)
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "the same tokens: True" in ran.stdout
    assert (tmp_path / "runs" / "tutorial" / "eval" / "report.html").is_file()
    assert (tmp_path / "runs" / "tutorial" / "forecast" / "forecast.json").is_file()
    assert "model.safetensors" in ran.stdout.splitlines()[-1], "the exported files"
