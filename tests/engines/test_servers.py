"""llama-server and vLLM with exported drafters, started by the command that `export` prints.

`$LLAMA_SERVER` is llama.cpp's binary (default: the one in PATH), `$VLLM_PYTHON` the Python that has vLLM.
"""

import asyncio
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines.workshop import COUNT, TOKENS, Pair, Workshop, draftsmith
from forked import free_port
from transformers_server import running

from draftsmith.distill.embedded import embedded_target
from draftsmith.distill.load_target import load_target
from draftsmith.eval.server.counters import CounterRoutes, settled
from draftsmith.heads import HEADS
from draftsmith.hub.export import export_drafter

pytestmark = pytest.mark.engine

SERVED = [("llama.cpp", kind) for kind in ("draft_model", "eagle3", "dflash")]
SERVED += [("vllm", kind) for kind in ("draft_model", "eagle3", "dflash")]
SERVED += [("llama.cpp", f"real {kind}") for kind in ("draft_model", "eagle3", "dflash")]
CLOSE = 0.03
"""Relative difference of tau: a draft that is nearly a tie may be another one in the engine."""
VLLM = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
EXACT = ["--dtype", "float32", "--enforce-eager"]
"""vLLM serves a float32 target in bfloat16, and compiles it for minutes."""


@dataclass(frozen=True)
class Served:
    """A pair in a server, and the same server without the drafter."""

    pair: Pair
    target: str
    """The target as the server loads it."""
    model: str
    url: str
    alone: str

    @property
    def name(self) -> tuple[str, ...]:
        return "--target", self.target, "--model", self.model


@pytest.fixture(scope="module", params=SERVED, ids=" ".join)
def served(request: pytest.FixtureRequest, workshop: Workshop) -> Iterator[Served]:
    engine, kind = request.param
    plan = _llama_cpp(workshop, kind) if engine == "llama.cpp" else _vllm(workshop, kind)
    with ExitStack() as stack:
        urls = []
        for name, command in (("drafting", plan.drafting), ("alone", plan.alone)):
            port, log = free_port(), plan.pair.place / f"{engine}-{name}.log"
            command = [*command, "--host", "127.0.0.1", "--port", str(port)]
            urls.append(stack.enter_context(running(command, port, log, **VLLM)))
        yield Served(plan.pair, plan.target, plan.model, *urls)


@dataclass(frozen=True)
class Plan:
    pair: Pair
    target: str
    model: str
    drafting: list[str]
    alone: list[str]


def _llama_cpp(workshop: Workshop, kind: str) -> Plan:
    binary = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
    if binary is None:
        pytest.skip("no llama-server; expected it in PATH, or its path in LLAMA_SERVER")
    pair = workshop.pair(kind)
    usage = pair.exported("gguf").usage
    if "TARGET.gguf" in usage:
        usage = usage.replace("TARGET.gguf", shlex.quote(str(pair.target_file())))
    words = _words(usage)
    alone = [binary, *words[1 : words.index("-md")], *words[words.index("--metrics") :]]
    return Plan(pair, pair.target, words[words.index("--alias") + 1], [binary, *words[1:]], alone)


def _vllm(workshop: Workshop, kind: str) -> Plan:
    python = os.environ.get("VLLM_PYTHON")
    if python is None:
        pytest.skip("VLLM_PYTHON is not set; expected the Python that has vLLM")
    pair = workshop.pair(kind)  # whose target is a GGUF file, which vLLM cannot serve with a drafter
    words = _words(pair.exported("vllm").usage)
    target = words[2]
    assert Path(target).is_dir(), f"{target}: expected the folder of the dequantized target"
    binary = str(Path(python).with_name("vllm"))
    alone = [binary, *words[1 : words.index("--speculative-config")]]
    return Plan(pair, target, target, [binary, *words[1:], *EXACT], [*alone, *EXACT])


def _words(usage: str) -> list[str]:
    return shlex.split(usage.replace("\\\n", " "))


def test_greedy_answers_are_the_targets(served: Served, tmp_path: Path) -> None:
    """Through `data regenerate`, which takes the engine's tokens."""
    limits = ("--count", COUNT, "--prompt-tokens", 256, "--response-tokens", TOKENS, "--temperature", 0)
    limits += ("--concurrency", 1)  # llama-server's slots share a context, here of 1,024 tokens
    out = tmp_path / "answers.jsonl"
    draftsmith("data", "regenerate", served.pair.prompts, *served.name, "--server", served.url, *limits, "--out", out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) >= COUNT // 2
    for row in rows:
        ((start, end),) = row["spans"]
        served.pair.require_greedy(row["input_ids"][:start], row["input_ids"][start:end])


def test_tau_is_that_of_a_local_measurement(served: Served, tmp_path: Path) -> None:
    out = tmp_path / "served"
    measured = ("--concurrency", 1, "--repeats", 1, "--baseline", served.alone, "--out", out)
    draftsmith("eval", "server", served.url, *served.name, *served.pair.options, *measured)
    (row,) = json.loads((out / "eval.json").read_text())["server"]
    assert row["tau"] == pytest.approx(served.pair.local["tau"], rel=CLOSE)
    assert 1 <= len(row["acceptance_at"]) <= served.pair.length


def test_a_pass_commits_the_accepted_tokens_and_one_more(served: Served) -> None:
    """The prefill commits one token, and a pass without a draft is not counted. Where an answer is cut, accepted tokens
    after its end may be."""
    routes = CounterRoutes(served.url)
    before = asyncio.run(settled(routes))
    asked = {"model": served.model, "prompt": "import os\n\ndef ", "temperature": 0, "max_tokens": TOKENS}
    answer = httpx.post(f"{served.url}/v1/completions", json={**asked, "ignore_eos": True}, timeout=300).json()
    counted = asyncio.run(settled(routes)).since(before)
    committed = counted.rounds + sum(counted.accepted)
    assert abs(committed - (answer["usage"]["completion_tokens"] - 1)) <= served.pair.length
    assert sum(counted.accepted) <= counted.drafted <= served.pair.length * counted.rounds


READING = """
import json, sys
from pathlib import Path
from vllm.transformers_utils.configs.speculators import SpeculatorsConfig
config = json.loads((Path(sys.argv[1]) / "config.json").read_text())
SpeculatorsConfig.extract_vllm_speculative_config(config)
read = SpeculatorsConfig.extract_transformers_pre_trained_config(config)
kinds = set(read.get("layer_types") or ["full_attention"])
print(json.dumps([read["eagle_aux_hidden_state_layer_ids"], read["draft_vocab_size"], sorted(kinds)]))
"""


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash", "dspark"])
def test_vllm_reads_what_was_exported(kind: str, tmp_path: Path) -> None:
    """By vLLM's own parser of speculators configs."""
    python = os.environ.get("VLLM_PYTHON")
    if python is None:
        pytest.skip("VLLM_PYTHON is not set; expected the Python that has vLLM")
    target = load_target(str(embedded_target()), device="cpu").model
    dspark: dict[str, Any] = {"markov_rank": 8, "confidence_head": True}
    options = dspark if kind == "dspark" else {}
    drafter = HEADS["dflash" if options else kind].from_target(target, layers=[2, 9, 17], **options)
    export_drafter(drafter, target, "vllm", tmp_path / "export", target_name="embedded")
    command = [python, "-c", READING, tmp_path / "export"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    features = config.get("eagle_aux_hidden_state_layer_ids") or config["aux_hidden_state_layer_ids"]
    read = json.loads(done.stdout.splitlines()[-1])
    assert read == [features, config["draft_vocab_size"], ["full_attention"]]
