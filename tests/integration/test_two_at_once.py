"""Two runs at once, with a cold cache or on one output: nothing is done twice, nothing fails, and a kill blocks no one.

Runs are forked from a process that has everything imported (tests/forked.py); traps.py makes one stop at a call.
"""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import mostly_slow
from forked import Processes, Runs, Server

from draftsmith.train.run_folder import read_metrics

KILLED = -signal.SIGKILL
ANSWER = "draftsmith.distill.regeneration:Sampler.complete"
BUILD = "draftsmith.distill.hidden_state_cache:SignalCache._write"
SHORT = ("train.steps=2", "train.evaluate_every=2", "evaluation.count=2", "data.batch_size=4")
BATCHES = 10
"""38 prompts are answered, four together."""


@pytest.fixture(scope="module")
def server(run_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Processes:
    return Processes(run_server, {"DRAFTSMITH_CACHE": str(tmp_path_factory.mktemp("cache"))})


class Started(Runs):
    """Starts runs, and waits for what they say."""

    def train(self, name: str, *overrides: str, **how: Any) -> list[int]:
        return self.start(name, *SHORT, *overrides, **how)

    def wait(self, *runs: list[int]) -> list[int]:
        return [code for run in runs for code in self.server.wait(run)]

    def calls(self, name: str) -> list[str]:
        """The process ids that a trap has noted."""
        file = self.place / name
        return file.read_text().split() if file.exists() else []

    def until(self, condition: Any, name: str) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, self.log(name).read_text()
            time.sleep(0.01)

    def noted(self, file: str, where: str = ANSWER, pause_at: int | None = None) -> dict[str, Any]:
        return {"where": where, "file": str(self.place / file), "pause_at": pause_at}


@pytest.fixture
def started(server: Processes, recipe_file: Path, tmp_path: Path) -> Started:
    return Started(tmp_path, server, recipe_file)


def test_two_recipes_on_one_target_share_a_cold_cache(started: Started) -> None:
    """Samples, examples and the teacher's cache are made once, whoever comes first."""
    cached = ("train.seed=1", "teacher.kind=cached", "teacher.shard_rows=8")
    runs = [
        started.train(name, f"train.learning_rate={rate}", *cached, note_calls=started.noted("answers"))
        for name, rate in (("one", 1e-3), ("other", 2e-3))
    ]
    assert started.wait(*runs) == [0, 0], started.said("one") + started.said("other")
    assert len(started.calls("answers")) == BATCHES
    built = [re.search(r"(\d+) of (\d+) shards were built now", started.said(name)) for name in ("one", "other")]
    assert sorted(int(found[1]) for found in built) == [0, int(built[0][2])]


@pytest.mark.parametrize("processes", mostly_slow([1, 2], 1))
def test_a_waiting_run_continues_with_the_parts_of_a_killed_run(processes: int, started: Started) -> None:
    seed = f"train.seed={1 + processes}"
    (first,) = started.train("first", seed, note_calls=started.noted("answers", pause_at=4))
    started.until(lambda: len(started.calls("answers")) == 4, "first")
    other = started.train(
        "other", seed, "train.learning_rate=2e-3", processes=processes, note_calls=started.noted("answers")
    )
    started.until(lambda: "waiting for another process" in started.said("other"), "other")
    assert len(started.calls("answers")) == 4, "who waits samples nothing"
    os.kill(first, signal.SIGKILL)
    assert started.wait([first], other) == [KILLED, *[0] * processes], started.said("other")
    assert len(started.calls("answers")) == 4 + BATCHES - 3, "three batches were stored"
    assert started.calls("answers").count(str(first)) == 4


def test_who_waits_for_the_teachers_cache_builds_what_is_missing(started: Started) -> None:
    cached = ("train.seed=8", "teacher.kind=cached", "teacher.shard_rows=8")
    (first,) = started.train("first", *cached, note_calls=started.noted("shards", BUILD, pause_at=3))
    started.until(lambda: len(started.calls("shards")) == 3, "first")
    other = started.train("other", *cached)
    started.until(lambda: "waiting for another process" in started.said("other"), "other")
    os.kill(first, signal.SIGKILL)
    assert started.wait([first], other) == [KILLED, 0], started.said("other")
    assert "3 of 5 shards were built now" in started.said("other")


def test_one_output_belongs_to_one_run(started: Started) -> None:
    (first,) = started.train("first", "train.seed=6", note_calls=started.noted("answers", pause_at=2), output="run")
    started.until(lambda: len(started.calls("answers")) >= 2, "first")
    assert started.wait(started.train("second", "train.seed=6", output="run", processes=2)) == [2, 2]
    # Two processes may end their lines after both have written them.
    refusal = f"ConfigError: output={started.place / 'run'} is in use by another process"
    assert started.said("second").count(refusal) == 2
    assert "Traceback" not in started.said("second")
    os.kill(first, signal.SIGKILL)
    assert started.wait([first]) == [KILLED]
    both = [started.train(name, "train.seed=6", output="run") for name in ("third", "fourth")]
    assert sorted(started.wait(*both)) in ([0, 2], [0, 0]), "at once, or one after the other"
    assert [row["step"] for row in read_metrics(started.place / "run") if "loss" in row] == [1, 2]
    assert list((started.place / "run").rglob(".*")) == []
