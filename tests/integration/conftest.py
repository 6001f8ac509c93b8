"""Commands on tiny models, whose seconds no test reads."""

import pytest


@pytest.fixture(autouse=True)
def _few_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes, rounds and transformers' texts are timed once, where a user's are timed several times for a median."""
    for module, counts in {
        "decode.profiling": {"REPEATS": 1, "TURNS": 1, "ROUNDS": 2},
        "eval.hf_baseline": {"TRIALS": 1, "TOKENS": 8},
    }.items():
        for name, value in counts.items():
            monkeypatch.setattr(f"draftsmith.{module}.{name}", value)
