"""Modules that importing the training package loads: no plots, reports, hub or DeepSpeed until a run needs them."""

import ast
import subprocess
import sys
from pathlib import Path

TRAIN = Path(__file__).parents[3] / "train"
PRINT_LOADED = "import sys, {module}; print(*sys.modules)"


def _loaded(module: str) -> set[str]:
    command = [sys.executable, "-c", PRINT_LOADED.format(module=module)]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_the_trainer_imports_few_modules() -> None:
    loaded = _loaded("draftsmith.train.trainer")
    ours = {name for name in loaded if name.partition(".")[0] == "draftsmith"}
    assert len(ours) <= 70, sorted(ours)
    assert not {name for name in ours if name.startswith(("draftsmith.eval", "draftsmith.hub"))}
    assert not loaded & {"matplotlib", "deepspeed", "wandb", "draftsmith.train.publishing"}


def test_the_package_imports_neither_plots_nor_reports() -> None:
    loaded = _loaded("draftsmith.train")
    assert not loaded & {"torch", "matplotlib", "draftsmith.eval.report", "draftsmith.train.trainer"}


def _imports(file: Path) -> set[str]:
    """Return the modules of the package that `file` imports anywhere, unless for types alone."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("draftsmith.train"):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_no_modules_import_each_other() -> None:
    """Imports inside functions count, too."""
    files = {
        f"draftsmith.train.{'.'.join(file.relative_to(TRAIN).with_suffix('').parts)}": file
        for file in TRAIN.rglob("*.py")
        if file.name != "__init__.py"
    }
    graph = {name: _imports(file) & files.keys() for name, file in files.items()}
    while leaves := {name for name, imported in graph.items() if not imported}:
        graph = {name: imported - leaves for name, imported in graph.items() if name not in leaves}
    assert not graph, f"among these modules is a cycle: {sorted(graph)}"
