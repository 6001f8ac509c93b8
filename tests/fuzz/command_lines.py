"""Command lines of every command, with options and values that anyone may write."""

from hypothesis import strategies as st

from fuzz.damage import HUGE, NUMBERS, TEXTS, argument
from fuzz.material import Material
from fuzz.running import Case

VALUES = [
    "0",
    "1",
    "2",
    "-1",
    "0.5",
    "1e-300",
    "suffix",
    "prompt-lookup:max_ngram=0",
    "early-exit:layers=9",
    "suffix:",
    "hybrid:",
]
VALUES += [
    "suffix:min_match=-1",
    "chain",
    "best-first:size=0",
    "tree:x",
    "confidence:threshold=nan",
    "block",
    "token",
    "float16",
]
VALUES += [
    "embedded",
    ".",
    "/",
    "/dev/null",
    "a=b",
    "early-exit:layers=1",
    "suffix:datastore=/dev/null",
    "vllm",
    "mit",
    "user/x",
]
SAMPLING = ["--temperature", "--top-k", "--top-p", "--seed", "--dtype", "--attn-implementation", "--rule", "--policy"]
SAMPLING += ["--gamma"]
COMPILE = "--compile"


def _command_lines(material: Material) -> list[tuple[list[str], list[str], list[str]]]:
    """(command, what makes it valid, options that it knows)."""
    target, prompts = ["--target", material.target], str(material.root / "prompts.jsonl")
    short = ["--prompts", prompts, "--count", "1", "--max-new-tokens", "2"]
    templated = ["--chat-template", "--template-option", "--subset", "--split"]
    read = ["--prompt-tokens", "--response-tokens", "--count", *templated]
    evaluated = ["--out", "out", "--repeats", "1", *short]
    drafted = [*target, "--drafter", "suffix"]
    more = ["--drafter", "--prompts", "--count", "--out", *templated, *SAMPLING]
    return [
        (
            ["eval"],
            [*drafted, *evaluated, "--temperature", "0"],
            [*more, "--batch-size", "--repeats", "--max-new-tokens", COMPILE],
        ),
        (["eval", "compare"], [str(material.root / "measured" / "a")], ["--help", "x", "."]),
        (["check"], [*drafted, "--prompts", prompts, "--count", "1", "--tokens", "500"], [*more, "--tokens", COMPILE]),
        (
            ["forecast"],
            [*drafted, *short, "--out", "out", "--temperature", "0"],
            [*more, "--max-draft-length", "--profile"],
        ),
        (
            ["generate"],
            ["abc", *target, "--max-new-tokens", "3"],
            ["--drafter", "--stop", "--max-new-tokens", *SAMPLING, COMPILE],
        ),
        (["data", "preview"], [prompts, *target], [*read, "--show", "--response"]),
        (
            ["data", "regenerate"],
            [prompts, *target, "--out", "out/x", "--response-tokens", "3"],
            [*read, *SAMPLING[:4]],
        ),
        (
            ["data", "prepare"],
            [str(material.root / "medusa.yaml"), "output=out"],
            ["train.seed=1", "data.count=3", "--help"],
        ),
        (
            ["export"],
            [material.drafter("medusa"), *target, "--out", "out"],
            ["--format", "--dtype", "--revision", "--out"],
        ),
        (["import"], [material.drafter("medusa"), *target, "--out", "out"], ["--gamma", "--revision", "--out"]),
        (["push"], [material.drafter(), "user/name", "--dry-run", "--out", "out"], PUSHED),
        (["memory"], [str(material.root / "eagle3.yaml")], ["--processes", "--on", "--sharded", "train.batch_size=3"]),
        (["recipes"], [], ["eagle3/embedded", "--help", "x"]),
        ([], [], ["--version", "--help", "quickstart", "eval", "data"]),
    ]


PUSHED = ["--eval", "--as", "--licence", "--base-model", "--revision", "--message", "--out", "--private"]


@st.composite
def command_cases(draw: st.DrawFn, material: Material) -> Case:
    command, valid, others = draw(st.sampled_from(_command_lines(material)))
    words = [*valid, COMPILE] if COMPILE in others and draw(st.booleans()) else [*valid]
    for _ in range(draw(st.integers(1, 2))):
        option = draw(st.one_of(st.sampled_from(others), st.sampled_from(others), TEXTS))
        value = draw(st.one_of(NUMBERS.map(str), TEXTS, st.sampled_from(VALUES), st.sampled_from(HUGE).map(str)))
        words += [option] if draw(st.integers(0, 9)) == 0 else [option, value]
    if draw(st.integers(0, 5)) == 0 and words:
        place = draw(st.integers(0, len(words) - 1))
        words[place : place + 1] = draw(st.sampled_from([[], [draw(TEXTS)], [words[place], words[place]]]))
    return Case("command", [*command, *map(argument, words)], {})
