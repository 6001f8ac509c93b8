"""Training on the states of a real vLLM, started by the command that `data server` prints.

`$VLLM_PYTHON` is the Python that has vLLM and hs-connectors, `$SMOLLM2` the folder of SmolLM2-135M that
`benchmarks/real_models.py` writes. Runs over a store need Mooncake here and in vLLM's environment.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from forked import free_port
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers_server import running

from draftsmith.distill.embedded import embedded_target
from draftsmith.train.run_folder import read_metrics

pytestmark = pytest.mark.engine

STEPS, LENGTH, TOKENS = 60, 3, 48
PROMPTS, HELD_OUT = 160, 16
DOCS = Path(__file__).parents[2] / "docs"
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(Path(__file__).parent)}
EXACT = ["--dtype", "float32", "--enforce-eager"]
STORE_GIB, ANSWERS_GIB = 0.25, 0.5
ESTIMATE_CLOSE = 0.03
CLOSE = 2e-3
"""Relative difference of losses: the engine rounds otherwise, and the difference grows with the steps."""


@pytest.fixture(scope="module")
def python() -> str:
    if "VLLM_PYTHON" not in os.environ:
        pytest.skip("VLLM_PYTHON is not set; expected the Python that has vLLM and hs-connectors")
    return os.environ["VLLM_PYTHON"]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3-MoE of random weights, in two shards."""
    folder = tmp_path_factory.mktemp("mixture")
    tokenizer = AutoTokenizer.from_pretrained(embedded_target())
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "vocab_size": len(tokenizer), "initializer_range": 0.2}
    config = Qwen3MoeConfig(**sizes, **heads, **experts, tie_word_embeddings=False, dtype="float32")
    Qwen3MoeForCausalLM(config).save_pretrained(folder, max_shard_size="1MB")
    tokenizer.save_pretrained(folder)
    return folder


def target_of(name: str, request: pytest.FixtureRequest) -> str:
    if name == "mixture":
        return str(request.getfixturevalue("mixture"))
    if name == "smollm2" and "SMOLLM2" not in os.environ:
        pytest.skip("SMOLLM2 is not set; expected the folder of the model")
    return os.environ["SMOLLM2"] if name == "smollm2" else str(embedded_target())


def written_prompts(folder: Path) -> tuple[Path, Path]:
    """Write pieces of the documentation as prompts; return all, and the last ones, which a run holds out."""
    text = "".join(file.read_text() for file in sorted(DOCS.rglob("*.md")))
    rows = [json.dumps({"prompt": text[start : start + 120]}) for start in range(0, 120 * PROMPTS, 120)]
    files = folder / "prompts.jsonl", folder / "held.jsonl"
    for file, part in zip(files, (rows, rows[-HELD_OUT:]), strict=True):
        file.write_text("\n".join(part))
    return files


def recipe_of(target: str, kind: str, prompts: Path, large: bool) -> list[str]:
    """Return a short run's recipe and overrides, without its teacher; `large`: of a target with a large vocabulary."""
    data = [f"data.prompts={prompts}", f"data.validation={HELD_OUT}", "data.prompt_tokens=160"]
    train = [f"train.steps={STEPS}", "train.batch_size=8", f"train.draft_length={LENGTH}", "train.evaluate_every=30"]
    model = [f"target.model={target}", "target.dtype=float32", "train.mixed_precision=no"]
    answers = [f"data.response_tokens={TOKENS}", "data.temperature=0"]
    rest = ["evaluation.prompts=embedded", f"evaluation.count={HELD_OUT}", f"evaluation.max_new_tokens={TOKENS}"]
    short = ["drafter.train_steps=3"]
    if large and kind == "eagle3":
        short.append("drafter.draft_vocab_size=4096")
    return [f"{kind}/any_prompts", *model, *data, *train, *answers, *rest, *short]


def teacher_of(transfer: str, place: Path, port: int, master: int) -> list[str]:
    """Return the overrides of a run whose teacher is an engine."""
    settings = {"urls": f"http://127.0.0.1:{port}", "transfer": transfer, "compare": transfer != "fp8"}
    if transfer == "mooncake":
        settings |= {"store": f"127.0.0.1:{master}", "store_gib": STORE_GIB}
    else:
        settings |= {"folder": str(place), "answers_gib": ANSWERS_GIB}
    return ["teacher.kind=server", *(f"teacher.server.{key}={json.dumps(value)}" for key, value in settings.items())]


def command(*words: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of draftsmith as a user does; it must succeed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-m", "draftsmith", *map(str, words)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@contextmanager
def engine(recipe: Sequence[str], python: str, place: Path) -> Iterator[None]:
    """Run what `data server` prints, on a CPU."""
    *services, served = [shlex.split(line) for line in command("data", "server", *recipe).stdout.splitlines()]
    binaries = Path(python).parent
    options = dict(zip(served[3::2], served[4::2], strict=True))
    connector = json.loads(options["--kv-transfer-config"])
    on_cpu = {"kv_connector": f"Cpu{connector['kv_connector']}", "kv_connector_module_path": "cpu_connectors"}
    served[served.index("--kv-transfer-config") + 1] = json.dumps({**connector, **on_cpu})
    with ExitStack() as stack:
        for words in services:
            stack.enter_context(process([str(binaries / words[0]), *words[1:]], place / f"{words[0]}.log"))
        vllm = [str(binaries / "vllm"), *served[1:], "--host", "127.0.0.1", *EXACT]
        stack.enter_context(running(vllm, int(options["--port"]), place / "vllm.log", **ON_CPU))
        yield


@contextmanager
def process(words: list[str], log: Path) -> Iterator[None]:
    with log.open("ab") as output, subprocess.Popen(words, stdout=output, stderr=output) as started:
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                started.send_signal(signal.SIGKILL)


def losses_of(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


@pytest.mark.parametrize(
    ("target", "kind", "transfer"),
    [
        ("embedded", "eagle3", "file"),
        ("mixture", "mtp", "mooncake"),
        ("mixture", "eagle3", "fp8"),
        ("smollm2", "eagle3", "mooncake"),
        ("smollm2", "mtp", "file"),
    ],
)
def test_a_run_on_vllm_is_one_on_the_whole_target(
    target: str, kind: str, transfer: str, python: str, request: pytest.FixtureRequest, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Losses are equal, nothing is left behind, and the estimated tau is that of `eval` and, for EAGLE-3, of vLLM."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    if transfer == "mooncake" and subprocess.run([sys.executable, "-c", "import mooncake.store"]).returncode:
        pytest.skip("no mooncake.store; expected mooncake-transfer-engine and its libraries")
    (states := tmp_path / "states").mkdir()
    prompts, held = written_prompts(tmp_path)
    model, output = target_of(target, request), tmp_path / "served"
    recipe, port = recipe_of(model, kind, prompts, target == "smollm2"), free_port()
    taught = [*recipe, *teacher_of(transfer, states, port, free_port())]
    answers = [f"data.server.url=http://127.0.0.1:{port}", "data.server.model=target"]
    with engine(taught, python, tmp_path):
        said = command("train", *taught, f"output={output}").stderr
        assert not list(states.iterdir())
        command("train", *recipe, *answers, f"output={tmp_path / 'online'}")
    assert ("all layers compared with the target's" in said) == (transfer != "fp8")
    kept = re.search(r"the states of (\d+) of \1 texts were written with their answers", said)
    assert transfer == "mooncake" or kept is not None
    served, online = losses_of(output), losses_of(tmp_path / "online")
    assert served == pytest.approx(online, rel=0.05 if transfer == "fp8" else CLOSE)
    assert sum(served[-10:]) < sum(served[:10])

    estimated = max(row["evaluation"]["tau"] for row in read_metrics(output) if "evaluation" in row)
    given = ("--target", model, "--prompts", str(held), "--count", HELD_OUT, "--max-new-tokens", TOKENS)
    given += ("--temperature", 0, "--repeats", 1, "--out")
    command("eval", "--drafter", output / "drafter", "--gamma", LENGTH, *given, tmp_path / "local")
    taus = [tau_of(tmp_path / "local", "rows")]
    if kind == "eagle3":
        with drafting(output / "drafter", model, port, python, tmp_path) as url:
            command("eval", "server", url, "--model", model, "--concurrency", 1, *given, tmp_path / "remote")
        taus.append(tau_of(tmp_path / "remote", "server"))
    print(f"{target} {kind} {transfer}: loss {served[0]:.3f} to {served[-1]:.3f}, online {online[-1]:.3f}")
    print(f"tau: estimated {estimated:.3f}, of eval and vLLM {taus}")
    assert taus == pytest.approx([estimated] * len(taus), rel=ESTIMATE_CLOSE)


def tau_of(folder: Path, rows: str) -> float:
    every = json.loads((folder / "eval.json").read_text())[rows]
    return next(row for row in every if row.get("category", "all") == "all")["tau"]


@contextmanager
def drafting(drafter: Path, target: str, port: int, python: str, place: Path) -> Iterator[str]:
    """Serve an exported drafter, as the command that `export` prints."""
    printed = command("export", drafter, "--format", "vllm", "--target", target, "--out", place / "export").stdout
    (line,) = [line for line in printed.splitlines() if line.startswith("vllm serve")]
    words = [
        *shlex.split(line)[1:],
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--enforce-eager",
        "--dtype",
        "float32",
    ]
    with running([str(Path(python).with_name("vllm")), *words], port, place / "drafting.log", **ON_CPU) as url:
        yield url
