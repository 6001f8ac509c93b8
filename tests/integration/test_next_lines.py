"""Every command that a `next:` line suggests runs as it is printed, from the first run to the last suggestion."""

import shlex
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from commands import printed

from draftsmith.cli.quickstart import following
from draftsmith.train.recipe import load_recipe

CHEAP = {
    "eval": "--count 1 --max-new-tokens 4 --repeats 1 --temperature 0",
    "forecast": "--count 1 --policy chain:draft_length=1 --max-new-tokens 4 --max-draft-length 2 --temperature 0",
    "check": "--count 1 --tokens 500",
    "generate": "--max-new-tokens 4",
    "push": "--dry-run --licence mit",
}
"""Options that make a suggested command fast."""
RUN = ["data.count=8", "data.prompt_tokens=4", "data.response_tokens=4", "train.steps=1", "train.batch_size=4"]
RUN += ["evaluation.count=1", "evaluation.max_new_tokens=2", "teacher.kind=online"]


@pytest.mark.slow
def test_every_next_line_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "heldout.jsonl").write_text('{"prompt": "def add(a, b):"}\n')
    drafter = "hybrid:drafter=runs/a b/drafter"
    waiting = [["train", "quickstart/mtp", "output=runs/a b", *RUN], *following(drafter)]
    waiting += [["data", "preview", "heldout.jsonl", "--target", "embedded"]]
    waiting += [["memory", "quickstart/mtp", "--processes", "2", *extra] for extra in ([], ["--sharded"])]
    done: list[list[str]] = []
    while waiting:
        words = waiting.pop(0)
        if any(words[:3] == before[:3] for before in done if words[0] != "accelerate"):
            continue  # the same command for the same pair
        done.append(words)
        if words[0] == "accelerate":
            launched = launch_command_parser().parse_args(words[2:])
            assert launched.training_script == "draftsmith.train"
            assert launched.config_file is None or Path(launched.config_file).is_file()
            load_recipe(launched.training_script_args[0], launched.training_script_args[1:])
            continue
        code, out, err = printed(capfd, *words, *CHEAP.get(words[0], "").split())
        said = out + err
        assert code in (0, 3), f"{words}: {said}"  # 3: too few tokens for a verdict
        lines = [line.removeprefix("next: ") for line in said.splitlines() if line.startswith("next: ")]
        assert lines or words[0] in ("push", "check"), words
        waiting += [line[line[0] == "draftsmith" :] for line in map(shlex.split, lines)]
    assert {words[0] for words in done} == {*CHEAP, "train", "recipes", "memory", "data", "accelerate"}
    assert (tmp_path / "runs" / "a b" / "eval" / "eval.json").is_file()
    launches = [words for words in done if words[0] == "accelerate"]
    assert {words[words.index("--num_processes") + 1] for words in launches if "--num_processes" in words} == {"2"}
