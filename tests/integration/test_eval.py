"""`draftsmith eval` and `generate` on tiny models: every file it writes, and every refusal that needs a model."""

import json
import os
import signal
import time
from itertools import product
from pathlib import Path

import pytest
from commands import run, write_prompts, write_rows
from conftest import make_t5, mostly_slow
from forked import Processes, Server
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from draftsmith.decode.passes import graphs
from draftsmith.eval.journal import Cell, Journal, checked


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"prompt": "abcd"}, {"turns": ["hello", "again"], "category": "chat", "question_id": 81}, {"prompt": "xyz"}]
    return write_rows(tmp_path / "prompts.jsonl", rows)


STAGES = [
    "loading the target and the drafters",
    "choosing the number of threads",
    "timing the passes of each drafter",
    "warming up",
    "measuring",
    "comparing the target alone with transformers' generate",
    "computing the numbers and their intervals",
    "drawing and writing the report",
]


def test_a_whole_evaluation(
    tmp_path: Path, tiny_target_folder: Path, medusa_folder: Path, prompts: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out"
    target = tiny_target_folder
    call = ["eval", "--target", target, "--drafter", medusa_folder, "--drafter", f"self={target}"]
    call += ["--prompts", prompts, "--chat-template", "plain", "--max-new-tokens", 20, "--repeats", 2, "--out", out]
    assert run(*call) == 0
    written = json.loads((out / "eval.json").read_text())
    assert written["schema"] == 2
    assert set(written["environment"]) >= {"cpu", "torch_threads", "versions", "command"}
    rows = written["rows"]
    assert {(row["drafter"], row["temperature"], row["category"]) for row in rows} == set(
        product(("medusa", "self"), (0.0, 1.0), ("all", "chat", "uncategorised"))
    )
    assert {row["prompts"] for row in rows if row["category"] == "all"} == {3}
    for row in rows:
        assert row["draft_share"] + row["verify_share"] + row["overhead_share"] == pytest.approx(1)
        assert 0 <= row["alpha"] <= 1
        assert 1 <= row["tau"] <= int(row["policy"].removeprefix("chain:draft_length=")) + 1
        if row["temperature"] == 0:
            assert row["greedy_identical"][0] == row["greedy_identical"][1] > 0
    own = next(row for row in rows if row["drafter"] == "self" and row["temperature"] == 0)
    assert own["alpha"] == 1.0, "a target that drafts for itself is always accepted"
    report = (out / "report.md").read_text()
    assert "| medusa | chain:draft_length=2 | greedy | 0 | 1 |" in report
    for plot in ("speedup.png", "acceptance.png"):
        assert f"({plot})" in report
        assert (out / plot).read_bytes().startswith(b"\x89PNG")

    assert "Origin of each token" in (out / "report.html").read_text()
    size = sum(value.numel() for value in load_file(medusa_folder / "model.safetensors").values())
    assert written["parameters"]["medusa"] == size
    assert f"- medusa: {size:,} parameters." in report
    assert "times" in report.split("| the target alone | ")[1].split(" as fast as transformers' generate")[0]

    cells = (out / "cells.jsonl").read_bytes()
    assert run(*call) == 0, "the same command continues, here with nothing left to do"
    assert (out / "cells.jsonl").read_bytes().startswith(cells)
    assert b'"cell"' not in (out / "cells.jsonl").read_bytes()[len(cells) :]
    assert json.loads((out / "eval.json").read_text())["rows"] == rows

    shown, said = capsys.readouterr()
    prepared = f"next: draftsmith push {medusa_folder} USER/NAME --eval {out}"
    assert shown.splitlines()[-1] == prepared
    assert f"next: draftsmith forecast --target {tiny_target_folder} --drafter {medusa_folder}" in shown
    assert run(*call, "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"] == rows
    assert list(filter(said.__contains__, STAGES)) == STAGES
    assert sorted(STAGES, key=said.index) == STAGES
    assert run("eval", "compare", out) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "medusa (γ=2) and self (γ=4)" in shown or "faster than" in shown
    assert "a real difference" in shown, "tau near 5 beside tau near 1"
    assert shown.count("note: Measured on 3 prompts: differences of a few percent mean little") == 1
    overall = [row for row in rows if row["category"] == "all"]
    fastest = max(overall, key=lambda row: row["speedup"])["drafter"]
    folder = written["settings"]["drafters"][fastest]
    assert shown.endswith(f"next: draftsmith push {folder} USER/NAME --eval {out} --as {fastest}")
    assert run("eval", "compare", out, out / "eval.json") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "no difference in speed between A's self (γ=4) and B's self (γ=4)" in shown
    assert run(*call[:5], *call[7:], "--count", 1) == 2
    assert "expected another folder, or --overwrite" in " ".join(capsys.readouterr().err.split())
    assert run(*call[:5], *call[7:], "--count", 1, "--overwrite") == 0
    assert {row["drafter"] for row in json.loads((out / "eval.json").read_text())["rows"]} == {"medusa"}
    assert run("eval", "compare", out, tmp_path / "nothing") == 2
    assert "expected an eval.json" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("pictures_of_a_pixel")
def test_compiled_and_invariant_variants(
    tmp_path: Path, tiny_target_folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts are those of other passes, and no pass is compiled during a measurement that counts."""
    monkeypatch.setitem(graphs.OPTIONS, "cpu", {"backend": "eager"})  # traced, without minutes of compilation
    call = ["eval", "--target", tiny_target_folder, "--drafter", "early-exit:layers=1", "--prompts", prompts]
    call += ["--chat-template", "plain", "--max-new-tokens", 6, "--repeats", 1, "--temperature", 0, "--gamma", 2]
    built: list[int] = []
    add = Journal.add

    def counting(journal: Journal, cell: Cell) -> None:
        built.append(graphs.built_graphs())
        add(journal, cell)

    monkeypatch.setattr(Journal, "add", counting)
    for name, options in (("compiled", ["--compile"]), ("eager", []), ("invariant", ["--invariant"])):
        assert run(*call, *options, "--out", tmp_path / name) == 0
    assert built[0] > 0
    assert set(built) == {built[0]}, "warm-up compiles every pass of these texts"
    eager = _texts(tmp_path / "eager" / "cells.jsonl")
    assert all(_texts(tmp_path / name / "cells.jsonl") == eager for name in ("compiled", "invariant"))
    for name, words in (
        ("compiled", "compiled with torch.compile, with and without a drafter"),
        ("eager", "not compiled"),
        ("invariant", "of one shape (invariant), with and without a drafter"),
    ):
        assert json.loads((tmp_path / name / "eval.json").read_text())["settings"]["compile"] == (name == "compiled")
        assert all(words in (tmp_path / name / file).read_text() for file in ("report.md", "report.html"))


def _texts(file: Path) -> dict[tuple, list[list[int]]]:
    """The tokens of every cell; each may be there only once."""
    found: dict[tuple, list[list[int]]] = {}
    for line in map(json.loads, file.read_text().splitlines()):
        if "cell" in line:
            cell = checked(Cell, line["cell"], file)
            assert cell.key not in found
            found[cell.key] = [text.tokens for text in cell.texts]
    return found


@pytest.mark.usefixtures("pictures_of_a_pixel")
def test_a_killed_run_continues_and_ends_as_if_nothing_had_been(
    tmp_path: Path, tiny_target_folder: Path, prompts: Path, run_server: Server
) -> None:
    """SIGKILL while cells are being written, and a torn line on top of it."""
    call = ["eval", "--target", tiny_target_folder, "--drafter", "early-exit:layers=1", "--prompts", prompts]
    call += ["--chat-template", "plain", "--max-new-tokens", 12, "--repeats", 2, "--batch-size", 2, "--gamma", 2]
    out, whole = tmp_path / "killed", tmp_path / "whole"
    journal = out / "cells.jsonl"
    processes, log = Processes(run_server, {}), tmp_path / "killed.log"
    (pid,) = processes.start([*map(str, call), "--out", str(out)], log, 1, {}, program="draftsmith")
    deadline = time.monotonic() + 100
    while not (journal.exists() and journal.read_bytes().count(b'{"cell"') >= 3):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    assert processes.wait([pid]) == [-signal.SIGKILL], log.read_text()
    assert not (out / "eval.json").exists()
    data = journal.read_bytes()
    kept = data[: data.rfind(b"\n") + 1]
    before = _texts(journal) if kept == data else {}
    with journal.open("ab") as file:
        file.write(b'{"cell": {"drafter": "early')
    assert run(*call, "--seed", 5, "--out", out) == 2, "other settings are another run"
    assert run(*call, "--out", out) == 0
    assert journal.read_bytes().startswith(kept)
    assert run(*call, "--out", whole) == 0
    resumed, expected = _texts(journal), _texts(whole / "cells.jsonl")
    assert resumed == expected
    assert before.items() <= resumed.items()
    assert len(before) < len(resumed)
    rows = [json.loads((folder / "eval.json").read_text())["rows"] for folder in (out, whole)]
    for key in ("tau", "tau_interval", "acceptance_at", "decode_tokens"):
        assert [row[key] for row in rows[0]] == [row[key] for row in rows[1]]
    # Passes are padded to widths that were measured anew, so that overlaps differ by the rounding of float32.
    assert [row["alpha"] for row in rows[0]] == pytest.approx([row["alpha"] for row in rows[1]], abs=1e-6)
    assert any("2 sittings" in note for note in json.loads((out / "eval.json").read_text())["notes"])


def test_generate_prints_the_targets_text(
    tiny_target_folder: Path, medusa_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    call = ["generate", "abc", "--target", tiny_target_folder, "--max-new-tokens", 20]
    assert run(*call) == 0
    alone = capsys.readouterr()
    assert run(*call, "--drafter", medusa_folder) == 0
    drafted = capsys.readouterr()
    assert alone.out == drafted.out
    assert "\x1b[" not in drafted.out, "plain text where there is no terminal"
    model, tokenizer = (kind.from_pretrained(tiny_target_folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer("abc", return_tensors="pt")
    expected = model.generate(**ids, max_new_tokens=20, do_sample=False)
    assert alone.out.strip("\n") == tokenizer.decode(expected[0], skip_special_tokens=True)
    assert "tau" in drafted.err
    expected_command = f"next: draftsmith eval --target {tiny_target_folder} --drafter {medusa_folder}"
    assert drafted.err.splitlines()[-1] == expected_command
    for plan in (["--policy", "best-first:size=4,depth=2"], ["--policy", "adaptive", "--rule", "block"]):
        assert run(*call, "--drafter", medusa_folder, *plan) == 0
        assert capsys.readouterr().out == alone.out
    stop = alone.out.strip("\n")[6:8]
    assert run(*call, "--drafter", medusa_folder, "--stop", stop) == 0
    cut = capsys.readouterr()
    assert cut.out.strip("\n") == alone.out[: alone.out.index(stop, 4) + 2].strip("\n")
    assert "stopped by criteria" in cut.err


@pytest.mark.parametrize("twins", mostly_slow([True, False], True))
def test_a_greedy_text_that_differs_is_explained(
    twins: bool, tmp_path: Path, tiny_target_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    """In the journal a token becomes one with the same logits, or with others."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder)
    if twins:
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            weight_VH = model.state_dict()[name]
            weight_VH[1::2] = weight_VH[0::2].clone()
    model.save_pretrained(tiny_target_folder)
    prompts, out = write_prompts(tmp_path / "prompts.jsonl", "abcabcabc", "hello"), tmp_path / "out"
    call = ["eval", "--target", tiny_target_folder, "--drafter", "suffix", "--prompts", prompts, "--repeats", 1]
    call += ["--max-new-tokens", 12, "--temperature", 0, "--out", out]
    assert run(*call) == 0
    journal = out / "cells.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    text = next(line["cell"]["texts"][0] for line in lines if line.get("cell", {}).get("drafter") == "suffix")
    text["tokens"][7] ^= 1 if twins else 2
    write_rows(journal, lines)
    capsys.readouterr()
    assert run(*call) == 0
    kind = "near tie" if twins else "bug"
    shown = " ".join(capsys.readouterr().out.split())
    assert f"1 of 2 greedy texts differ from the target's own, first by a {kind} at token 7 of question" in shown
    report = (out / "report.md").read_text()
    assert f"first by a {kind} at token 7" in report
    row = json.loads((out / "eval.json").read_text())["rows"][0]
    assert row["first_divergence"] == {"prompt": text["prompt"], "position": 7, "kind": kind}


@pytest.mark.slow
@pytest.mark.usefixtures("pictures_of_a_pixel")
def test_an_encoder_decoder_pair_is_measured(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    for name, layers in {"target": 2, "draft": 1}.items():
        make_t5(layers).save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
    prompts = write_prompts(tmp_path / "prompts.jsonl", "abcabcabc", "hello")
    out = tmp_path / "report"
    options = ["--prompts", str(prompts), "--repeats", "1", "--max-new-tokens", "12", "--out", str(out)]
    drafters = ["--drafter", str(tmp_path / "draft"), "--drafter", "suffix:min_match=1"]
    plans = ["--policy", "best-first:size=6,depth=3", "--policy", "adaptive"]
    assert run("eval", "--target", tmp_path / "target", *drafters, *plans, *options) == 0
    rows = json.loads((out / "eval.json").read_text())["rows"]
    arms = {(row["drafter"], row["policy"]) for row in rows}
    of_draft = {("draft", policy) for policy in ("best-first:size=6,depth=3", "adaptive:draft_length=16")}
    assert arms == {*of_draft, ("suffix", "at most 32")}
    assert all(row["greedy_identical"] == [2, 2] for row in rows if row["temperature"] == 0)


def test_a_lossy_rule_says_so_everywhere(
    tmp_path: Path, tiny_target_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    prompts, out = write_prompts(tmp_path / "prompts.jsonl", "abc"), tmp_path / "report"
    options = ["--prompts", str(prompts), "--repeats", "1", "--max-new-tokens", "8", "--out", str(out)]
    arguments = ["eval", "--target", str(tiny_target_folder), "--drafter", "prompt-lookup", *options]
    assert run(*arguments, "--rule", "typical") == 0
    shown = capsys.readouterr().out
    assert "LOSSY" in shown.split("note:")[0]
    assert "rule 'typical' is LOSSY" in " ".join(shown.split())
    assert "(LOSSY)" in (out / "report.md").read_text()
    rows = json.loads((out / "eval.json").read_text())["rows"]
    assert {row["temperature"]: row["lossless"] for row in rows} == {0.0: True, 1.0: False}


def test_questions_go_through_the_template_that_is_named(
    tmp_path: Path, tiny_target_folder: Path, prompts: Path, capsys: pytest.CaptureFixture
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ raise_exception('asked in mode ' + mode) }}")
    prompts.write_text('{"turns": ["hello"]}')
    call = ["eval", "--target", tiny_target_folder, "--drafter", "suffix", "--prompts", prompts]
    call += ["--chat-template", template, "--template-option", "mode=m"]
    assert run(*call, "--out", tmp_path / "out") == 2
    assert "the chat template refuses it (asked in mode m)" in capsys.readouterr().err


@pytest.mark.usefixtures("pictures_of_a_pixel")
def test_evaluations_whose_template_shows_the_time_are_continued_and_compared(
    tmp_path: Path, tiny_target_folder: Path, prompts: Path, capsys: pytest.CaptureFixture
) -> None:
    """The journal's begin is the time of all prompts, later turns included; another time is the same prompt set."""
    template, out = tmp_path / "dated.jinja", tmp_path / "one"
    write_rows(prompts, ({"turns": [letter, "again"]} for letter in "abc"))
    template.write_text("{{ strftime_now('%f') }}{% for m in messages %}{{ m.content }}{% endfor %}")
    call = ["eval", "--target", tiny_target_folder, "--drafter", "suffix", "--prompts", prompts, "--temperature", 0]
    call += ["--chat-template", template, "--repeats", 1, "--max-new-tokens", 6]
    assert run(*call, "--out", out) == 0
    lines = (out / "cells.jsonl").read_bytes().splitlines(keepends=True)
    before = _texts(out / "cells.jsonl")
    kept = [line for line in lines if b'{"cell"' not in line]
    (out / "cells.jsonl").write_bytes(b"".join(kept))
    assert run(*call, "--out", out) == 0, capsys.readouterr().err
    assert _texts(out / "cells.jsonl") == before
    assert run(*call, "--out", tmp_path / "two") == 0
    assert run("eval", "compare", out, tmp_path / "two") == 0, capsys.readouterr().err
    now = json.loads(lines[0])["run"]["now"]
    (out / "cells.jsonl").write_bytes(b"".join(lines).replace(f', "now": "{now}"'.encode(), b""))
    assert run(*call, "--out", out) == 2
    assert "now=None there" in (said := capsys.readouterr().err)
    assert "the chat template shows the date" in said
