"""The folders, the wheel's list of packages and the import order agree."""

import ast
import tomllib
from pathlib import Path

import pytest
from lower_bounds import lower_bounds
from packaging.version import Version

import draftsmith

ROOT = Path(__file__).parents[2]
ROOMS = ("heads", "decode", "distill", "eval", "hub", "train")
GROUND = {"errors", "locks", "provenance", "reading", "safe_text", "storage"}
MAY_IMPORT = {
    "heads": set(),
    "decode": {"heads"},
    "distill": {"heads", "decode"},
    "eval": {"heads", "decode", "distill"},
    "hub": {"heads", "eval"},
    "train": {"heads", "decode", "distill", "eval", "hub"},
}


def _imports(file: Path) -> set[str]:
    """The parts behind `draftsmith.` of everything that `file` imports from the package."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            if node.module == "draftsmith":
                names |= {f"draftsmith.{alias.name}" for alias in node.names}
            names.add(node.module or "")
    return {name.split(".")[1] for name in names if name.startswith("draftsmith.")}


@pytest.mark.parametrize("room", ROOMS)
def test_imports_never_point_up(room: str) -> None:
    for file in (ROOT / room).rglob("*.py"):
        foreign = _imports(file) - MAY_IMPORT[room] - {room} - GROUND
        assert not foreign, f"{file.relative_to(ROOT)} imports draftsmith.{sorted(foreign)}"


def test_the_ground_imports_no_room() -> None:
    for name in GROUND:
        assert _imports(ROOT / "core" / f"{name}.py") <= GROUND


def test_every_folder_is_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = dict(settings["package-dir"])
    roots = {package for package in settings["packages"] if package.count(".") < 2}
    assert set(folders) == roots
    for package, folder in folders.items():
        for file in (ROOT / folder).rglob("*.py"):
            inside = file.parent.relative_to(ROOT / folder)
            name = ".".join([package, *inside.parts])
            assert name in settings["packages"], f"{file.relative_to(ROOT)} would be missing from the wheel"


def test_bounds_and_pins_name_the_same_dependencies() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    bounds = lower_bounds()
    assert bounds.keys() == pins.keys()
    assert {name for name in pins if Version(pins[name]) < Version(bounds[name])} == set()


def test_the_public_names_exist() -> None:
    for name in draftsmith.__all__:
        assert getattr(draftsmith, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = draftsmith.nothing
