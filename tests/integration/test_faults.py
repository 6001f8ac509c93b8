"""A killed run costs nothing: kills at any write, signals, a full disk, other process counts, failing trackers.

Runs are forked from a process that has everything imported (tests/forked.py), so that a kill costs a fraction of a
second; what goes wrong inside them is in tests/traps.py.
"""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import mostly_slow, write_recipe
from forked import Processes, Runs, Server
from run_results import losses_of, metrics_of
from safetensors.torch import load_file

from draftsmith.train.run_folder import read_metrics

KILLED = -signal.SIGKILL
STEPS = 20
SHORT = ("train.steps=4", "train.evaluate_every=2", "train.checkpoint_every=2", "train.keep_checkpoints=1")
WITHOUT_FAULTS: dict[str, tuple[int, tuple[str, ...]]] = {"whole": (1, ()), "two": (2, ()), "short": (1, SHORT)}
"""Processes and overrides of the runs that others are compared with."""


class FaultyRuns(Runs):
    """Runs of which some are killed, and runs without faults to compare them with."""

    def result(self, name: str) -> tuple[list[dict[str, Any]], bytes]:
        """Metrics without what depends on the clock, and the best drafter's weights."""
        self.require(name)
        assert (self.folder(name) / "finished.json").exists(), self.log(name).read_text()[-2000:]
        return metrics_of(self.folder(name)), (self.folder(name) / "drafter" / "model.safetensors").read_bytes()

    def require(self, name: str) -> None:
        """Do a run without faults, unless it has been done."""
        if name in WITHOUT_FAULTS and not self.folder(name).exists():
            processes, overrides = WITHOUT_FAULTS[name]
            assert self.run(name, *overrides, processes=processes) == [0] * processes, self.log(name).read_text()

    def losses(self, name: str) -> list[float]:
        self.require(name)
        return losses_of(self.folder(name))

    def checkpoints(self, name: str) -> list[str]:
        return sorted(path.name for path in (self.folder(name) / "checkpoints").glob("*"))

    def leftovers(self, name: str) -> list[str]:
        return [path.name for path in self.folder(name).rglob(".*")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def server(run_server: Server, place: Path) -> Processes:
    return Processes(run_server, {"DRAFTSMITH_CACHE": str(place / "cache")})


@pytest.fixture
def runs(place: Path, server: Processes, tiny_target_folder: Path) -> FaultyRuns:
    """All tests share one folder: the target is sampled once, and each run of `WITHOUT_FAULTS` is done once."""
    made = FaultyRuns(place, server, place / "recipe.yaml")
    if (place / "recipe.yaml").exists():
        return made
    shutil.copytree(tiny_target_folder, place / "target")
    decoded = {"count": 3, "max_new_tokens": 12, "temperature": 1.0}
    write_recipe(place, place / "target", decoded, steps=STEPS, seed=8, evaluate_every=4, checkpoint_every=3)
    return made


FEWEST = {False: 10, True: 20}
"""Calls that make a write visible, and those with every fsync."""


def _assert_whole(folder: Path) -> None:
    """Every file under its own name can be read."""
    for kept in (folder / "drafter", *(folder / "checkpoints").glob("[!.]*")):
        for file in kept.glob("*.safetensors"):
            assert load_file(file)
        assert all(json.loads(file.read_text()) for file in kept.glob("*.json"))


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [False, True])
def test_a_kill_at_any_write_leaves_whole_folders(lasting: bool, runs: FaultyRuns) -> None:
    """At the n-th rename, deletion, half-written file or fsync: n rises until a run gets through."""
    kills, name = 0, f"trapped-{lasting}"
    while (code := runs.run(name, *SHORT, kill_at_call={"number": kills + 1, "lasting": lasting})) != [0]:
        assert code == [KILLED], runs.log(name).read_text()
        kills += 1
        _assert_whole(runs.folder(name))
    assert kills > FEWEST[lasting], "there is more than that to a checkpoint and a drafter"
    assert runs.result(name) == runs.result("short")
    assert runs.leftovers(name) == []
    assert runs.checkpoints(name) == ["step-000004"]


@pytest.mark.parametrize("lasting", mostly_slow([False, True], False))
def test_a_kill_at_any_write_keeps_what_is_replaced(lasting: bool, runs: FaultyRuns) -> None:
    """Each call between a checkpoint and the end, in which a better drafter comes and the checkpoint before goes.

    A kill between the two renames of a drafter leaves the old one under another name, and the next start moves it back.
    """
    before, number, name = f"before-{lasting}", 1, f"replaced-{lasting}"
    assert runs.run(before, *SHORT, kill_at_step={"step": 3}) == [KILLED]
    moved_aside = 0
    while True:
        shutil.rmtree(runs.folder(name), ignore_errors=True)
        shutil.copytree(runs.folder(before), runs.folder(name))
        if runs.run(name, *SHORT, kill_at_call={"number": number, "lasting": lasting}) == [0]:
            break
        _assert_whole(runs.folder(name))
        aside = [path for path in runs.folder(name).glob(".drafter.old-*") if (path / "model.safetensors").exists()]
        assert (runs.folder(name) / "drafter").exists() or aside, "the old one went before the new one came"
        moved_aside += not (runs.folder(name) / "drafter").exists()
        assert [path for path in runs.checkpoints(name) if path[0] != "."], "the old one went before the new one came"
        if number % 8 == 0 or not (runs.folder(name) / "drafter").exists():
            assert runs.run(name, *SHORT) == [0]
            assert runs.result(name) == runs.result("short")
            assert runs.checkpoints(name) == ["step-000004"]
        number += 1
    assert moved_aside == 1, "one kill came between the two renames"
    assert number > FEWEST[lasting]
    assert runs.result(name) == runs.result("short")


@pytest.mark.parametrize(
    ("step", "number", "code"), [pytest.param(7, signal.SIGTERM, 143, marks=pytest.mark.slow), (8, signal.SIGINT, 130)]
)
def test_a_signal_stops_after_the_step_with_a_checkpoint(step: int, number: int, code: int, runs: FaultyRuns) -> None:
    """After step 8 an evaluation is due: each resumed run begins with it until there is another checkpoint."""
    name = f"stopped-{code}"
    # The launcher passes the terminal's signal on at once: that is no second one.
    trap = {"step": step, "number": number, "rank": 0, "again_after": 0.05}
    assert runs.run(name, signal_at_step=trap) == [code]
    assert f"tiny: stopped by a signal after step {step}; the same command continues" in runs.said(name)
    assert runs.checkpoints(name)[-1] == f"step-{step:06d}"
    rows = read_metrics(runs.folder(name))
    assert rows[-1]["step"] == step
    assert "loss" in rows[-1]
    assert runs.run(name, kill_at_step={"step": 9}) == [KILLED]
    assert runs.checkpoints(name)[-1] == f"step-{step:06d}"
    assert runs.run(name) == [0]
    assert runs.result(name) == runs.result("whole")


def test_a_second_signal_stops_at_once(runs: FaultyRuns) -> None:
    trap = {"step": 7, "number": signal.SIGTERM, "rank": 0, "again_after": 1.1}
    assert runs.run("twice", signal_at_step=trap) == [-signal.SIGTERM]
    assert runs.checkpoints("twice") == ["step-000003", "step-000006"]
    assert runs.run("twice") == [0]
    assert runs.result("twice") == runs.result("whole")


def test_processes_stop_together_and_their_number_may_change(runs: FaultyRuns) -> None:
    """A signal to the second of two stops both after the same step; then one process continues, then two again."""
    trap = {"step": 8, "number": signal.SIGTERM, "rank": 1}
    assert runs.run("changing", processes=2, signal_at_step=trap) == [143, 143]
    assert runs.checkpoints("changing")[-1] == "step-000008"
    assert runs.losses("changing") != runs.losses("whole")[:8], "two add sums up in another order"
    assert runs.run("changing", kill_at_step={"step": 17}) == [KILLED]
    assert runs.run("changing", processes=2) == [0, 0]
    assert "resuming after step 15" in runs.said("changing")
    assert runs.losses("changing") == pytest.approx(runs.losses("whole"), abs=1e-5)


@pytest.mark.slow
def test_two_processes_continue_bit_by_bit(runs: FaultyRuns) -> None:
    trap = {"step": 8, "number": signal.SIGTERM, "rank": 0}
    assert runs.run("pair", processes=2, signal_at_step=trap) == [143, 143]
    assert runs.run("pair", processes=2) == [0, 0]
    assert runs.result("pair") == runs.result("two")


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter", [["eagle", "objective.feature_weight=0.1"], ["dflash", "drafter.layers=[1,2]", "drafter.block_size=4"]]
)
def test_noise_is_the_same_on_each_process_after_a_kill(drafter: list[str], runs: FaultyRuns) -> None:
    """Feature noise and random anchors: drawn from torch's generator alone, seeded by step and process."""
    kind, *options = drafter
    overrides = [f"drafter.type={kind}", *options, "train.steps=8", "evaluation.count=1"]
    assert runs.run(f"{kind}-whole", *overrides, processes=2, no_other_randomness={}) == [0, 0]
    assert runs.run(f"{kind}-cut", *overrides, processes=2, kill_at_step={"step": 5}) == [KILLED, KILLED]
    assert runs.run(f"{kind}-cut", *overrides, processes=2) == [0, 0]
    assert "resuming after step 3" in runs.said(f"{kind}-cut")
    assert runs.result(f"{kind}-cut") == runs.result(f"{kind}-whole")


@pytest.mark.parametrize(
    ("processes", "step", "room", "what", "kept"),
    [
        (1, 8, 50_000, "drafter", 6),
        pytest.param(1, 8, 60_000, "checkpoints", 6, marks=pytest.mark.slow),
        pytest.param(2, 8, 60_000, "checkpoints", 6, marks=pytest.mark.slow),
        pytest.param(1, 8, 1_800, "metrics.jsonl", 6, marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_stops_the_run_and_keeps_what_it_has(
    processes: int, step: int, room: int, what: str, kept: int, runs: Runs
) -> None:
    name = f"full-{what}-{processes}"
    assert runs.run(name, processes=processes, no_space={"step": step, "room": room}) == [2] * processes
    folder = runs.folder(name)
    assert f"DraftsmithError: {folder / what} cannot be written (" in runs.said(name)
    taus = {row["step"]: row["evaluation"]["tau"] for row in read_metrics(folder) if "evaluation" in row}
    best = max((at for at in taus if what != "drafter" or at < step), key=lambda at: (taus[at], at))
    assert f"kept: the checkpoint of step {kept} and the best drafter, of step {best}." in runs.said(name)
    assert "Traceback" not in runs.said(name)
    assert runs.leftovers(name) == []
    assert runs.checkpoints(name) == [f"step-{kept - 3:06d}", f"step-{kept:06d}"]
    assert load_file(folder / "drafter" / "model.safetensors")
    assert runs.run(name, processes=processes) == [0] * processes
    assert runs.result(name) == runs.result("whole" if processes == 1 else "two")


def test_a_run_of_another_recipe_is_refused(runs: FaultyRuns) -> None:
    assert runs.run("mine", kill_at_step={"step": 2}) == [KILLED]
    assert runs.run("mine", "train.steps=64") == [2]
    assert "holds another run: train.steps=20 there, 64 here" in runs.said("mine")


@pytest.mark.parametrize("at", mostly_slow(["start", "log", "finish"], "log"))
def test_a_tracker_that_fails_costs_a_line(at: str, runs: FaultyRuns) -> None:
    assert runs.run(f"tracker-{at}", "tracker=tensorboard", *SHORT, tracker_fails={"at": at}) == [0]
    assert runs.result(f"tracker-{at}") == runs.result("short")
    word = {"finish": "close"}.get(at, at)
    assert runs.said(f"tracker-{at}").count(f"tracker=tensorboard failed to {word} (RuntimeError: server is away)") == 1


def test_a_resumed_run_continues_the_same_tracker_run(runs: FaultyRuns) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    short = ("train.steps=8", "evaluation.count=1", "tracker=tensorboard")
    assert runs.run("board", *short, kill_at_step={"step": 6}) == [KILLED]
    assert runs.run("board", *short) == [0]
    events = EventAccumulator(str(runs.folder("board") / "tracker" / "draftsmith")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [*range(1, 9)]
    assert [event.step for event in events.Scalars("evaluation/tau")] == [0, 4, 8]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(runs.losses("board"))
    assert len(list((runs.folder("board") / "tracker" / "draftsmith").rglob("hparams.yml"))) == 1
