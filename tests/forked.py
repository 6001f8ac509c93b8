"""Runs of one or several processes, forked from one that has imported everything: a start costs no imports.

`python forked.py` serves; `Processes` asks it.
"""

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HANGS = 120.0
"""Seconds after which a run is made to print its stack and is ended."""


class Processes:
    """Starts `draftsmith.train` as a launcher would, with its environment."""

    def __init__(self, environment: dict[str, str]) -> None:
        tests = Path(__file__).parent
        path = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])
        always = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._server = subprocess.Popen(
            [sys.executable, __file__], env={**os.environ, **always, **environment}, **pipes
        )

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait()

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
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes), **environment}
        asked = {"arguments": arguments, "log": str(log), "traps": traps or {}, "program": program}
        asked["estimate"] = estimate
        started = []
        for rank in range(processes):
            ranks = {} if processes == 1 and not environment else {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(self._ask({**asked, "environment": ranks}))
        return started

    def wait(self, started: list[int]) -> list[int]:
        """Exit codes, by rank."""
        return [self._ask({"wait": pid}) for pid in started]

    def _ask(self, value: dict[str, Any]) -> int:
        self._server.stdin.write(json.dumps(value) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


def serve() -> None:
    """Read a run a line and fork it; print its process id, and its exit code once asked to wait."""
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 (compiles on import; DeepSpeed imports it later)
    import torch
    from transformers.models.llama import modeling_llama  # noqa: F401 (so that forked runs have it)
    from traps import Traps

    from draftsmith import cli
    from draftsmith.eval import run as measure  # noqa: F401
    from draftsmith.train import trainer as loop  # noqa: F401
    from draftsmith.train.__main__ import main
    from draftsmith.train.estimate import memory

    programs = {"train": main, "draftsmith": cli.main}

    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            print(_exit_code(asked["wait"]), flush=True)
            continue
        pid = os.fork()
        if not pid:
            output = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ.update(asked["environment"])
            if not asked["estimate"]:
                memory.announce_memory = lambda context: None
            for name, options in asked["traps"].items():
                getattr(Traps, name)(**options)
            faulthandler.enable()
            try:
                code = programs[asked["program"]](asked["arguments"])
            except SystemExit as stopped:
                code = stopped.code
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            os._exit(code or 0)  # an interpreter that was forked is not sure to end by itself
        print(pid, flush=True)


def _exit_code(pid: int) -> int:
    deadline = time.monotonic() + HANGS
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGABRT)
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(ended[1])


if __name__ == "__main__":
    serve()
