"""`python tests/lower_bounds.py` prints pip constraints that pin every dependency to its declared lower bound."""

import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lower_bounds() -> dict[str, str]:
    """Return the lower bound of each direct dependency, those of the extras included."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + [d for extra in project["optional-dependencies"].values() for d in extra]
    own = project["name"] + "["
    return dict(dependency.split(">=") for dependency in wanted if not dependency.startswith(own))


if __name__ == "__main__":
    print("\n".join(f"{name}=={version}" for name, version in lower_bounds().items()))
