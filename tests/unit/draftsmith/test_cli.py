"""The command line: one clear line and exit code 2 before any work starts."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from commands import printed
from huggingface_hub import constants

from draftsmith.cli import app
from draftsmith.cli.examples import EXAMPLES
from draftsmith.cli.options import measuring
from draftsmith.cli.quickstart import chosen
from draftsmith.config import section_of
from draftsmith.distill.sources import read_source
from draftsmith.errors import ConfigError
from draftsmith.eval.settings import PairSettings, named_drafters
from draftsmith.heads.untrusted import local_folder
from draftsmith.names import require_cached_prompts, require_cached_without_hub
from draftsmith.train.recipe import shipped_recipes


def test_a_stop_string_that_no_token_ends_is_refused(tiny_target_folder: Path, capsys: pytest.CaptureFixture) -> None:
    command = ["generate", "abc", "--target", str(tiny_target_folder), "--max-new-tokens", "2", "--stop", "È³"]
    code, out, err = printed(capsys, *command)
    expected = "ConfigError: stop_strings=['È³']; expected at least one string that the tokenizer can produce ("
    assert (code, out, err.startswith(expected), len(err.splitlines())) == (2, "", True, 1), err
    code, out, err = printed(capsys, *command, "--stop", "a")
    assert (code, out.startswith("abc"), "stopped by" in err) == (0, True, True), err


def test_recipes_are_listed_and_printed(capsys: pytest.CaptureFixture) -> None:
    code, out, err = printed(capsys, "recipes")
    assert (code, err) == (0, "next: draftsmith recipes draft_model/any_prompts\n")
    assert [line.split()[0] for line in out.splitlines()] == list(shipped_recipes())
    _, out, err = printed(capsys, "recipes", "quickstart/mtp")
    assert (out, err) == (shipped_recipes()["quickstart/mtp"], "next: draftsmith memory quickstart/mtp\n")
    assert "num_processes: 8" in printed(capsys, "recipes", "accelerate/ddp_8gpu")[1].splitlines()
    assert "did you mean accelerate/ddp_8gpu?" in printed(capsys, "recipes", "accelerate/ddp_8gup")[2]


SUFFIX = ["--target", "embedded", "--drafter", "suffix"]
URL = "http://127.0.0.1:9"
"""No server listens there."""
SEED = f"{10**23}"
GENERATE, FORECAST, PREVIEW = ["generate", "x", "--target", "embedded"], ["forecast", *SUFFIX], ["data", "preview"]
REGENERATE = ["data", "regenerate", "embedded", "--target", "embedded", "--out", "o.jsonl"]
SERVED, EXPORT = ["check", "--target", "embedded", "--server", URL], ["export", "d", "--target", "embedded"]
ASKED = [*REGENERATE, "--server", URL, "--model", "m"]
MISTAKES: dict[str, list[str]] = {
    "prompts=nosuch.jsonl; expected a file": [*PREVIEW, "nosuch.jsonl", "--target", "embedded"],
    "--target=./nosuch; expected 'embedded'": ["eval", "--target", "./nosuch", "--drafter", "suffix"],
    "--target is missing; expected 'embedded', a local folder, a GGUF": ["eval", "--drafter", "suffix"],
    "--drafter is missing; expected": ["eval", "--target", "embedded"],
    "Missing option '--drafter'. (see draftsmith forecast --help)": ["forecast", "--target", "embedded"],
    "--drafter=./nosuch; expected a local": ["eval", *SUFFIX, "--drafter", "./nosuch"],
    "--drafter=user/nosuch: no such folder, not in": ["eval", *SUFFIX, "--drafter", "user/nosuch"],
    "--drafter=./no/where; expected a local": ["check", *SUFFIX, "--drafter", "hybrid:drafter=./no/where"],
    "--drafter=suffix: the name 'suffix' is taken": ["eval", *SUFFIX, "--drafter", "suffix"],
    "'min=3'; expected suffix:KEY=VALUE": ["eval", *SUFFIX[:2], "--drafter", "suffix:min=3"],
    "--gamma=0; expected >= 1": ["eval", *SUFFIX, "--gamma", "0"],
    "--gamma=3 without --drafter": [*GENERATE, "--gamma", "3"],
    "gamma=2 and policy=chain; expected one of the two": ["check", *SUFFIX, "--gamma", "2", "--policy", "chain"],
    "--top-p=2.0; expected <= 1": ["eval", *SUFFIX, "--top-p", "2"],
    "--dtype=int3; expected 'float32', 'bfloat16' or": ["eval", *SUFFIX, "--dtype", "int3"],
    "--temperature=[1.0, 1.0]; expected each only once": ["eval", *SUFFIX, *2 * ["--temperature", "1"]],
    "--temperature=-1.0; expected >= 0 (0 is greedy, others from 1e-30": ["check", *SUFFIX, "--temperature", "-1"],
    "--batch-size=[2, 2]; expected each only once": [*FORECAST, *2 * ["--batch-size", "2"]],
    "--policy='dense'; expected one of chain": ["eval", *SUFFIX, "--policy", "suffix=dense"],
    "size=100000; expected at most 1024": ["eval", *SUFFIX, "--policy", "best-first:size=100000"],
    "--rule=luck; expected 'token', 'block'": ["check", *SUFFIX, "--rule", "luck"],
    "--attn-implementation='fast'; expected sdpa": ["eval", *SUFFIX, "--attn-implementation", "fast"],
    "--chat-template=nosuch; expected a file": ["eval", *SUFFIX, "--chat-template", "nosuch"],
    "--template-option x; expected key=value": ["eval", *SUFFIX, "--template-option", "x"],
    "without arguments of apply_chat_template (tokenize)": ["eval", *SUFFIX, "--template-option", "tokenize=true"],
    "--images=nosuch; expected a folder": ["eval", *SUFFIX, "--images", "nosuch"],
    f"--seed={SEED}; expected <= 4294967295": ["check", *SUFFIX, "--seed", SEED],
    f"--seed={SEED}; expected <=": [*REGENERATE, "--seed", SEED],
    "tokens=120; expected >= 500": ["check", *SUFFIX, "--tokens", "120"],
    "--drafter is missing; expected a drafter, or a running server as --server": ["check", "--target", "embedded"],
    "--drafter=suffix with --server=http": [*SERVED, "--drafter", "suffix"],
    "--compile with --server; expected it at the server's start": [*SERVED, "--compile"],
    "--gamma with --server; expected it at the server's": [*SERVED, "--gamma", "2"],
    "--model=m without --server": ["check", *SUFFIX, "--model", "m"],
    "--prompts=./nosuch; expected a file": [*FORECAST, "--prompts", "./nosuch"],
    "--profile=nosuch.yaml; expected a file": [*FORECAST, "--profile", "nosuch.yaml"],
    "--save-profile='x.json'; expected one --temperature": [*FORECAST, "--save-profile", "x.json"],
    "--save-profile=. is a folder; expected the name of": [*FORECAST, *("--temperature", "0", "--save-profile", ".")],
    "--target=nosuch.gguf; expected a GGUF file": ["generate", "x", "--target", "nosuch.gguf"],
    "stop=''; expected a string of at least one character": [*GENERATE, "--stop", ""],
    "--image=nosuch.png; expected a file, and there is none": [*GENERATE, "--image", "nosuch.png"],
    "--port=0; expected >= 1": ["demo", *SUFFIX, "--port", "0"],
    "--count=0; expected >= 1": [*REGENERATE, "--count", "0"],
    "--turns=last; expected 'first' or 'all'": [*REGENERATE, "--turns", "last"],
    "--temperature=-2.0; expected >= 0": [*REGENERATE, "--temperature", "-2"],
    "--responses 2 with --temperature 0": [*REGENERATE, "--responses", "2", "--temperature", "0"],
    "--out=. is a folder; expected the name of a file": [*REGENERATE, "--out", "."],
    "--timeout without --server; expected address of a server": [*REGENERATE, "--timeout", "3"],
    "--model is missing; expected the name under which the server has": ASKED[:-2],
    "--model without --server": [*REGENERATE, "--model", "m"],
    "--top-p without --server": [*REGENERATE, "--top-p", "0.5"],
    "--attn-implementation='flex'; expected sdpa, eager": [*REGENERATE, "--attn-implementation", "flex"],
    "--extra-body=[]; expected a valid": [*ASKED, "--extra-body", "[]"],
    "DRAFTSMITH_SERVER_KEY": [*REGENERATE, "--server", "http://u:hunter2@h", "--model", "m"],
    "--concurrency=0; expected >= 1": [*ASKED, "--concurrency", "0"],
    "--extra-body={ is not JSON": [*ASKED, "--extra-body", "{"],
    "--drafter suffix with --server": [*ASKED, "--drafter", "suffix"],
    "nosuch; expected an eval.json": ["eval", "compare", "nosuch"],
    "drafter=nosuch; expected a folder with config.json": ["push", "nosuch", "user/name"],
    "repo='me'; expected user/name": ["push", "made", "me"],
    "--base-model='me'; expected user/name": ["push", "made", "me/it", "--base-model", "me"],
    "--licence='a b'; expected the Hub's": ["push", "made", "me/it", "--licence", "a b"],
    "Missing argument 'URL'. (see draftsmith eval server": ["eval", "server", "--target", "embedded", "--model", "m"],
    "--drafter=suffx; did you mean suffix?": ["eval", "--target", "embedded", "--drafter", "suffx"],
    "--drafter=native-mpt; did you mean native-mtp?": ["eval", *SUFFIX, "--drafter", "hybrid:drafter=native-mpt"],
    "server http://127.0.0.1:9/v1 cannot be reached": ["eval", "server", URL, "--target", "embedded", "--model", "m"],
    "http://127.0.0.1:9/v1 cannot be reached": SERVED,
    "--target=./nosuch; expected 'embedded', an": [*EXPORT[:3], "./nosuch", "--format", "vllm", "--out", "x"],
    "--format=vlm; expected 'vllm', 'sglang', 'gguf', 'transformers' or": [*EXPORT, "--format", "vlm", "--out", "x"],
    "--dtype=int8; expected 'float32', 'bfloat16'": [*EXPORT, "--format", "vllm", "--dtype", "int8", "--out", "x"],
    "--out=made exists already; expected a new": [*EXPORT, "--format", "vllm", "--out", "made"],
    "--out=. has no name of its own": ["import", *EXPORT[1:], "--out", "."],
    "drafter=suffix has no weights": ["export", "suffix", *EXPORT[2:], "--format", "vllm", "--out", "x"],
    "drafter=suffx; did you mean suffix?": ["import", "suffx", *EXPORT[2:], "--out", "x"],
    "drafter=user/nosuch: no such folder, not in": ["import", "user/nosuch", *EXPORT[2:], "--out", "x"],
    "--gamma=-1; expected >= 1": ["import", "d", "--target", "embedded", "--out", "x", "--gamma", "-1"],
    "recipe=quickstart/mpt; did you mean quickstart/mtp?": ["train", "quickstart/mpt"],
    "recipe=eagle3/embeded; did you mean eagle3/embedded?": ["recipes", "eagle3/embeded"],
    "did you mean train.steps?": ["train", "quickstart/mtp", "train.stepz=1"],
    "--on='abacus'; expected one of h200": ["memory", "quickstart/mtp", "--on", "abacus"],
    "train.batch_size=20; expected a multiple of 3": ["memory", "quickstart/mtp", "--processes", "3"],
    "--processes=0; expected >= 1": ["memory", "quickstart/mtp", "--processes", "0"],
    "objective.kind='kll'; expected 'kl'": ["memory", "quickstart/mtp", "objective.kind=kll"],
    "train.optimizer='sgd'; expected 'adamw'": ["train", "quickstart/mtp", "train.optimizer=sgd"],
    "evaluation.prompts=./a; expected a file": ["train", "quickstart/mtp", "evaluation.prompts=./a"],
    "start_from=./nosuch; expected a local folder": ["train", "quickstart/mtp", "start_from=./nosuch"],
    "start_from=nosuch: no such folder, not in": ["train", "quickstart/mtp", "start_from=nosuch"],
    "output=made/config.json/run cannot be made": ["train", "quickstart/mtp", "output=made/config.json/run"],
    "out=made/config.json is a file; expected": ["eval", *SUFFIX, "--out", "made/config.json"],
    "draftsmith eval: Invalid value for '--gamma'": ["eval", "--gamma", "x"],
    "draftsmith: No such command 'nothing'": ["nothing"],
    "ConfigError: argument='\\udcff'; expected text in UTF-8": ["recipes", "\udcff"],
    "aaa": ["train", "a" * 5000],
    "out=made/config.json/a cannot be made": ["quickstart", "--out", "made/config.json/a"],
}
"""Commands by a part of the error."""


def test_help_and_mistakes_load_no_torch(tmp_path: Path) -> None:
    """They take less than a second of processor time, of which torch and transformers would take many."""
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "config.json").touch()
    program = "import sys; from draftsmith.cli import main\n"
    for command in (["--help"], *MISTAKES.values()):
        code = 2 * (command != ["--help"])
        program += f"try: main({command})\nexcept SystemExit as stop: assert stop.code == {code}, {command}\n"
        program += f"assert 'torch' not in sys.modules, {command}\n"
    program += "from draftsmith.train.__main__ import main as launched\n"
    program += "assert launched(['quickstart/mtp', 'target.model=./a']) == 2 and 'torch' not in sys.modules"
    values = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, env=values)
    assert done.returncode == 0, done.stderr
    for line, expected in zip(done.stderr.splitlines(), [*MISTAKES, "target.model=./a; expected"], strict=True):
        assert expected in line
        assert "hunter2" not in line
        assert len(line) <= 500


COMMAND = """
import signal, time, weakref
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a parent may have told to ignore it
from draftsmith import cli

class Lock:
    pass

def stop(_):
    signal.raise_signal(signal.SIGINT)

@cli.app.command()
def load():
    {}
    for _ in range(400):
        time.sleep(0.05)

cli.main(["load"])
"""


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("lock = Lock(); reference = weakref.ref(lock, stop); del lock", 130, "interrupted"),
        ("Lock.__del__ = stop; lock = Lock(); del lock", 130, "interrupted"),
        ("raise KeyboardInterrupt('interrupted; 3 are kept')", 130, "interrupted; 3 are kept"),
        ("1 / 0", 70, "ZeroDivisionError: division by zero"),
    ],
    ids=["weak reference", "destructor", "message", "crash"],
)
def test_how_a_command_ends(body: str, code: int, said: str) -> None:
    """Python ignores Ctrl-C in callbacks, and a crash is no verdict."""
    done = subprocess.run([sys.executable, "-c", COMMAND.format(body)], capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr.splitlines()[-1] == said


@pytest.mark.parametrize("cached", [False, True])
def test_an_unreachable_hub_is_asked_twice(
    cached: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "models--user--name" / "snapshots" / "abc" / "config.json"
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    if cached:
        (tmp_path / "datasets" / "user___camel_case-2.5").mkdir(parents=True)
        file.parent.mkdir(parents=True)
        file.write_text("{}")
        refs = tmp_path / "models--user--name" / "refs"
        refs.mkdir()
        (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    if cached:
        require_cached_without_hub("user/name", "--target")
        assert constants.HF_HUB_OFFLINE
        require_cached_prompts("user/CamelCase-2.5", "prompts")
        assert capsys.readouterr().err.count("http://127.0.0.1:9 cannot be reached") == 1
    else:
        with pytest.raises(ConfigError, match=r"--target=user/name/a\.gguf: no such folder.*127.0.0.1:9 cannot be"):
            require_cached_without_hub("user/name/a.gguf", "--target")
        with pytest.raises(ConfigError, match=r"prompts=user/CamelCase-2\.5: no such file.*127.0.0.1:9 cannot be"):
            list(read_source("user/CamelCase-2.5"))
        with pytest.raises(ConfigError, match=r"--target=user/name: no such folder.*127.0.0.1:9 cannot be reached"):
            require_cached_without_hub("user/name", "--target")
        assert capsys.readouterr().err == ""


def test_the_environment_has_no_path_and_no_token(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    code, said, _ = printed(capsys, "env")
    assert (code, len(said.splitlines()) < 60) == (0, True)
    assert {"draftsmith", "torch", "python", "torch_threads"} <= {line.split()[0] for line in said.splitlines()}
    assert "hf_secret" not in said
    assert not {str(Path.home()), str(Path.cwd()), sys.prefix} & set(said.split())


def test_without_arguments_the_loop_is_shown(capsys: pytest.CaptureFixture) -> None:
    code, out, err = printed(capsys)
    assert (code, err) == (0, "")
    for command in ("data preview", "eval", "forecast", "push", "quickstart", "recipes"):
        assert f"draftsmith {command}" in out
    assert "accelerate launch -m draftsmith.train RECIPE" in out


def test_help_groups_commands(capsys: pytest.CaptureFixture) -> None:
    _, out, _ = printed(capsys, "--help")
    groups = [out.index(f"─ {name} ─") for name in ("Train", "Measure and decode", "Publish")]
    assert groups == sorted(groups)
    assert groups[0] < out.index("│ memory") < groups[1] < out.index("│ eval") < groups[2] < out.index("│ push")


def test_examples_of_every_command_are_its_options(capsys: pytest.CaptureFixture) -> None:
    """Recipes in them are shipped."""
    root = typer.main.get_command(app)
    for name, examples in EXAMPLES.items():
        command: Any = root
        for word in name.split():
            command = command.commands[word]
        for example in examples:
            words = shlex.split(example.partition(">")[0])
            command.make_context(name, [*words])
            assert name not in ("train", "memory", "data prepare") or words[0] in shipped_recipes()
        _, out, _ = printed(capsys, *name.split(), "--help")
        assert "Examples:" in out
        assert " ".join(f"draftsmith {name} {examples[1]}".split()[:4]) in " ".join(out.split())
    documented = (Path(__file__).parents[3] / "docs/reference/command-line.md").read_text()
    assert set(re.findall(r"^## `draftsmith ([a-z ]+[a-z])", documented, re.MULTILINE)) == EXAMPLES.keys()


def test_memory_as_json(recipe_file: Path, capsys: pytest.CaptureFixture) -> None:
    _, out, _ = printed(capsys, "memory", recipe_file, "--json", "--on", "h100")
    estimate = json.loads(out)
    assert set(estimate["seconds"]) == {"sampling", "training"}
    _, out, _ = printed(capsys, "memory", recipe_file, "train.steps=7", "--on", "h100")
    for phase, parts in estimate["bytes"].items():
        assert f"a process {phase}" in out
        assert parts["target"] > 4 * 64 * 32
    assert out.splitlines()[-1] == f"next: accelerate launch -m draftsmith.train {recipe_file} train.steps=7"


def test_a_policy_may_be_for_one_drafter() -> None:
    settings = PairSettings(target="t", drafters={"a": "x", "b": "y"}, policies=("a=adaptive", "chain:draft_length=2"))
    assert settings.policies_of("a") == ("adaptive", "chain:draft_length=2")
    assert settings.policies_of("b") == ("chain:draft_length=2",)
    with pytest.raises(ConfigError, match="policies='c=adaptive'; expected one of"):
        section_of(PairSettings, lambda path: str(path[0]), {**settings.model_dump(), "policies": ["c=adaptive"]})


def test_the_quickstart_chooses_over_both_temperatures() -> None:
    def row(policy: str, temperature: float, speedup: float) -> dict:
        return {"drafter": "d", "policy": policy, "temperature": temperature, "speed": [{"speedup": speedup}]}

    rows = [row("even", 0, 2.0), row("even", 1, 2.0), row("uneven", 0, 3.0), row("uneven", 1, 1.2)]
    assert chosen(rows) == {"d": ("even", {0: 2.0, 1: 2.0})}


def test_suggested_commands_keep_the_options_of_loading() -> None:
    settings = PairSettings(
        target="t", drafters={"x": "x"}, prompts="p.jsonl", dtype="bfloat16", invariant=True, images="pictures"
    )
    common = ["--target", "t", "--drafter", "x", "--prompts", "p.jsonl", "--dtype", "bfloat16"]
    assert measuring("eval", settings) == ["eval", *common, "--images", "pictures", "--invariant"]
    assert measuring("forecast", settings) == ["forecast", *common], "which has no such options"
    changed = {"drafters": {"a": "x"}, "invariant": False, "images": None, "template_options": {"thinking": False}}
    named = settings.model_copy(update=changed)
    options = ["--template-option", "thinking=false"]
    assert measuring("check", named)[1:] == [*common[:3], "a=x", *common[4:], *options]


def test_names_of_drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may have any name."""
    named = named_drafters(["runs/a/drafter", "best=runs/b/drafter", "org/model"])
    assert named == {"a": "runs/a/drafter", "best": "runs/b/drafter", "model": "org/model"}
    folder = tmp_path / "lr=0.1@v2" / "drafter"
    folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    for entry, name in ((folder, "lr=0.1@v2"), (f"a={folder}", "a"), ("a=~/lr=0.1@v2/drafter", "a")):
        assert named_drafters([str(entry)]) == {name: str(folder)}
    assert local_folder(str(folder)) == local_folder("~/lr=0.1@v2/drafter") == folder


def test_memory_is_told_without_loading_anything(recipe_file: Path, capsys: pytest.CaptureFixture) -> None:
    (recipe_file.parent / "tiny-target" / "model.safetensors").unlink()
    without_data = ["data.prompts=user/not-cached", "evaluation.prompts=user/not-cached"]
    said = printed(capsys, "memory", str(recipe_file), *without_data)[1]
    assert "MiB a process in training (target 0 MiB, drafter" in said
    assert "data.prompts=user/not-cached: no such file" in printed(capsys, "train", str(recipe_file), *without_data)[2]
    code, _, said = printed(capsys, "memory", str(recipe_file), "--processes", "3")
    assert code == 2
    assert "train.batch_size=8; expected a multiple of 3" in said
    config = recipe_file.parent / "tiny-target" / "config.json"
    config.write_text(config.read_text().replace("{", '{"quantization_config": {"quant_method": "gptq"},', 1))
    assert "target is quantised" in printed(capsys, "memory", str(recipe_file))[2]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["drafter.model=./nosuch"], "drafter.model=./nosuch; expected a local folder or a Hub id"),
        (["drafter.model=tiny-target"], "drafter.model=tiny-target: no such folder, not in"),
        (["cotrain.modules=[q_prj]"], "cotrain.modules=['q_prj']"),
    ],
)
def test_memory_refuses_what_train_refuses(
    overrides: list[str], said: str, recipe_file: Path, capsys: pytest.CaptureFixture
) -> None:
    code, _, err = printed(capsys, "memory", str(recipe_file), *overrides)
    assert code == 2
    assert said in err
    assert [line for line in err.strip().splitlines() if said not in line] in ([], ["tiny: loading torch"])


@pytest.mark.parametrize(
    ("command", "said"),
    {
        "eval": "interrupted; nothing was measured yet, and the same command continues",
        "check": "interrupted; nothing is stored, and the same command begins again",
        "forecast": "interrupted; nothing is stored, and the same command begins again",
        "generate": "interrupted",
        "data regenerate": "interrupted; what is finished is kept, and the same command continues",
    }.items(),
)
def test_the_attention_implementation_reaches_the_loader(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A command that is interrupted there says whether it continues."""
    given: list[str] = []

    def load_target(name: str, *, attn_implementation: str, **_: object) -> None:
        given.append(attn_implementation)
        raise KeyboardInterrupt

    monkeypatch.setattr("draftsmith.distill.load_target.load_target", load_target)
    prompts = {"generate": ["a"], "data regenerate": ["embedded"]}
    call = [*command.split(), *prompts.get(command, []), "--target", "embedded", "--drafter", "suffix"]
    call += [] if command == "generate" else ["--out", str(tmp_path / "out"), "--count", "1"]
    code, _, err = printed(capsys, *call, "--attn-implementation", "eager")
    assert (code, given, err.splitlines()[-1]) == (130, ["eager"], said)


ENDS = {"| true": 141, ">&-": 0, "| cat": 0}


@pytest.mark.slow  # tests/integration/test_distillation.py has a pipe that is closed
@pytest.mark.parametrize("redirect", ENDS)
def test_output_that_is_closed_or_whose_encoding_lacks_characters(redirect: str, tmp_path: Path) -> None:
    """`data preview` writes through rich; none of these ends in a traceback."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "caf\u00e9", "response": "\u4e2d"}) + "\n")
    preview = f"{sys.executable} -m draftsmith data preview {rows} --target embedded"
    words = ["bash", "-c", f"{preview} {redirect}; exit ${{PIPESTATUS[0]}}"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    assert "Traceback" not in run.stderr
    assert "Exception ignored" not in run.stderr
    assert run.returncode == ENDS[redirect]
    assert ("caf\\xe9" in run.stdout) == (redirect == "| cat")
