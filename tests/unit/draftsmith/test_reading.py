"""YAML and untrusted JSON: plain values, or a ValueError; settings `key=value`; errors of one line."""

import json
import math

import pytest

from draftsmith.errors import ConfigError, one_line, reason_of
from draftsmith.reading import (
    DEEPEST,
    assignment,
    dump_yaml,
    parse_assignment,
    parse_json,
    parse_specification,
    parse_yaml,
    specified_name,
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 10_000, "recursion depth"),
        ("a: " + "1" * 5000, "integer string conversion"),
        ("!!binary aGk=", "a value of type bytes"),
        ("a: 2024-01-01", "a value of type date; expected text"),
        ("data: {a: 1}\nb: 2\n'data': {c: 3}", "key 'data' in line 1 and again in line 3"),
        ("- {a: 1, b: &x {c: 2, c: 3}}", "key 'c' in line 1 and again in line 1"),
        ('"\\ud800"', "unpaired surrogate"),
    ],
)
def test_yaml_that_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_yaml(text)


def test_yaml_that_is_read() -> None:
    """Numbers with an exponent are those of YAML 1.2 and JSON; text of this form is written in quotes."""
    merged = {1: "a", "1": "b", "c": {"d": 1}, "e": {"d": 2}}
    assert parse_yaml("1: a\n'1': b\nc: &c {d: 1}\ne: {d: 2, <<: *c}") == merged
    assert parse_yaml("[7, +1, 0x10, 1_000, .5, .inf, no, ~]") == [7, 1, 16, 1000, 0.5, math.inf, False, None]
    numbers = {"1e-6": 1e-6, "-1E5": -1e5, "+2e+3": 2e3, "1.e2": 100.0, ".5e1": 5.0, "1_0e0": 10.0}
    texts = ["1e", "e5", "1e5x", "12e4567", "1:2e3", "٣e٣"]
    assert parse_yaml(str([*numbers, *texts]).replace("'", "")) == [*numbers.values(), *texts]
    values = {"numbers": [*numbers.values(), 1e300], "texts": [*numbers, *texts, "x: #y", ""]}
    assert parse_yaml(dump_yaml(values)) == values


def test_json_is_plain_and_shallow() -> None:
    for text in ("[" * 100_000, '["\\ud800"]', "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "1" * 5000):
        with pytest.raises(ValueError, match=r"levels|unpaired surrogate|integer"):
            parse_json(text)
    assert parse_json('["\\ud83d\\ude00", {}]') == ["😀", {}]
    assert parse_json(json.dumps([[1]] * 100)) == [[1]] * 100


def test_errors_are_one_short_line() -> None:
    line = str(ConfigError.of("train.steps", "x" * 10**6, ">= 1"))
    assert len(f"ConfigError: {line}") <= 500
    assert line.startswith("train.steps='xxx")
    assert line.endswith("xxx'; expected >= 1")
    assert one_line("a\n b\tc") == "a b c"
    assert reason_of(ValueError("")) == "ValueError"
    assert reason_of(ValueError("a: b\nc")) == "a: b"
    assert reason_of(ValueError("for field x:\n    TypeError: y\n")) == "for field x: TypeError: y"


SETTINGS = {"tree": {"size": int, "factor": float, "siblings": str}, "chain": {"draft_length": int}}


def test_specifications() -> None:
    text = "tree:size=16,factor=0.5,siblings=a=b"
    assert parse_specification("policy", text, SETTINGS) == ("tree", {"size": 16, "factor": 0.5, "siblings": "a=b"})
    assert (specified_name(text), specified_name("chain")) == ("tree", "chain")
    settings = "'sise=1'; expected tree:KEY=VALUE with size, factor, siblings; did you mean size?"
    for text, why in {
        "forest:size=1": "policy='forest'; expected one of tree, chain",
        "tree:sise=1": f"policy=tree:sise=1: {settings}",
        "tree:size=a": "policy=tree:size=a: size='a'; expected a whole number",
    }.items():
        with pytest.raises(ConfigError) as error:
            parse_specification("policy", text, SETTINGS)
        assert str(error.value) == why


def test_assignments() -> None:
    entries = ("on=false", "a.b=[1, 2]", "file=a=b.jsonl", "text=[", "none=")
    assert dict(parse_assignment(f"--set {entry}", entry) for entry in entries) == {
        "on": False,
        "a.b": [1, 2],
        "file": "a=b.jsonl",
        "text": "[",
        "none": None,
    }
    for entry in ("x", "=1"):
        with pytest.raises(ConfigError, match=f"--set {entry}; expected key=value"):
            parse_assignment(f"--set {entry}", entry)


HASHES = ["prompts #1.jsonl", "#1", "a [b] # c", "[1] # c", "a#b"]
TEXTS = [*HASHES, "x: y/z", "no", "1e3", "1_000", "~", "- a", "'a'", "a\nb", "\\", "", 'é "ü" # ☃']


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_as_an_assignment(text: str) -> None:
    assert parse_assignment("", assignment("key", text)) == ("key", text)
    assert text not in HASHES or parse_assignment("", f"key={text}") == ("key", text), "values have no comments"
    assert assignment("key", "runs/é #1, [x]") == "key=runs/é #1, [x]", "quoted only where it is necessary"
