"""Modules that importing the training package loads: no plots, reports, hub or DeepSpeed until a run needs them."""

import subprocess
import sys

PRINT_LOADED = "import sys, {module}; print(*sys.modules)"


def _loaded(module: str) -> set[str]:
    command = [sys.executable, "-c", PRINT_LOADED.format(module=module)]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_the_trainer_imports_few_modules() -> None:
    loaded = _loaded("draftsmith.train.trainer")
    ours = {name for name in loaded if name.partition(".")[0] == "draftsmith"}
    assert len(ours) <= 74, sorted(ours)
    assert not {name for name in ours if name.startswith(("draftsmith.eval", "draftsmith.hub"))}
    assert not loaded & {"matplotlib", "deepspeed", "wandb"}


def test_the_package_imports_neither_plots_nor_reports() -> None:
    loaded = _loaded("draftsmith.train")
    assert not loaded & {"torch", "matplotlib", "draftsmith.eval.report", "draftsmith.train.trainer"}
