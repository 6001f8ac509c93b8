"""Fixtures of commands on tiny models. No test depends on the seconds that they measure."""

from collections.abc import Iterator

import pytest
from forked import Server


@pytest.fixture(autouse=True)
def _few_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes, rounds and `generate` once, instead of several times for a median."""
    for module, counts in {
        "decode.profiling": {"REPEATS": 1, "TURNS": 1, "ROUNDS": 2},
        "eval.baseline": {"TRIALS": 1, "TOKENS": 8},
    }.items():
        for name, value in counts.items():
            monkeypatch.setattr(f"draftsmith.{module}.{name}", value)


@pytest.fixture(scope="session")
def run_server() -> Iterator[Server]:
    """Return the process that runs of all test files are forked from."""
    served = Server()
    yield served
    served.close()
