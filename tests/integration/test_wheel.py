"""What is built is what is installed: the wheel holds every module, recipe and template."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"core": "draftsmith"} | {
    room: f"draftsmith/{room}" for room in ("heads", "decode", "distill", "eval", "train", "hub", "recipes")
}


@pytest.mark.slow
def test_the_wheel_is_complete(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    for folder, package in FOLDERS.items():
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in {".py", ".yaml", ".j2", ".txt"}:
                assert f"{package}/{file.relative_to(ROOT / folder)}" in names
    assert not any(name.split("/")[0] in FOLDERS for name in names), "a room lies at the top of site-packages"
