"""The package folder links to every other package, and imports follow one order."""

import ast
import tomllib
from collections import Counter
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from lower_bounds import lower_bounds
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import draftsmith

ROOT = Path(__file__).parents[2]
PACKAGES = ("heads", "decode", "distill", "eval", "hub", "train")
GROUND = {"config", "errors", "metrics", "names", "option_fields", "provenance", "reading", "storage", "terminal"}
MAY_IMPORT = {
    "heads": set(),
    "decode": {"heads"},
    "distill": {"heads", "decode"},
    "eval": {"heads", "decode", "distill"},
    "hub": {"heads", "decode", "distill", "eval"},
    "train": {"heads", "decode", "distill", "eval", "hub"},
}


def _imports(file: Path) -> set[str]:
    """Return the modules of the package, and names in them, that `file` imports, also in functions or for types."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if name.startswith("draftsmith.")}


def _packages(file: Path) -> set[str]:
    return {name.split(".")[1] for name in _imports(file)}


def _modules() -> dict[str, Path]:
    """Return every module of the package by its name."""
    files = [*(ROOT / "draftsmith").glob("*.py"), *(ROOT / "draftsmith" / "cli").rglob("*.py")]
    files += [file for package in PACKAGES for file in (ROOT / "draftsmith" / package).rglob("*.py")]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_never_point_up(package: str) -> None:
    for file in (ROOT / package).rglob("*.py"):
        foreign = _packages(file) - MAY_IMPORT[package] - {package} - GROUND
        assert not foreign, f"{file.relative_to(ROOT)} imports draftsmith.{sorted(foreign)}"


def test_the_ground_imports_no_package() -> None:
    for name in GROUND:
        assert _packages(ROOT / "draftsmith" / f"{name}.py") <= GROUND


def test_no_modules_import_each_other() -> None:
    named = _modules()
    graph = {name: (_imports(file) & named.keys()) - {name} for name, file in named.items()}
    while leaves := {name for name, imported in graph.items() if not imported}:
        graph = {name: imported - leaves for name, imported in graph.items() if name not in leaves}
    assert not graph, f"among these modules is a cycle: {sorted(graph)}"


ROUND = (("drafts",), ("draws",), ("rules",), ("policies",), ("sequence",), ("growing", "verification"), ("proposer",))
ROUND += (("loop",), ("decoder", "profiling"))
"""The parts of `decode/` that a round passes through, in the order of their imports."""


def test_the_parts_of_a_round_import_in_one_direction() -> None:
    for place, parts in enumerate(ROUND):
        later = {f"draftsmith.decode.{part}" for group in ROUND[place + 1 :] for part in group}
        for part in parts:
            path = ROOT / "decode" / part
            files = [*path.rglob("*.py")] or [path.with_suffix(".py")]
            for file in files:
                back = {name for name in _imports(file) if ".".join(name.split(".")[:3]) in later}
                assert not back, f"{file.relative_to(ROOT)} imports {sorted(back)}"


def test_no_file_name_is_used_twice() -> None:
    """`__init__` and `__main__` aside, so that a name finds one file."""
    counts = Counter(file.name for package in (*PACKAGES, "draftsmith/cli") for file in (ROOT / package).rglob("*.py"))
    assert {name for name, count in counts.items() if count > 1} <= {"__init__.py", "__main__.py"}


def test_the_package_folder_links_to_every_package() -> None:
    links = {path.name: path.readlink() for path in (ROOT / "draftsmith").iterdir() if path.is_symlink()}
    assert links == {name: Path("..") / name for name in (*PACKAGES, "recipes")}


def test_every_module_lies_in_a_package() -> None:
    """Folders without `__init__.py` would be missing from the wheel."""
    for package in (*PACKAGES, "draftsmith"):
        for file in (ROOT / package).rglob("*.py"):
            assert (file.parent / "__init__.py").is_file(), file.relative_to(ROOT)


def _installed_with(lines: list[str]) -> set[str]:
    """Return the packages that these requirements install, and what those require."""
    found, pending = set[str](), [Requirement(line) for line in lines]
    while pending:
        asked = pending.pop()
        name = canonicalize_name(asked.name)
        if name not in found and (asked.marker is None or asked.marker.evaluate({"extra": ""})):
            found.add(name)
            pending += map(Requirement, requires(name) or ())
    return found


def test_only_the_base_packages_are_needed_to_import_the_modules() -> None:
    """Without any extra, every command starts: a module imports what belongs to one where it is used."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {Requirement(line).name for lines in project["optional-dependencies"].values() for line in lines}
    base = _installed_with(project["dependencies"]) | {"draftsmith"}
    hidden = sorted(name.replace("-", "_") for name in extras if canonicalize_name(name) not in base)
    assert "openai" in hidden
    for folder in (*PACKAGES, "cli"):
        for file in (ROOT / "draftsmith" / folder).rglob("*.py"):
            names = _needed_to_import(ast.parse(file.read_text(encoding="utf-8")).body)
            needed = {name.partition(".")[0] for name in names}
            assert file.name == "deepspeed.py" or not needed & {*hidden}, f"{file}: {needed & {*hidden}}"


def _needed_to_import(body: list[ast.stmt]) -> set[str]:
    """Return what a module loads whenever it is imported: not the imports of functions, types and `try`."""
    names = set[str]()
    for node in body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.If):
            names |= _needed_to_import(node.orelse if "TYPE_CHECKING" in ast.unparse(node.test) else node.body)
        elif isinstance(node, ast.ClassDef):
            names |= _needed_to_import(node.body)
    return names


def _loaded_with(module: str) -> set[str]:
    """Return the modules of the package that importing one of them loads, and what those name of other packages."""
    files, found, pending = _modules(), set[str](), [module]
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            if name in files:
                parents = [name.rpartition(".")[0]] if "." in name else []
                pending += [*_needed_to_import(ast.parse(files[name].read_text(encoding="utf-8")).body), *parents]
    return {name for name in found if name in files or not name.startswith("draftsmith.")}


def test_training_imports_few_modules() -> None:
    """No plots, reports, hub or DeepSpeed until a run needs them; a launcher without a run not even torch."""
    loaded = _loaded_with("draftsmith.train.trainer")
    ours = {name for name in loaded if name.startswith("draftsmith")}
    assert 50 < len(ours) <= 74, sorted(ours)
    assert not {name for name in ours if name.startswith(("draftsmith.eval", "draftsmith.hub"))}
    assert "torch" in loaded
    assert not loaded & {"matplotlib", "deepspeed", "wandb"}
    assert not _loaded_with("draftsmith.train") & {"torch", "draftsmith.eval.report", "draftsmith.train.trainer"}


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


def test_what_a_release_names_agrees() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project["version"] == draftsmith.__version__
    assert citation["license"] == project["license"]
