"""Servers as processes of their own on the loopback; `transformers serve` on the CPU."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SERVE = "from transformers.cli.transformers import main; main()"
PATIENCE = 900.0
"""Seconds that it may take to start."""


@contextmanager
def serving(folder: Path, home: Path, port: int) -> Iterator[str]:
    """Serve the model in `folder`, and yield the address; the server is killed at the end."""
    command = [sys.executable, "-c", SERVE, "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    with running([*command, "--device", "cpu"], port, home / "server.log", HF_HOME=str(home)) as url:
        yield url


@contextmanager
def running(command: list[str], port: int, log: Path, **environment: str) -> Iterator[str]:
    """Run a command that serves on `port`, and yield the address once it answers; it is ended at the end."""
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    with log.open("ab") as output:
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=output, start_new_session=True)
        try:
            _wait(process, f"http://127.0.0.1:{port}/health", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # vLLM has processes of its own
            process.wait()


def _wait(process: subprocess.Popen[bytes], health: str, log: Path) -> None:
    until = time.monotonic() + PATIENCE
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # tests name a proxy that does not run
    while time.monotonic() < until:
        assert process.poll() is None, f"the server ended:\n{log.read_text(errors='replace')[-3000:]}"
        with suppress(OSError), opener.open(health, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise AssertionError(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")
