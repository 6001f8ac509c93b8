"""The two reports: complete, escaped, and without anything from outside."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from unit.eval.made import evaluation, row

from draftsmith.errors import ConfigError
from draftsmith.eval.plots import evaluation_plots
from draftsmith.eval.report import verdict, write_report
from draftsmith.eval.results import read_evaluation

VOID = {"meta", "img", "br", "link"}
NASTY = "<script>alert('x')</script> & \"q\""


class Page(HTMLParser):
    """Checks nesting; collects what refers to something, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.references += [value for key, value in attributes if key in ("src", "href", "action", "srcset", "data")]
        assert not any(key.startswith("on") for key, _ in attributes)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


SAMPLE = {
    "prompt": "81",
    "category": "qa",
    "question": NASTY,
    "drafter": "d",
    "policy": "chain:draft_length=2",
    "temperature": 0.0,
    "tau": 2.0,
    "cut": True,
    "rounds": [[["a", "target"]], [["b\n", "accepted"], [NASTY, "corrected"]], [["\tc\x00", "bonus"]]],
}


GRIDS = {key: [[1.0]] for key in ("tokens", "rounds", "seconds", "overlap", "overlaps")}
SERIES = {"drafter": "d", "policy": "p", "temperature": 0.0, "batch_size": 1, "units": [["a"]], **GRIDS}


def test_html_stands_by_itself_and_shows_text_as_text(tmp_path: Path) -> None:
    rows = [row(drafter=NASTY), row(drafter=NASTY, category="qa"), row(drafter="e", temperature=1.0, lossless=False)]
    rows[0]["by_context"] = [
        {"start": 0, "end": 128, "rounds": 70, "tau": 2.75, "accepted": 0.875},
        {"start": 128, "end": 256, "rounds": 60, "tau": 1.25, "accepted": 0.125},
    ]
    found = evaluation(rows, samples=[SAMPLE], guards=[{"guard": "dtype", "message": NASTY}], notes=[NASTY])
    write_report(found, tmp_path, title=NASTY)
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert not {"script", "link", "iframe", "object", "embed"} & set(page.tags)
    assert page.references
    assert all(value.startswith("data:image/png;base64,") for value in page.references)
    assert "http" not in re.sub(r"base64,[^\"]*", "", text)
    assert "url(" not in text
    assert "@import" not in text
    assert page.text.count(NASTY) >= 6, "title, drafter, guard, note, prompt and token"
    assert "prefers-color-scheme: dark" in text
    assert '<span class="corrected"' in text
    assert '<span class="bonus"' in text
    assert "b⏎\n" in page.text
    assert "→\tc\\u0000" in page.text
    assert not re.search(r"(?<!\\)<script", (tmp_path / "report.md").read_text())
    for report in (text, (tmp_path / "report.md").read_text()):
        assert "Something is wrong" in report
        assert "(LOSSY)" in report
        assert "[1.40, 1.60]" in report
        assert "By context length" in report
        assert "128 to 255" in report
        assert "2.75" in report


SLOW = {"speedup": 0.8, "speedup_interval": [0.7, 0.9]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "Fastest at T=0: d (chain:draft_length=2) makes the target 1.50 times as fast (100 to 150 tokens/s)"),
        ({"speedup_interval": None}, "Fastest at T=0: d "),
        (
            {"speedup": 1.1, "speedup_interval": [0.9, 1.3], "verify_share": 0.5},
            "No drafter is measurably faster than the target alone at T=0: d (chain:draft_length=2) is 1.10x. A round "
            "commits 2.40 tokens and takes as long as 2.18 passes of the target alone: 0.65 to draft, 1.09 to verify, ",
        ),
        (
            SLOW,
            "3.00 passes of the target alone: 0.90 to draft, 1.80 to verify, 0.30 for the rest. Verifying a draft is",
        ),
        (
            SLOW | {"draft_share": 0.8, "verify_share": 0.1},
            "Drafting takes 80% of a round. A chain of γ=1 would be about 1.00x.",
        ),
        (SLOW | {"tau": 1.1, "alpha": 0.06}, "Few draft tokens are accepted (alpha 0.06)."),
        (SLOW | {"batch_size": 4}, "at T=0, batch 4: d (chain:draft_length=2) is 0.80x."),
        (SLOW | {"tau": 0.0, "speedup": 0.0}, "Nothing was decoded after the first token."),
    ],
)
def test_the_verdict_says_whether_it_pays_and_why_not(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    """γ=1 of the drafter that takes 2.4 of 3 passes to draft two tokens: 1.8 tokens in 0.6 + 2.4 / 2 passes."""
    rows = [row(**changes), row(category="qa", speedup=9.0)]
    (line,) = verdict(rows)
    assert said in line
    if not changes:
        write_report(evaluation(rows), tmp_path, title="t")
        assert said in Page((tmp_path / "report.html").read_text()).text


def test_each_temperature_and_batch_size_has_its_fastest_drafter() -> None:
    rows = [
        row(drafter="chain", speedup=2.0),
        row(drafter="tree", speedup=2.5),
        row(drafter="chain", temperature=1.0, speedup=1.6),
        row(drafter="tree", temperature=1.0, speedup=1.4),
        row(drafter="tree", batch_size=4, **SLOW),
    ]
    greedy, sampled, batch = verdict(rows)
    assert greedy.startswith("Fastest at T=0: tree ")
    assert sampled.startswith("Fastest at T=1: chain ")
    assert batch.startswith("No drafter is faster than the target alone at T=0, batch 4: tree ")


def test_a_report_without_the_rest(tmp_path: Path) -> None:
    lone = row(speedup_interval=None, tau_interval=None, alpha_interval=None, draft_length=None, acceptance_at=[])
    del lone["greedy_identical"]
    write_report(evaluation([lone], plain=None), tmp_path, title="t")
    assert "Something is wrong" not in Page((tmp_path / "report.html").read_text()).text
    assert read_evaluation(tmp_path)["rows"][0]["speedup_interval"] is None


def test_positions_that_few_rounds_tested_are_in_the_file_alone(tmp_path: Path) -> None:
    """A hybrid's longest copies are so rare that their acceptance is 0 or 1."""
    rows = [row(acceptance_at=[0.8, 0.7, 1.0, 0.0], tested_at=[90, 10, 9, 12])]
    write_report(evaluation(rows), tmp_path, title="t")
    table = (tmp_path / "report.md").read_text().split("given that all before it were accepted.")[1]
    assert table.startswith(" The first 2 positions, as far as 10 rounds tested them; eval.json has all.")
    assert next(line for line in table.split("\n") if line.startswith("| d |")).endswith("| 0.80 | 0.70 |")
    assert read_evaluation(tmp_path)["rows"][0]["tested_at"] == [90, 10, 9, 12]
    (plot,) = (plot for plot in evaluation_plots(rows) if plot.name == "acceptance")
    assert list(plot.figure.axes[0].lines[0].get_ydata()) == [0.8, 0.7]
    assert 0 < plot.figure.axes[0].get_xlim()[0] <= 1, "there is no position 0"
    write_report(evaluation([row(acceptance_at=[0.5] * 20)]), tmp_path, title="t")
    text = (tmp_path / "report.md").read_text()
    assert "The first 16 positions, as far as 10 rounds tested them; eval.json has all." in text
    assert "| 16 |" in text
    assert "| 17 |" not in text


def test_each_axis_of_the_measurement_has_its_plot() -> None:
    def names(*rows: dict) -> list[str]:
        return [plot.name for plot in evaluation_plots(list(rows))]

    base = ["speedup", "acceptance"]
    assert names(row()) == base
    longer = row(draft_length=4, policy="chain:draft_length=4")
    assert names(row(), longer, row(temperature=1.0)) == [*base, "over_draft_length"]
    assert names(row(), row(batch_size=4)) == [*base, "over_batch_size"]
    many = [row(drafter=f"d{n}", policy=f"best-first:size={n}", draft_length=None) for n in range(30)]
    assert "24 fastest of 30" in evaluation_plots(many)[0].title


def test_lines_of_single_points_are_not_drawn(tmp_path: Path) -> None:
    """Two drafters with one draft length each differ in γ, but no line has two points; likewise a draft of one."""
    rows = [row(acceptance_at=[0.8]), row(acceptance_at=[0.8], drafter="e", draft_length=4)]
    step = {"step": 1, "loss": 2.0, "alpha": [0.5], "seconds_by_part": {"teacher": 0.1875, "backward": 0.0625}}
    write_report(evaluation(rows), tmp_path, title="t", runs={"d": [step]})
    assert {path.name for path in tmp_path.glob("*.png")} == {"speedup.png"}
    for report in ("report.md", "report.html"):
        assert "draft position, given that all before it" not in (tmp_path / report).read_text()
    steps = [
        step,
        *({"step": 10 * n, "evaluation": {"tau": 2.0, "tokens": [4, 4], "rounds": [2, 2]}} for n in range(6)),
    ]
    write_report(
        evaluation([*rows, row(draft_length=4)]), tmp_path, title="t", runs={"d": [*steps, {**step, "step": 2}]}
    )
    assert {"acceptance.png", "training.png", "over_draft_length.png"} < {path.name for path in tmp_path.iterdir()}
    text = (tmp_path / "report.md").read_text().replace("\\", "")  # Markdown's escapes
    assert "](over_draft_length.png)" in text


GRIDS = ("tokens", "rounds", "seconds", "overlap", "overlaps")


def _changed(*keys: Any, to: object) -> str:
    """The content of an `eval.json` with another value in one place."""
    whole = place = json.loads(json.dumps(evaluation().as_json(), default=str))
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = to
    return json.dumps(whole)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"expected an eval\.json or the folder of one, and there is none"),
        ("{", "is not JSON"),
        (_changed("schema", to=1), r"eval\.json: schema=1; expected 2"),
        (_changed("online", to={"drafter": "d"}), "a drafter that learned while it decoded; expected"),
        (
            _changed("rows", 0, "alpha", to="x"),
            r"eval\.json: rows\.0\.alpha='x' .*expected what `draftsmith eval`",
        ),
        (_changed("measurements", to=[{**SERIES, "tokens": [[1.0], [1.0]]}]), "as many rows as units"),
        (
            _changed("measurements", to=[{**SERIES, **{key: [[]] for key in GRIDS}}]),
            "as many rows as units, all equally long",
        ),
        (_changed("measurements", to=[SERIES | {"seconds": [[float("inf")]]}]), "seconds.0.0=inf"),
    ],
)
def test_what_is_no_evaluation_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "eval.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_evaluation(tmp_path)
