"""`transformers serve` as a process of its own, on the loopback and the CPU."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SERVE = "from transformers.cli.transformers import main; main()"
PATIENCE = 300.0
"""Seconds that it may take to start."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(folder: Path, home: Path, port: int) -> Iterator[str]:
    """Serve the model in `folder`, and yield the address; the server is killed at the end."""
    command = [sys.executable, "-c", SERVE, "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (home / "server.log").open("ab") as log:
        process = subprocess.Popen([*command, "--device", "cpu"], env=environment, stdout=log, stderr=log)
        try:
            _wait(process, f"http://127.0.0.1:{port}/health")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], health: str) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        assert process.poll() is None, "the server ended, see server.log"
        with suppress(OSError), urllib.request.urlopen(health, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise AssertionError("the server did not start")
