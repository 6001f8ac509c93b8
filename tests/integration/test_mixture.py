"""Runs and commands on several sources of prompts with shares."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from commands import printed, run, write_rows
from conftest import LETTERS, mostly_slow
from run_results import as_if_killed, finished

from draftsmith.distill.data_section import DataSection, SourceSection, counts_of
from draftsmith.errors import ConfigError
from draftsmith.train import trainer
from draftsmith.train.launch import make_accelerator
from draftsmith.train.recipe import load_recipe
from draftsmith.train.run_folder import read_metrics
from draftsmith.train.step import batch_indices
from draftsmith.train.validation import validate

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}Q{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}aQ{% endif %}"
)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Three sources whose rows begin with their name: 40 prompts, 40 with answers, and 5 prompts."""
    made = {}
    for name, count in (("code", 40), ("maths", 40), ("talk", 5)):
        answer = {"response": f"R{name}"} if name == "maths" else {}
        texts = [name[0] + LETTERS[i % 26] + LETTERS[(7 * i + 3) % 26] + LETTERS[i // 26] for i in range(count)]
        made[name] = write_rows(tmp_path / f"{name}.jsonl", ({"prompt": text, **answer} for text in texts))
    return made


def mixture(files: dict[str, Path], *shares: float, key: str = "data.prompts", more: Any = ()) -> str:
    sources: list[dict[str, Any]] = [
        {"prompts": str(file), "share": share} for file, share in zip(files.values(), shares, strict=False)
    ]
    sources[1:2] = [{**source, "response": "text"} for source in sources[1:2]]
    return f"{key}={json.dumps([*sources, *more])}"


def by_size(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda file: -len(file.read_text().splitlines()))


def run_of(recipe_file: Path, place: Path, *overrides: str) -> trainer.TrainingRun:
    recipe = load_recipe(str(recipe_file), [*overrides, f"output={place}"])
    return trainer.TrainingRun(recipe, make_accelerator(recipe, place), place)


def starts(run: trainer.TrainingRun, rows: Any) -> list[str]:
    """Return the first letter of each row's text: its source."""
    return [run.target.tokenizer.decode(run.data.rows[row]["input_ids"])[0] for row in rows]


def test_shares_are_of_the_whole_count() -> None:
    def counts(count: int, *shares: float) -> list[int]:
        return counts_of([SourceSection(prompts="p", share=share) for share in shares], count)

    assert counts(10, 0.5, 0.3, 0.2) == counts(10, 5, 3, 2) == [5, 3, 2]
    assert counts(100, 1, 1, 1) == [33, 34, 33]
    assert counts(7, 0, 1) == [0, 7]
    off = DataSection(prompts=[SourceSection(prompts="a", share=0), SourceSection(prompts="b")], count=7)
    assert [(source.prompts, source.count) for source in off.sources] == [("b", 7)]
    assert counts(2**31 - 1, *[0.1] * 10)[-1] == pytest.approx(2**31 / 10, abs=1)
    for count in range(1, 40):
        assert sum(counts(count, 0.1, 0.7, 1e-9, 0.2)) == count


def test_every_batch_is_a_mixture(
    recipe_file: Path, tmp_path: Path, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = [mixture(files, 2, 1, 1), "data.count=40", "data.validation=4"]
    whole = run_of(recipe_file, tmp_path / "looked at", *mixed)
    said = " ".join(capsys.readouterr().err.split())
    assert f"{files['talk']}: 5 samples; its share asks for 10" in said, "the others keep their counts"
    data = whole.data
    assert Counter(starts(whole, range(data.trained))) == {"c": 16, "m": 8, "t": 3}
    assert Counter(starts(whole, range(data.trained, len(data.rows)))) == {"c": 2, "m": 1, "t": 1}
    assert Counter(prompt.source for prompt in data.heldout) == {0: 2, 1: 1, 2: 1}
    for source, numbers in {"code": (16, 2, 2), "maths": (8, 1, 1), "talk": (3, 1, 1)}.items():
        trained, held, validated = numbers
        about = said.partition(f"data: {files[source]}: ")[2].partition(" data: ")[0]
        assert about.startswith(f"{trained} samples, ")
        assert about.endswith(f"; {held} prompts held out; {validated} samples for validation")
    first_epoch = [starts(whole, batch_indices(0, step, 8, data.trained)) for step in range(data.trained // 8)]
    assert all(len(set(batch)) > 1 for batch in first_epoch)


def test_a_run_ends_with_its_numbers_by_source(
    recipe_file: Path, tmp_path: Path, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Alpha is that of a run which excludes the others' rows; a killed run ends with the same."""
    mixed = [mixture(files, 2, 1, 1), "data.count=40", "data.validation=4", "train.steps=6", "evaluation.count=8"]
    run = run_of(recipe_file, tmp_path / "run", *mixed)
    data, held = run.data, range(run.data.trained, len(run.data.rows))
    run.train()
    best = finished(tmp_path / "run")
    rows = {row["step"]: row for row in read_metrics(tmp_path / "run") if "evaluation" in row}
    row = rows[best["best_step"]]
    for number, (name, file) in enumerate(files.items()):
        own = best["by_source"][str(file)]
        spans = [data.rows[index]["spans"] for index in range(data.trained) if data.rows[index]["source"] == number]
        assert own["samples"] == len(spans) > 0
        assert own["trained_tokens"] == sum(end - start for of_row in spans for start, end in of_row)
        prompts = [place for place, prompt in enumerate(data.heldout) if prompt.source == number]
        tokens, rounds = (sum(row["evaluation"][key][place] for place in prompts) for key in ("tokens", "rounds"))
        assert own["prompts"] == len(prompts) > 0
        assert own["tau"] == row["evaluation"]["tau_by_source"][str(file)] == pytest.approx(tokens / rounds)
        others = [index for index in held if data.rows[index]["source"] != number]
        alone = run_of(recipe_file, tmp_path / name, *mixed, f"data.exclude_rows={others}")
        own = {"batch": alone.batch, "stopping": alone.stopping, "meet": alone.record.meet}
        validated = validate(alone.context, alone.engine.module, alone.data, 0, alone.last, **own)
        assert validated is not None
        assert "alpha_by_source" not in validated
        assert rows[0]["validation"]["alpha_by_source"][str(file)] == pytest.approx(validated["alpha"], rel=1e-5)
    said = capsys.readouterr().err
    table = said.partition(f"By source, step {best['best_step']}: ")[2]
    own = best["by_source"][str(files["code"])]
    assert f" {own['tau']:.2f} [{own['interval'][0]:.2f}, {own['interval'][1]:.2f}] │" in table
    assert f" {own['validation_alpha'][0]:.3f} │" in table
    as_if_killed(tmp_path / "run", 4)
    run_of(recipe_file, tmp_path / "run", *mixed).train()
    assert finished(tmp_path / "run")["by_source"] == best["by_source"]


def test_a_change_of_shares_samples_only_what_is_missing(
    recipe_file: Path, tmp_path: Path, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each source has the cache of a run on it alone."""

    def sampled(*overrides: str) -> list[str]:
        run_of(recipe_file, tmp_path / "run", *overrides, f"evaluation.prompts={files['talk']}")
        return [line for line in capsys.readouterr().err.splitlines() if "are new" in line]

    del files["maths"]
    alone = sampled(f"data.prompts={files['code']}", "data.count=10")
    assert alone == ["responses: 10 of 10 are new"]
    talk = [{"prompts": str(files["talk"])}]
    code = {"code": files["code"]}
    assert sampled(mixture(code, 2, more=talk), "data.count=15") == ["responses: 5 of 5 are new"]
    new = sampled(mixture(code, 6, more=talk), "data.count=14")
    assert new == ["responses: 2 of 12 are new", "responses: 0 of 2 are new"]
    assert sampled(f"data.prompts={files['code']}", "data.count=12") == []


def test_a_row_of_two_sources_is_trained_once_and_never_held_out_and_trained(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, letters in (("a", "abcdefgh"), ("b", "ghijklmn")):
        lines = [{"prompt": letter * 3, "response": f"R{letter if name == 'a' else 'x'}"} for letter in letters]
        lines[-1 if name == "a" else 0]["response"] = "same"  # of "hhh" in the first file, and of "ggg"
        write_rows(tmp_path / f"{name}.jsonl", lines)
    write_rows(tmp_path / "c.jsonl", [{"prompt": "hhh", "response": "same"}, {"prompt": "zzz", "response": "z"}])
    sources = [{"prompts": str(tmp_path / f"{name}.jsonl")} for name in "abc"]
    overrides = [f"data.prompts={json.dumps(sources)}", "data.response=text", "data.count=24", "evaluation.count=2"]
    run = run_of(recipe_file, tmp_path / "run", *overrides)
    assert f"{tmp_path / 'c.jsonl'}: 1 of 2 are in another source, too: left out" in capsys.readouterr().err
    held = {run.target.tokenizer.decode(prompt.input_ids) for prompt in run.data.heldout}
    trained = [run.target.tokenizer.decode(row["input_ids"])[:3] for row in run.data.rows]
    assert len(held) == 2
    assert not held & set(trained)
    del sources[0]
    (tmp_path / "b.jsonl").write_text((tmp_path / "c.jsonl").read_text())
    with pytest.raises(ConfigError, match=r"c\.jsonl: all rows are in other sources, too; expected other rows"):
        run_of(recipe_file, tmp_path / "again", f"data.prompts={json.dumps(sources)}", *overrides[1:])


def test_rows_of_equal_tokens_with_other_answers_are_no_twins(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, length in (("a", 3), ("b", 4)):
        texts = [letter * 3 + "same" for letter in "abcdefgh"]
        rows = ({"prompt": text[:length], "response": text[length:]} for text in texts)
        write_rows(tmp_path / f"{name}.jsonl", rows)
    sources = [{"prompts": str(tmp_path / f"{name}.jsonl")} for name in "ab"]
    overrides = [f"data.prompts={json.dumps(sources)}", "data.response=text", "data.count=16", "evaluation.count=2"]
    run = run_of(recipe_file, tmp_path / "run", *overrides)
    assert "another source" not in capsys.readouterr().err
    by_text: dict[tuple[int, ...], set[int]] = {}
    for row in run.data.rows:
        by_text.setdefault(tuple(row["input_ids"]), set()).add(row["spans"][0][0])
    assert any(len(starts) == 2 for starts in by_text.values()), "one text with two answers"


@pytest.mark.parametrize("other", mostly_slow(["talk", "embedded"], "talk"))
def test_the_target_may_be_a_source_and_the_evaluation_has_its_own(
    other: str, recipe_file: Path, tmp_path: Path, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    listed = [{"prompts": "self", "share": 2}, {"prompts": str(files.get(other, other))}]
    lines = ({"messages": [{"role": "user", "content": letter * 3, "weight": 0}]} for letter in "abcde")
    marked = write_rows(tmp_path / "marked.jsonl", lines)
    listed += [{"prompts": str(files["maths"])}, {"prompts": str(marked)}]
    overrides = [f"data.prompts={json.dumps(listed)}", f"data.chat_template={template}", "data.count=25"]
    held = mixture(
        {name: files[name] for name in ("code", "talk")},
        *(1, 3),
        key="evaluation.prompts",
        more=[{"prompts": "self", "share": 2}],
    )
    more = ["data.prompt_tokens=40", "data.train_on=all", "evaluation.count=12", "train.steps=2"]
    folder = trainer.train(load_recipe(str(recipe_file), [*overrides, held, *more]))
    assert (folder / "config.json").is_file()
    said = capsys.readouterr().err
    assert f"evaluation: {files['code']}: 2 prompts; its share asks for 2" in said
    assert f"evaluation: {files['talk']}: 5 prompts; its share asks for 6" in said
    assert "evaluation: self: 4 prompts; its share asks for 4" in said
    trained, held_out = (set(file.read_text().splitlines()) for file in by_size(tmp_path / "cache" / "self-prompts"))
    assert not trained & held_out, "they have another seed"
    numbers = finished(folder.parent)["by_source"]
    assert {label: tuple(own.get(key) for key in ("samples", "prompts")) for label, own in numbers.items()} == {
        "self": (10, 4),
        str(files.get(other, other)): (5, 5 if other == "talk" else None),
        str(files["maths"]): (5, None),
        str(marked): (5, None),
        str(files["code"]): (None, 2),
        **({} if other == "talk" else {str(files["talk"]): (None, 5)}),
    }
    assert [count for _, count in re.findall(r"data: (\S+): (\d+) samples", said)] == ["10", "5", "5", "5"]
    tokens, trained = re.findall(rf"data: {marked}: 5 samples, (\d+) tokens, (\d+) of them trained", said)[0]
    assert int(tokens) - int(trained) == 5 * len("uQaaa.")


def test_commands_take_the_list(files: dict[str, Path], tmp_path: Path, recipe_file: Path, capsys: Any) -> None:
    target = load_recipe(str(recipe_file)).target.model
    listed = mixture(files, 1, 1, 1).partition("=")[2]
    assert run("data", "preview", listed, "--target", target, "--count", 9, "--show", 3) == 0
    said = capsys.readouterr()
    assert [line[0] for line in said.out.splitlines()[1::2][:3]] == ["c", "m", "t"]
    assert "⟦Rmaths<eos>⟧" in said.out
    assert [line.split()[1::2][:2] for line in said.out.splitlines() if " all " in line] == [["all", "9"]]
    suggested = said.err.partition("next: ")[2].partition("'data.prompts=")[2].partition("'")[0]
    assert [source["response"] for source in json.loads(suggested)] == ["target", "text", "target"]
    out = tmp_path / "out.jsonl"
    assert run("data", "regenerate", listed, "--target", target, "--count", 9, "--max-tokens", 4, "--out", out) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["prompt"][0] for line in lines] == list("cmt" * 3)
    assert "Rmaths" not in out.read_text(), "the target answers all prompts"


def test_commands_take_prompts_of_the_target(tmp_path: Path, recipe_file: Path, capsys: Any) -> None:
    template, out = tmp_path / "template.jinja", tmp_path / "out.jsonl"
    template.write_text(TEMPLATE)
    words = ["--target", load_recipe(str(recipe_file)).target.model, "--chat-template", template, "--prompt-tokens", 40]
    assert run("data", "preview", "self", *words, "--show", 2) == 0
    said = capsys.readouterr()
    shown = said.out.splitlines()[1:4:2]
    assert "data.prompts=self data.response=target" in said.err
    assert run("data", "regenerate", "self", *words, "--count", 5, "--max-tokens", 4, "--out", out) == 0
    asked, answers = zip(*(json.loads(line)["messages"] for line in out.read_text().splitlines()), strict=True)
    assert len(asked) == 5
    assert {message["role"] for message in answers} == {"assistant"}
    assert shown == [f"uQ{message['content']}<eos>aQ" for message in asked[:2]], "the first ones: its seed is the same"
    capsys.readouterr()
    again = ("regenerate", "self", "--out", tmp_path / "b.jsonl")
    for message, command in {
        "prompts=self with response=text; expected target": ("preview", "[{prompts: self, response: text}]"),
        "prompts=self without --count; expected the number": again,
        "prompts=self with --server; expected a file": (*again, "--server", "http://localhost:1", "--model", "m"),
    }.items():
        code, _, error = printed(capsys, "data", *command, *words)
        assert (code, message in error) == (2, True)


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ("[]", "prompts=[]; expected at least one source, and shares that sum to more than 0"),
        ("[{prompts: CODE, share: 0}]", "share': 0}]; expected at least one source, and shares that sum to more"),
        ("[{prompts: CODE}, {prompts: CODE, share: -1}]", "prompts.1.share=-1; expected >= 0"),
        ("[{prompts: CODE, respons: text}]", "unknown key prompts.0.respons='text'; "),
        ("[CODE]", "; expected a section with keys"),
        ("[{prompts: CODE}, {prompts: ./none.jsonl}]", "prompts=./none.jsonl; expected a file or a folder"),
        ("[{prompts: CODE}, {prompts: EMPTY}]", "empty.jsonl is empty; expected at least one row"),
        ("[{prompts: CODE", "is not YAML"),
    ],
    ids=["empty", "zero", "negative", "unknown key", "no section", "missing file", "no rows", "no YAML"],
)
def test_bad_sources_are_refused_in_one_line(
    listed: str, message: str, files: dict[str, Path], recipe_file: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    listed = listed.replace("CODE", str(files["code"])).replace("EMPTY", str(tmp_path / "empty.jsonl"))
    for key in ("data.prompts=", "evaluation.prompts=", ""):
        options = ["train", recipe_file] if key else ["data", "preview", "--target", recipe_file.parent / "tiny-target"]
        code, _, error = printed(capsys, *options, f"{key}{listed}")
        assert (code, error.count("\n")) == (2, 1)
        if message != "is not YAML" or not key:  # text that is no YAML names a file
            assert message in error.replace("data.prompts", "prompts").replace("evaluation.prompts", "prompts")


@pytest.mark.parametrize(
    ("listed", "changes", "message"),
    [
        ([{"prompts": "self", "response": "text"}, {"prompts": "embedded"}], [], "data.prompts='self' with response='"),
        ([{"prompts": "embedded"}], ["data.subset=x"], "subset=x with a list of prompts; expected it in each source"),
        ([{"prompts": "embedded", "response": "text"}], ["data.responses=2"], "data.responses=2 with response='text'"),
        (
            [{"prompts": "embedded"}],
            ["evaluation.prompts=[{prompts: embedded, kind: code}]"],
            "kind=code with prompts=embedded; expected it with prompts='self' only",
        ),
    ],
)
def test_keys_that_exclude_a_list_or_a_source(
    listed: list[dict[str, str]], changes: list[str], message: str, recipe_file: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        load_recipe(str(recipe_file), [f"data.prompts={json.dumps(listed)}", *changes]).require_paths()
    assert message in str(error.value)
