"""The wheel that is built from the source distribution holds every module, recipe and template; both install."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from draftsmith import __version__

ROOT = Path(__file__).parents[2]
LINKED = ("heads", "decode", "distill", "eval", "train", "hub", "recipes")
SHIPPED = {".py", ".yaml", ".j2", ".jinja", ".txt", ".typed", ".safetensors", ".json"}


def _files(folder: Path, package: str) -> set[str]:
    files = [path for path in folder.rglob("*") if path.suffix in SHIPPED and "__pycache__" not in path.parts]
    return {f"{package}/{path.relative_to(folder)}" for path in files}


@pytest.mark.slow
def test_the_wheel_is_complete(tmp_path: Path) -> None:
    # Without --wheel or --sdist, `build` makes the wheel from the source distribution.
    command = [sys.executable, "-m", "build", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    own = {name for name in _files(ROOT / "draftsmith", "draftsmith") if name.split("/")[1] not in LINKED}
    expected = own.union(*(_files(ROOT / name, f"draftsmith/{name}") for name in LINKED))
    assert {name for name in names if Path(name).suffix in SHIPPED and ".dist-info/" not in name} == expected

    for kind in ("*.whl", "*.tar.gz"):
        installed = tmp_path / f"from{kind[1:]}"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(installed)]
        subprocess.run([*pip, str(next(tmp_path.glob(kind)))], check=True)
        program = "import draftsmith; from draftsmith.cli import main; print(draftsmith.__file__); main(['recipes'])"
        where = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(installed)}}
        ran = subprocess.run([sys.executable, "-c", program], **where, check=True, capture_output=True, text=True)
        assert ran.stdout.startswith(str(installed))
        assert "quickstart/draft_model" in ran.stdout
        assert {path.name for path in installed.glob("draftsmith-*")} == {f"draftsmith-{__version__}.dist-info"}
