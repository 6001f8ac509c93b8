"""Runs of one or several processes, forked from one that has imported everything: a start costs no imports.

`python forked.py` serves; `Server` asks it, and `Processes` are the runs of a test file. `run_group` runs a function in
forked processes of one gloo group.
"""

import faulthandler
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HANGS = 120.0
"""Seconds after which a run is made to print its stack and is ended."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Server:
    """The process that has everything imported. It forks a run, or waits for one, for each line that it is sent."""

    def __init__(self) -> None:
        tests = Path(__file__).parent
        path = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])
        always = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"}
        # Trackers are tested without a network; wandb would use the key of whoever runs the tests.
        own = {name: value for name, value in os.environ.items() if name != "WANDB_API_KEY"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, __file__], env={**own, **always}, **pipes)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def ask(self, value: dict[str, Any]) -> int:
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


class Processes:
    """Starts `draftsmith.train` as a launcher would, with its environment and with `environment`."""

    def __init__(self, server: Server, environment: dict[str, str]) -> None:
        self._server, self._environment = server, environment

    def start(
        self,
        arguments: list[str],
        log: Path,
        processes: int,
        environment: dict[str, str],
        traps: dict[str, dict[str, Any]] | None = None,
        program: str = "train",
        estimate: bool = False,
    ) -> list[int]:
        """Process ids, by rank. `traps`: what is to go wrong, see traps.py; `program`: 'train', or 'draftsmith'.

        Without `estimate`, runs do not estimate their memory, which takes longer than training on a tiny target.
        """
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared = {**address, "WORLD_SIZE": str(processes), **environment}
        asked = {"arguments": arguments, "log": str(log), "traps": traps or {}, "program": program}
        asked["estimate"] = estimate
        started = []
        for rank in range(processes):
            ranks = {} if processes == 1 and not environment else {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(self._server.ask({**asked, "environment": {**self._environment, **ranks}}))
        return started

    def wait(self, started: list[int]) -> list[int]:
        """Exit codes, by rank."""
        return [self._server.ask({"wait": pid}) for pid in started]


@dataclass
class Runs:
    """Runs of one recipe, each with a log and a folder of its own under `place`."""

    place: Path
    server: Processes
    recipe: Path

    def start(
        self,
        name: str,
        *overrides: str,
        output: str = "",
        processes: int = 1,
        environment: dict[str, str] | None = None,
        estimate: bool = False,
        **traps: dict[str, Any],
    ) -> list[int]:
        arguments = [str(self.recipe), f"output={self.folder(output or name)}", *overrides]
        if environment is None:
            environment = {"ACCELERATE_USE_CPU": "true"} if processes > 1 else {}
        return self.server.start(arguments, self.log(name), processes, environment, traps, estimate=estimate)

    def run(self, name: str, *overrides: str, **how: Any) -> list[int]:
        """Return exit codes by process."""
        return self.server.wait(self.start(name, *overrides, **how))

    def folder(self, name: str) -> Path:
        return self.place / name

    def log(self, name: str) -> Path:
        return self.place / f"{name}.log"

    def said(self, name: str) -> str:
        file = self.log(name)
        return " ".join(file.read_text().split()) if file.exists() else ""


def serve() -> None:
    """Read a run a line and fork it; print its process id, and its exit code once asked to wait."""
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 (compiles on import; DeepSpeed imports it later)
    import torch
    from transformers.models.llama import modeling_llama  # noqa: F401 (so that forked runs have it)
    from traps import Traps

    from draftsmith import cli
    from draftsmith.eval import evaluation as measure  # noqa: F401
    from draftsmith.train import trainer as loop  # noqa: F401
    from draftsmith.train.__main__ import main
    from draftsmith.train.estimate import memory

    programs = {"train": main, "draftsmith": cli.main}

    torch.set_num_threads(1)
    _load_a_model()  # transformers compiles its patterns of weights' names when a process loads its first one
    gc.collect()
    gc.freeze()  # runs collect garbage of their own alone: DeepSpeed does so several times at a start
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            print(_exit_code(asked["wait"]), flush=True)
            continue
        pid = os.fork()
        if not pid:
            _print_to(Path(asked["log"]))
            os.environ.update(asked["environment"])
            if not asked["estimate"]:
                memory.announce_memory = lambda context: None
            for name, options in asked["traps"].items():
                getattr(Traps, name)(**options)
            faulthandler.enable()
            torch.set_num_threads(1)  # makes a pool of its own, for which autograd's threads would race
            try:
                code = programs[asked["program"]](asked["arguments"])
            except SystemExit as stopped:
                code = stopped.code
            except BaseException:
                traceback.print_exc()
                code = 1
            with suppress(BrokenPipeError):
                sys.stdout.flush()
            os._exit(code or 0)  # an interpreter that was forked is not sure to end by itself
        print(pid, flush=True)


def _load_a_model() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)).save_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(folder)


def run_group(work: Callable[[int], None], count: int, folder: Path) -> None:
    """Run `work(rank)` in `count` processes of one gloo group, forked from this one; fail with what they printed."""
    logs = [folder / f"rank-{rank}.log" for rank in range(count)]
    started = []
    for rank in range(count):
        pid = os.fork()
        if not pid:
            _work_in_group(work, rank, count, folder / "store", logs[rank])
        started.append(pid)
    codes = [_exit_code(pid) for pid in started]
    assert codes == [0] * count, [log.read_text()[-1500:] for log in logs]


def _work_in_group(work: Callable[[int], None], rank: int, count: int, store: Path, log: Path) -> None:
    import torch
    import torch.distributed as dist

    _print_to(log)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"})
    code = 1
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
        work(rank)
        dist.barrier()
        dist.destroy_process_group()  # else gloo's threads abort some processes at their end: 5 of 75
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())  # pytest has replaced sys.stderr
    finally:
        os._exit(code)


def _print_to(log: Path) -> None:
    """Append what this process prints from now on to `log`."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)


def _exit_code(pid: int) -> int:
    deadline = time.monotonic() + HANGS
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGABRT)
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(ended[1])


if __name__ == "__main__":
    serve()
