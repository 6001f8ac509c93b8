"""`draftsmith eval server` against servers whose drafts are known in advance."""

import json
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from commands import run, write_prompts, write_rows
from engine_server import Engine, chat_tokenizer
from transformers import AutoModelForCausalLM

from draftsmith.errors import ConfigError
from draftsmith.eval.journal import Numbers, Place, ServedCell
from draftsmith.eval.results import series_of
from draftsmith.eval.server import measure
from draftsmith.eval.server.counters import CounterRoutes, Counters, parse_counters
from draftsmith.eval.server.served_evaluation import server_row

ROUNDS = 3
"""Rounds of an answer of 7 tokens: the prefill's, and two a round, of which one was drafted and accepted."""


class Drafting:
    """An engine that accepts the first of two draft tokens in every round, or in a share of them, and never both."""

    def __init__(self, style: str | None, first: float = 1.0) -> None:
        self.answers, self.style, self.first = 0, style, first
        self.engine = Engine(answer=self._answer, metrics=self._metrics if style else None)

    def _answer(self, prompt: list[int], seed: int, most: int) -> list[int]:
        self.answers += 1
        return [2 + (prompt[0] + place) % 50 for place in range(7)][:most]

    def _metrics(self, _: Engine) -> str:
        rounds, label = self.answers * ROUNDS, '{engine="0",model_name="tiny"}'
        if self.style == "llamacpp":  # as its source prints them: labels of positions alone, whole numbers
            names = {"tokens_predicted": 7 * self.answers, "spec_decode_num_draft_tokens": 2 * rounds}
            names |= {"spec_decode_num_accepted_tokens": rounds, "spec_decode_num_drafts": rounds}
            lines = [f"# TYPE llamacpp:{name}_total counter\nllamacpp:{name}_total {n}" for name, n in names.items()]
            at = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f'{at}{{position="0"}} {rounds}', f'{at}{{position="1"}} 0'] if rounds else []
            return "\n".join(lines) + "\n"
        lines = ["# HELP some help", f"{self.style}:generation_tokens_total{label} {7 * self.answers}.0"]
        if self.style == "vllm":
            at = [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{p}"}}' for p in (0, 1)]
            lines += [
                f"vllm:spec_decode_num_drafts_total{label} {rounds}.0",
                f"vllm:spec_decode_num_draft_tokens_total{label} {2 * rounds}.0",
                f"{at[0]} {self.first * rounds}",
                f"{at[1]} 0.0",
            ]
        if self.style == "sglang":
            lines.append(f"sglang:spec_verify_calls_total{label} {rounds}.0")
        return "\n".join(lines)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows: list[dict[str, Any]] = [{"prompt": letter * 3} for letter in "abcde"]
    rows.append({"turns": ["x", "y"]})
    return write_rows(tmp_path / "prompts.jsonl", rows)


@dataclass
class Served:
    """Measures engines with the target's prompts."""

    folder: Path
    prompts: Path
    place: Path
    capsys: pytest.CaptureFixture[str]

    def __call__(self, engine: Engine, *more: Any, out: str = "out") -> int:
        options = ["--prompts", self.prompts, "--temperature", 1, "--repeats", 2, "--max-new-tokens", 7]
        command = ["eval", "server", engine.url, "--target", self.folder, "--model", "tiny", "--concurrency", 1]
        return run(*command, "--concurrency", 2, *options, "--out", self.place / out, *more)

    def stored(self, out: str = "out") -> dict[str, Any]:
        return json.loads((self.place / out / "eval.json").read_text())

    def said(self) -> str:
        """Return what was printed since, in one line."""
        return " ".join("".join(self.capsys.readouterr()).split())


@pytest.fixture
def served(folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Served:
    return Served(folder, prompts, tmp_path, capsys)


def test_tau_acceptance_and_speed_of_vllm(
    served: Served, folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a baseline on a second server, and again from its eval.json."""
    with Drafting("vllm").engine.running() as engine, Drafting(None).engine.running() as plain:
        words = f"--target {folder} --model tiny --prompts {prompts}"
        assert served(engine, "--baseline", plain.url, out="one") == 0
        assert "next:" not in capsys.readouterr().out
        assert served(plain, out="alone") == 0
        again = f"\nnext: draftsmith eval server {plain.url} {words} --baseline URL_WITHOUT_DRAFTER"
        again += f" --out {tmp_path}/alone-beside\n"
        assert capsys.readouterr().out.endswith(again)
        assert served(engine, "--baseline", tmp_path / "alone", out="two") == 0
        assert served(engine, out="two") == 2
    for name in ("one", "two"):
        stored = served.stored(name)
        assert [row["concurrency"] for row in stored["server"]] == [1, 2]
        for row in stored["server"]:
            assert (row["tau"], row["acceptance_at"], row["prompts"]) == (2.0, [1.0, 0.0], 6)
            assert row["alpha"] == 0.5
            assert row["speedup"] > 0
            assert row["milliseconds_per_token"] > 0
            assert row["tau_interval"] == [2.0, 2.0]
        report = (tmp_path / name / "report.md").read_text()
        assert "| 2.00 [2.00, 2.00] | 1.00 0.00 |" in report
        assert "- Measured on 6 prompts in 3 batches: differences" in report
    alone = served.stored("alone")
    assert [row["tau"] for row in alone["server"]] == [None, None]
    capsys.readouterr()
    assert run("eval", "compare", tmp_path / "one", tmp_path / "two") == 0
    assert "tau does not differ measurably" in served.said()


def test_servers_take_turns_and_a_killed_measurement_continues(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first server fails in the middle; the same command asks only for what is missing, also after a cut line."""
    order: list[str] = []
    turn = measure.ServerRun.turn

    async def watched(self: measure.ServerRun, *arguments: Any) -> Any:
        if len(order) == 7:
            raise KeyboardInterrupt
        order.append(self.server.base_url)
        return await turn(self, *arguments)

    with Drafting("vllm").engine.running() as engine, Drafting(None).engine.running() as plain:
        with monkeypatch.context() as patched:
            patched.setattr(measure.ServerRun, "turn", watched)
            assert served(engine, "--baseline", plain.url) != 0
        one, other = (url.url + "/v1" for url in (engine, plain))
        assert order == [one, other, one, other, other, one, one], "warm-up, then in turns"
        journal = tmp_path / "out" / "batches.jsonl"
        assert journal.read_text().count('"fact"') == 1 + 4, "a batch is stored once all servers have answered it"
        assert served(engine, "--baseline", plain.url, "--seed", 9) == 2
        assert "holds another run: seed=0 there, 9 here" in served.said()
        journal.write_text(journal.read_text()[:-9])
        asked: list[str] = []

        async def counted(self: measure.ServerRun, *arguments: Any) -> Any:
            asked.append(self.server.base_url)
            return await turn(self, *arguments)

        monkeypatch.setattr(measure.ServerRun, "turn", counted)
        assert served(engine, "--baseline", plain.url) == 0
        turns = (5 + 2) + (3 + 1)  # the last prompt has two turns
        assert len(asked) == 2 + 2 * 2 * turns - 2, "warm-up, and all batches but the one whose lines are whole"
    rows = served.stored()["server"]
    assert [(row["tau"], row["acceptance_at"]) for row in rows] == [(2.0, [1.0, 0.0])] * 2
    assert not journal.exists()
    with Drafting(None).engine.running() as plain:
        assert served(plain, "--seed", 9) == 2
        assert served(plain, "--seed", 9, "--overwrite") == 0
    assert served.stored()["settings"]["seed"] == 9


@pytest.mark.parametrize(
    ("style", "acceptance", "alpha"), [("sglang", [], None), ("llamacpp", [1.0, 0.0], 0.5)], ids=["sglang", "llama"]
)
def test_tau_and_acceptance_of_other_engines(
    served: Served, style: str, acceptance: list[float], alpha: float | None, capsys: Any
) -> None:
    """SGLang counts verifications alone. The result is printed as JSON, too."""
    with Drafting(style).engine.running() as engine:
        assert served(engine, "--json") == 0
    stored = served.stored()
    assert [(row["tau"], row["acceptance_at"], row["alpha"]) for row in stored["server"]] == [
        (2.0, acceptance, alpha)
    ] * 2
    assert not any("count no drafts" in note for note in stored["notes"])
    assert json.loads(capsys.readouterr().out)["server"] == stored["server"]


def test_a_server_that_loses_temperatures_is_refused(
    served: Served, folder: Path, prompts: Path, tmp_path: Path
) -> None:
    """Its answers at T=0.01 are as those at T=1, and it is measured at T=0 alone."""
    with Engine(loses_temperatures=True).running() as engine, Engine().running() as other:
        assert served(engine) == 2
        said = served.said()
        assert f"server {engine.url}/v1: 8 of 8 answers at T=0.01 are other texts than the greedy ones" in said
        assert "does not sample at the temperature that it is asked for" in said
        assert not (tmp_path / "out" / "eval.json").exists()
        assert all(body["temperature"] <= 0.01 for body in engine.asked), "nothing was measured"
        assert served(other, "--baseline", engine.url) == 2
        assert f"server {engine.url}/v1: 8 of 8 answers" in served.said()
        command = ["eval", "server", engine.url, "--target", folder, "--model", "tiny", "--prompts", prompts]
        assert run(*command, "--temperature", 0, "--repeats", 1, "--out", tmp_path / "zero") == 0
        assert served(other) == 0


def test_a_drafter_that_lost_its_lm_head_is_named(
    served: Served, folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine accepts as many of the target's own drafts as the local decoder does with such an lm_head."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    weight_VH = model.state_dict()["lm_head.weight"]
    heads = {"intact": weight_VH.clone(), "permuted": weight_VH.roll(7, 0)}
    local = ["eval", "--target", folder, "--prompts", prompts, "--temperature", 0, "--max-new-tokens", 7]
    local += ["--repeats", 2, "--gamma", 2]
    drafters: list[str] = []
    for name, lm_head_VH in heads.items():
        weight_VH.copy_(lm_head_VH)
        model.save_pretrained(tmp_path / name)
        drafters += ["--drafter", f"{name}={tmp_path / name}"]
    assert run(*local, *drafters, "--out", tmp_path / "lost") == 0
    assert run(*local, "--drafter", f"d={folder}", "--out", tmp_path / "local") == 0
    rows = served.stored("lost")["rows"]
    firsts = {row["drafter"]: row["acceptance_at"][0] for row in rows if row["drafter"] in heads}
    for name in heads:
        assert (firsts[name] == 1.0) == (name == "intact")
        capsys.readouterr()
        with Drafting("vllm", firsts[name]).engine.running() as engine:
            assert served(engine, "--temperature", 0, out=f"served {name}") == 0
        note = "of the first draft tokens are accepted, no more than of random ones: an lm_head that was quantised"
        said = served.said()
        assert (note in said) == (name != "intact")
        assert run("eval", "compare", tmp_path / "local", tmp_path / f"served {name}") == 0
        said = served.said()
        assert ("(1) weights (an lm_head that was quantised" in said) == (name != "intact")
        assert "B's tiny (engine): tau" in said


def test_a_server_with_a_shorter_context_than_the_target(served: Served, folder: Path, tmp_path: Path) -> None:
    """Texts end where it does, and prompts that fill it are left out."""
    file = write_prompts(tmp_path / "long.jsonl", "abc", "abcdefgh", "abcdefghijkl")
    with Engine(contexts={"tiny": 12}).running() as engine:
        command = ["eval", "server", engine.url, "--target", folder, "--model", "tiny", "--prompts", file]
        command += ["--temperature", 0, "--max-new-tokens", 7, "--repeats", 1, "--out", tmp_path / "out"]
        assert run(*command) == 0
        assert {(len(body["prompt"]), body["max_tokens"]) for body in engine.asked} == {(3, 1), (3, 7), (8, 4)}
    notes = served.stored()["notes"]
    assert notes[0].startswith(f"1 of 3 prompts were left out; the first: {file}:3: prompt=12 tokens")


def test_wrong_options_and_servers(served: Served, tmp_path: Path) -> None:
    with Engine(model="other").running() as engine:
        assert served(engine) == 2
        assert "does not serve tiny" in served.said()
    with Engine().running() as engine:
        assert served(engine, "--baseline", tmp_path / "none") == 2
        assert served(engine, "--concurrency", 2) == 2
        assert "each only once" in served.said()
    assert served(engine) == 2
    said = served.said()
    assert f"server {engine.url}/v1 cannot be reached" in said
    assert not (tmp_path / "out").exists(), "the same --out serves the corrected command"


def test_a_baseline_is_checked_before_anything_is_measured(served: Served, tmp_path: Path) -> None:
    with Drafting(None).engine.running() as plain, Drafting("vllm").engine.running() as engine:
        assert served(plain, out="alone") == 0
        assert served(engine, out="drafting") == 0
    stored = served.stored("alone")
    del stored["server"]
    (tmp_path / "local.json").write_text(json.dumps(stored))
    asked = Drafting("vllm")
    with asked.engine.running() as engine:
        for more, reason in {
            ("--repeats", 3): "has no 3 repeats of these prompts at T=1, concurrency 1",
            ("--count", 3): "has other prompts",
            ("--top-p", 0.9): "alone was measured with top_p=None; expected 0.9",
            ("--baseline", tmp_path / "drafting"): "on a server that drafts; expected one without a drafter",
            ("--baseline", tmp_path / "local.json"): "local.json was not measured on a server; expected",
        }.items():
            assert served(engine, "--baseline", tmp_path / "alone", *more) == 2
            assert reason in served.said()
        assert served(engine, "--baseline", "http://127.0.0.1:9") == 2
        assert "127.0.0.1:9" in served.said()
    assert asked.answers == 0
    assert not (tmp_path / "out" / "eval.json").exists()


@pytest.mark.parametrize(
    ("tokens", "counted", "rounds"),
    [
        (20, Counters(True, 2.0, (2.0, 2.0, 1.0)), 15),  # 13 passes had no draft, as those of n-gram drafters
        (8, Counters(True, 3.0, (3.0, 3.0)), 3),  # an EOS among the accepted tokens cut the last round
        (8, Counters(True, 0.0, (0.0, 0.0)), 8),
        (8, Counters(True, 3.0), 3),  # SGLang counts every verification, and no accepted tokens
        (8, Counters(False), 8),
    ],
)
def test_passes_without_a_draft_are_rounds_of_one_token(tokens: int, counted: Counters, rounds: int) -> None:
    assert Numbers(tokens, 1.0, counted.rounds, counted.accepted, counted.drafted).rounds == rounds


@pytest.mark.parametrize("size", [1, 2, 64])
def test_milliseconds_of_batches_that_are_not_full(size: int) -> None:
    """Three prompts, each answered with 1 + 59 tokens in 0.59 s whatever the load."""
    units = [["a", "b", "c"][start : start + size] for start in range(0, 3, size)]
    cells = [
        ServedCell(("d", ""), Place(0, 0.0, size, unit, 0), Numbers(59 * len(ids), 0.59, 0.0, ()))
        for unit, ids in enumerate(units)
    ]
    row = server_row(series_of(cells, units), None, cells, seed=0, counted=False)
    assert row["milliseconds_per_token"] == pytest.approx(10)


def test_a_server_with_other_requests_is_refused(served: Served) -> None:
    """Its counters change from one reading to the next."""
    drafts = count()
    busy = Engine(metrics=lambda _: f"vllm:spec_decode_num_drafts_total {next(drafts)}")
    with busy.running() as engine:
        assert served(engine) == 2
    expected = "its counters changed in each of 50 readings; expected none during a measurement"
    assert expected in served.said()


def test_counters_of_several_engines_are_added() -> None:
    text = """# TYPE x counter
vllm:spec_decode_num_drafts_total{engine="0"} 10.0
vllm:spec_decode_num_drafts_total{engine="1"} 5.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 3
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0",engine="1"} 9
vllm:other{position="0",engine="0"} nonsense
broken line {
"""
    now = parse_counters(text)
    assert now == Counters(True, 15.0, (9.0, 3.0))
    assert now.since(Counters(True, 5.0, (4.0,))) == Counters(True, 10.0, (5.0, 3.0))
    assert parse_counters("<html>") == Counters(False)
    with pytest.raises(ConfigError, match="started again"):
        Counters(True, 1.0).since(now)


def test_labels_may_hold_braces_and_quotes() -> None:
    at = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    text = f"""vllm:spec_decode_num_drafts_total{{model_name="a{{}},b"}} 10
vllm:spec_decode_num_draft_tokens_total {{ model_name = "a\\"}}", }} 20 1700000000
{at}{{model_name="x\\",position=\\"1",position="0"}} 9
{at}{{position="7000000000"}} 5
"""
    assert parse_counters(text) == Counters(True, 10.0, (9.0,), 20.0)


@pytest.mark.parametrize("value", ["nonsense", "NaN", "-1", "+Inf"])
def test_a_counter_that_is_no_number_is_no_zero(value: str) -> None:
    found = parse_counters(f"vllm:generation_tokens_total 9\nvllm:spec_decode_num_drafts_total {value}\n")
    assert found == Counters(False)
    assert found.why == "vllm:spec_decode_num_drafts is no number"
    with pytest.raises(ConfigError, match=r"/metrics were not read each time \(vllm:spec_decode_num_drafts is no"):
        Counters(True, 5.0).since(found)
    with pytest.raises(ConfigError, match="were not read each time"):
        found.since(Counters(True, 5.0))


@pytest.mark.parametrize("status", [429, 500, 502, 503, None])
def test_a_reading_that_fails_is_tried_again(status: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """None: the connection is closed. A route that fails each time is an error; one that is missing is none."""
    monkeypatch.setattr("draftsmith.eval.server.counters.SETTLE_SECONDS", 0.0)
    drafting = Drafting("vllm")
    with drafting.engine.running() as engine:
        routes, left = CounterRoutes(engine.url), [2]

        def fails(path: str) -> int | None:
            left[0] -= path == "/metrics"
            return status if path == "/metrics" and left[0] >= 0 else 200

        engine.route_status = fails
        assert routes.counters() == Counters(True, 0.0, (0.0, 0.0), 0.0)
        left[0] = 99
        with pytest.raises(ConfigError, match=r"/metrics fails \((status|cannot be reached)"):
            routes.counters()
        for missing in (404, 405, 501, 403):
            engine.route_status = lambda _, missing=missing: missing
            found = routes.counters()
            assert (found.known, found.why, found.absent) == (False, f"status {missing}", True)


@pytest.mark.parametrize(
    ("location", "known"),
    [
        ("/metrics/", True),
        ("http://127.0.0.1/metrics/", True),
        ("https://127.0.0.1:1/metrics/", True),
        ("http://localhost:{port}/metrics/", False),
        ("/metrics", False),
    ],
    ids=["relative", "without the port", "another scheme", "another host", "a loop"],
)
def test_redirects_on_the_same_host_are_followed(location: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.eval.server.counters.SETTLE_SECONDS", 0.0)
    with Drafting("vllm").engine.running() as engine:
        to = location.replace("{port}", engine.url.rpartition(":")[2])
        engine.redirects = {"/metrics": to}
        engine.metrics_path = "/metrics/"
        assert CounterRoutes(engine.url).counters().known == known


def test_drafts_of_different_lengths(served: Served) -> None:
    """Of an answer's drafts, one has one token and two have three; the counters tell acceptance of the first alone."""
    at = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    drafting = Drafting("vllm")
    drafting.engine.metrics = lambda _: "\n".join(
        f"{name} {count * drafting.answers}"
        for name, count in {
            "vllm:spec_decode_num_drafts_total": 3,
            "vllm:spec_decode_num_draft_tokens_total": 7,
            f'{at}{{position="0"}}': 2,
            f'{at}{{position="1"}}': 1,
            f'{at}{{position="2"}}': 0,
        }.items()
    )
    with drafting.engine.running() as engine:
        assert served(engine) == 0
    stored = served.stored()
    assert [(row["tau"], row["acceptance_at"], row["alpha"]) for row in stored["server"]] == [
        (2.0, [pytest.approx(2 / 3)], None)
    ] * 2
    assert any("Drafts differ in length (2.33 draft tokens on average, at most 3)" in note for note in stored["notes"])


@pytest.mark.parametrize(
    ("drafted", "accepted", "tested", "known"),
    [
        (15.0, (4.0, 2.0, 1.0), (5.0, 4.0, 2.0), True),
        (5.0, (4.0, 0.0, 0.0), (5.0,), True),
        (9.0, (4.0, 2.0, 1.0), (5.0,), False),
        (9.0, (0.0, 0.0, 0.0), (5.0,), True),
        (None, (4.0, 2.0), (5.0,), False),
        (None, (4.0,), (5.0,), True),
        (None, (), (), True),
    ],
)
def test_positions_of_which_the_counts_tell_acceptance(
    drafted: float | None, accepted: tuple[float, ...], tested: tuple[float, ...], known: bool
) -> None:
    numbers = Numbers(20, 1.0, 5.0, accepted, drafted)
    assert (numbers.tested, numbers.lengths_known) == (tested, known)


def test_a_baseline_that_drafts_is_refused(served: Served) -> None:
    with Drafting("vllm").engine.running() as engine, Drafting("vllm").engine.running() as other:
        assert served(engine, "--baseline", other.url) == 2
    assert f"baseline={other.url} drafts; expected a server without a drafter" in served.said()


def test_metrics_that_stop_being_readable_are_no_zeros(served: Served) -> None:
    """The route is gone after the warm-up, and in a continued run; neither reading becomes a batch without drafts."""
    drafting = Drafting("vllm")
    with drafting.engine.running() as engine:
        drafting.engine.route_status = lambda path: 404 if path == "/metrics" and drafting.answers > 42 else 200
        assert served(engine, "--temperature", 0) == 2
        assert "/metrics were not read each time (status 404)" in served.said()
        assert served(engine, "--temperature", 0) == 2
        assert "/metrics were read for the first batches (status 404)" in served.said()
        drafting.engine.route_status = lambda path: 200
        assert served(engine, "--temperature", 0) == 0
    assert [row["tau"] for row in served.stored()["server"]] == [2.0] * 4


def test_turns_that_cannot_follow_are_counted_and_the_same_for_both(
    served: Served, folder: Path, tmp_path: Path
) -> None:
    """The server's answers to one of three conversations are another text: its second turn is asked of neither."""
    write_rows(tmp_path / "turns.jsonl", ({"turns": [letter * 3, "y"]} for letter in "abc"))

    def fault(number: int, body: dict[str, Any]) -> str | None:
        return (
            "other_text" if number > 5 and body["max_tokens"] == 7 and body["messages"][0]["content"] == "bbb" else None
        )

    one, two = Engine(fault=fault), Engine()
    chat_tokenizer().save_pretrained(folder)
    with one.running(), two.running():
        command = ["eval", "server", one.url, "--baseline", two.url, "--target", folder, "--model", "tiny"]
        command += ["--prompts", tmp_path / "turns.jsonl", "--temperature", 0, "--repeats", 1, "--max-new-tokens", 7]
        assert run(*command, "--concurrency", 2, "--out", tmp_path / "out") == 0
    stored = served.stored()
    note = "1 later turns were left out, since answers before them have tokens that are another text for the tokenizer."
    assert note in stored["notes"]
    assert [row["turns_left_out"] for row in stored["server"]] == [1]
    seconds = [
        [body["messages"][0]["content"] for body in engine.asked if len(body["messages"]) == 3] for engine in (one, two)
    ]
    assert [set(of) for of in seconds] == [{"aaa", "ccc"}] * 2
