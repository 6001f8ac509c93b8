"""Faults that a test sets off inside a forked run."""

import importlib
import os
import random
import resource
import shutil
import signal
import time
from typing import Any

import draftsmith.heads.checkpoint
import draftsmith.train.checkpoints
import draftsmith.train.launch
from draftsmith.train.trainer import TrainingRun


class Traps:
    """Each is named by what a test asks of `Processes.start`."""

    @staticmethod
    def kill_at_call(number: int, lasting: bool) -> None:
        """SIGKILL at the n-th call of anything that makes a write visible; files are half written then.

        `lasting`: an fsync counts, too. A process that is killed after it leaves the same files.
        """
        calls = 0

        def trapped(original: Any, torn: bool = False) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == number:
                    if torn:
                        original(*arguments, **options)
                        os.truncate(arguments[1], os.path.getsize(arguments[1]) // 2)
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **options)

            return call

        for name in ("rename", "replace", *(("fsync",) if lasting else ())):
            setattr(os, name, trapped(getattr(os, name)))
        shutil.rmtree = trapped(shutil.rmtree)
        for module in (draftsmith.train.checkpoints, draftsmith.heads.checkpoint):
            module.save_file = trapped(module.save_file, torn=True)

    @staticmethod
    def signal_at_step(step: int, number: int, rank: int, again_after: float | None = None) -> None:
        """As if sent in the middle of this step; `again_after`: seconds to a second one, in the same step."""
        original = TrainingRun._accumulate

        def accumulate(run: TrainingRun, indices: list[int], tokens: int, done: float) -> Any:
            if round(done * run.recipe.train.steps) + 1 == step and run.accelerator.process_index == rank:
                os.kill(os.getpid(), number)
                if again_after is not None:
                    time.sleep(again_after)
                    os.kill(os.getpid(), number)
            return original(run, indices, tokens, done)

        TrainingRun._accumulate = accumulate

    @staticmethod
    def kill_at_step(step: int) -> None:
        Traps.signal_at_step(step, signal.SIGKILL, 0)
        Traps.signal_at_step(step, signal.SIGKILL, 1)

    @staticmethod
    def note_calls(where: str, file: str, pause_at: int | None = None) -> None:
        """A line for each call of `module:Class.method`; in call `pause_at` the process sits until it is killed."""
        module, _, name = where.partition(":")
        owner, _, method = name.rpartition(".")
        holder = getattr(importlib.import_module(module), owner)
        original, calls = getattr(holder, method), 0

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            with open(file, "a") as log:
                log.write(f"{os.getpid()}\n")
            while calls == pause_at:
                time.sleep(60)
            return original(*arguments, **options)

        setattr(holder, method, call)

    @staticmethod
    def closed_pipe() -> None:
        """Standard output is a pipe that nobody reads."""
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)

    @staticmethod
    def announce_after(seconds: float) -> None:
        """Seconds after which a process prints that it waits for the others to connect."""
        draftsmith.train.launch.ANNOUNCED_AFTER = seconds

    @staticmethod
    def no_space(step: int, room: int) -> None:
        """From this step on, files larger than `room` bytes end there, as on a full disk."""
        original = TrainingRun.step

        def run_step(run: TrainingRun, number: int) -> dict[str, Any]:
            if number + 1 == step:
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
            return original(run, number)

        TrainingRun.step = run_step

    @staticmethod
    def tracker_fails(at: str) -> None:
        """tensorboard's `start`, `log` or `finish` raises."""
        from accelerate.tracking import TensorBoardTracker

        def fail(*arguments: Any, **options: Any) -> None:
            raise RuntimeError("server is\naway")

        setattr(TensorBoardTracker, at, fail)

    @staticmethod
    def no_other_randomness() -> None:
        """Training must draw from torch alone, whose seed is a function of the step and the process."""
        import numpy

        original = TrainingRun.train

        def train(run: TrainingRun) -> None:
            before = random.getstate(), str(numpy.random.get_state())
            original(run)
            assert before == (random.getstate(), str(numpy.random.get_state()))

        TrainingRun.train = train
