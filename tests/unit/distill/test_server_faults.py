"""Servers that fail: every answer arrives once, nothing that was answered is asked again, and nothing hangs."""

import json
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import certifi
import httpx
import pytest
from datasets import Dataset
from engine_server import FLEETING, KEY, LASTING, SLOW, Engine, answer_tokens, behind_a_proxy, chat_tokenizer
from openai import DefaultAsyncHttpxClient

from draftsmith.distill.chat_template import Chat
from draftsmith.distill.data_section import DataSection, ServerSection
from draftsmith.distill.server import client, responses
from draftsmith.distill.server.answers import AnswerJournal
from draftsmith.distill.server.probe import require_served
from draftsmith.distill.server.responses import ServerSampler, request_seed, server_samples
from draftsmith.distill.turns import question_numbers
from draftsmith.errors import ConfigError, DraftsmithError

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))]
QUESTIONS = 6
Fault = Callable[[int, dict[str, Any]], str | None]


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.02)
    behind_a_proxy(monkeypatch)


def questions(seed: int = 0, count: int = QUESTIONS) -> Dataset:
    """Plain prompts of different lengths."""
    rng = random.Random(seed)
    rows = [[index + 2, *(rng.randint(2, 60) for _ in range(rng.randint(2, 8)))] for index in range(count)]
    return Dataset.from_list([{"input_ids": ids, "turns": "", "spans": [], "opening": ""} for ids in rows])


def sample(
    engine: Engine,
    folder: Path | None,
    asked: Dataset,
    said: list[str] | None = None,
    responses: int = 1,
    **server: Any,
) -> Dataset:
    section = ServerSection(**{"url": engine.url, "model": "tiny", **server})
    data = DataSection(response_tokens=8, responses=responses, server=section)
    sampler = ServerSampler(data, Chat(chat_tokenizer()), 0, 64, "tiny")
    say = ([] if said is None else said).append
    return server_samples(sampler, asked, say, partial(require_served, target="tiny"), folder=folder, progress=False)


def expected(asked: Dataset, index: int) -> list[int]:
    prompt = asked[index]["input_ids"]
    return [*prompt, *answer_tokens(prompt, first_seed(asked, index), 8)]


def first_seed(asked: Dataset, index: int) -> int:
    return request_seed(0, 0, question_numbers(asked)[index], 0)


def asked_for_text(engine: Engine) -> list[str]:
    """Prompt and seed of every request but the greedy probe's."""
    return [text_of(body) for body in engine.asked if body["temperature"] > 0]


def text_of(body: dict[str, Any]) -> str:
    return json.dumps([body["prompt"], body["seed"]])


def some_fail(kind: str, seed: int) -> Fault:
    """Two requests fail, fewer than a request is tried; the greedy probe may be among them."""
    rng = random.Random(f"{kind}{seed}")
    numbers = set(rng.sample(range(12), client.ATTEMPTS - 1))
    return lambda number, _: kind if number in numbers else None


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", FLEETING)
def test_faults_that_pass_lose_nothing(kind: str, seed: int, tmp_path: Path) -> None:
    slow, asked = kind == "slow", questions(seed)
    fails, failed = some_fail(kind, seed), list[str]()

    left = client.ATTEMPTS - 1  # or all the attempts of one request may be among those that fail

    def fault(number: int, body: dict[str, Any]) -> str | None:
        nonlocal left
        text = body["temperature"] > 0
        if left == 0 or (not fails(number, body) and not (text and not failed)):  # the first of these always fails
            return None
        left -= 1
        failed.extend([text_of(body)] * text)
        return kind

    with Engine(fault=fault).running() as engine:
        rows = sample(engine, tmp_path / "s", asked, timeout_seconds=SLOW / 1.5 if slow else 60)
    assert rows["question"] == list(range(QUESTIONS))
    assert [row["input_ids"] for row in rows] == [expected(asked, index) for index in range(QUESTIONS)]
    sent = Counter(asked_for_text(engine))
    assert all(sent[text] >= 1 + count for text, count in Counter(failed).items()), "each failure is asked for again"
    if not slow:  # an answer that comes too late is an answer for the server
        assert set(engine.answered.values()) == {1}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", LASTING)
def test_what_cannot_be_used_is_left_out_and_counted(kind: str, seed: int, tmp_path: Path) -> None:
    """Two of the prompts always fail."""
    asked, said = questions(seed), list[str]()
    bad = set(random.Random(seed).sample(range(QUESTIONS), 2))
    prompts = [asked[index]["input_ids"] for index in bad]

    def fault(_: int, body: dict[str, Any]) -> str | None:
        return kind if body["temperature"] > 0 and body["prompt"] in prompts else None

    with Engine(fault=fault).running() as engine:
        rows = sample(engine, tmp_path / "s", asked, said)
    assert rows["question"] == [index for index in range(QUESTIONS) if index not in bad]
    assert [row["input_ids"] for row in rows] == [expected(asked, index) for index in rows["question"]]
    assert any("2 conversations" in line and "left out" in line for line in said), said
    assert max(asked_for_text(engine).count(text) for text in asked_for_text(engine)) == 1


@pytest.mark.parametrize("stop", [0, 3, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (1, 2, 4, 5))])
def test_nothing_is_asked_twice_after_an_interruption(
    stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after each answer, with a torn last line; with faults in both calls."""
    asked, original = questions(stop), AnswerJournal.add

    def interrupted(self: AnswerJournal, place: Any, answer: Any) -> None:
        if len(self) == stop:
            with (tmp_path / "s" / "answers.jsonl").open("ab") as file:
                file.write(b'{"place": [0,')
            raise KeyboardInterrupt
        original(self, place, answer)

    with Engine(fault=some_fail("broken", stop)).running() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(AnswerJournal, "add", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sample(engine, tmp_path / "s", asked, concurrency=1)
        lines = (tmp_path / "s" / "answers.jsonl").read_bytes().splitlines()[1:-1]
        stored = [json.loads(line)["place"][1] for line in lines]
        assert len(stored) == stop
        engine.asked.clear()
        rows = sample(engine, tmp_path / "s", asked)
        again = {json.loads(text)[1] for text in asked_for_text(engine)}
        left = [index for index, number in enumerate(question_numbers(asked)) if number not in stored]
        assert again == {first_seed(asked, index) for index in left}
        engine.asked.clear()
        assert [row["input_ids"] for row in rows] == [expected(asked, index) for index in range(QUESTIONS)]
        sample(engine, tmp_path / "s", asked)
        assert not engine.asked, "everything is stored"


def test_questions_of_another_data_set_are_not_asked_again(tmp_path: Path) -> None:
    """The cache keeps answers by question: more questions in another order, and one of them twice.

    Of a damaged file, only the damaged answer is lost.
    """
    first, said = questions(count=3), list[str]()
    more = Dataset.from_list([questions()[index] for index in (5, 2, 0, 1, 0, 4)])
    with Engine().running() as engine:
        sample(engine, None, first)
        engine.asked.clear()
        (file,) = (tmp_path / "cache").rglob("answers.jsonl")
        lines = file.read_bytes().splitlines(keepends=True)
        lost = question_numbers(more).index(json.loads(lines[1])["place"][1])
        file.write_bytes(b"".join([lines[0], b"[" + lines[1][1:], *lines[2:]]))
        rows = sample(engine, None, more, said)
        again = [json.loads(text)[1] for text in asked_for_text(engine)]
        whole = sample(engine, tmp_path / "alone", more)
    assert sorted(again) == sorted(first_seed(more, index) for index in (0, 4, 5, lost))
    assert said == ["responses: 4 of 6 are new"]
    assert rows.to_list() == whole.to_list()
    assert rows["input_ids"][2] != rows["input_ids"][4]


@pytest.mark.parametrize("kind", ["dropped", "busy", "down"])
def test_a_server_that_is_gone_ends_the_run(kind: str, tmp_path: Path) -> None:
    asked = questions()
    with Engine(fault=lambda n, body: kind if body["temperature"] > 0 and n > 6 else None).running() as engine:
        with pytest.raises(DraftsmithError, match=r"(cannot be reached|status (429|503)).*; answers so far are kept"):
            sample(engine, tmp_path / "s", asked, concurrency=1, failures=0)
        engine.fault = lambda *_: None
        assert len(sample(engine, tmp_path / "s", asked)) == QUESTIONS
    # Before the first answer it is an address at which no server listens, and not waited for.
    with pytest.raises(ConfigError, match=rf"^server {engine.url}/v1 cannot be reached \(.*\); expected a running s"):
        sample(engine, tmp_path / "gone", asked)


def test_too_many_failures_end_the_run(tmp_path: Path) -> None:
    asked = questions()
    with Engine(fault=lambda _, body: "refused" if body["temperature"] > 0 else None).running() as engine:
        with pytest.raises(DraftsmithError, match=r"3 conversations failed, more than failures=2 .*prompt is too long"):
            sample(engine, tmp_path / "s", asked, failures=2)
        engine.fault = lambda number, body: "broken" if body["temperature"] > 0 else None
        with pytest.raises(DraftsmithError, match=r"1 conversations failed, more than failures=0 .*status 500"):
            sample(engine, tmp_path / "s", asked, failures=0)
        engine.fault = lambda *_: None
        assert len(sample(engine, tmp_path / "s", asked)) == QUESTIONS


def test_a_server_with_another_tokenizer_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes the greedy probe, and more than half of its later answers cannot be used."""
    monkeypatch.setattr(responses, "LEFT_OUT_FIRST", 3)
    with (
        Engine(fault=lambda _, body: "other_text" if body["temperature"] > 0 else None).running() as engine,
        pytest.raises(DraftsmithError, match="4 of 4 answers have tokens that are another text"),
    ):
        sample(engine, tmp_path / "s", questions(0, 30), concurrency=1)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("other_text", "all greedy answers have tokens"),
        ("beyond", "all greedy answers have tokens"),
        ("other_prompt", "expected the target's tokenizer and chat template"),
    ],
)
def test_another_tokenizer_or_template_is_refused_before_the_run(kind: str, said: str, tmp_path: Path) -> None:
    with Engine(fault=lambda n, _: kind if n else None).running() as engine, pytest.raises(ConfigError, match=said):
        sample(engine, tmp_path / "s", questions())
    assert not asked_for_text(engine)


def test_unknown_models_and_routes_end_the_run(tmp_path: Path) -> None:
    with Engine(model="other").running() as engine, pytest.raises(ConfigError, match=r"does not serve tiny.*one of o"):
        sample(engine, tmp_path / "s", questions())
    assert not engine.asked
    with Engine(model="other", names=[]).running() as engine, pytest.raises(DraftsmithError, match="does not exist"):
        sample(engine, tmp_path / "s", questions())


def test_the_key_comes_from_the_environment_and_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine(key=KEY, fault=lambda number, body: "broken" if body["temperature"] > 0 else None).running() as engine:
        with pytest.raises(DraftsmithError, match=r"status 401 .*expected its key in \$DRAFTSMITH_SERVER_KEY"):
            sample(engine, tmp_path / "s", questions())
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        with pytest.raises(DraftsmithError, match="status 401"):
            sample(engine, tmp_path / "s", questions())
        monkeypatch.setenv("DRAFTSMITH_SERVER_KEY", KEY)
        said: list[str] = []
        with pytest.raises(DraftsmithError, match=r"whatever Bearer \*\*\* says"):
            sample(engine, tmp_path / "s", questions(), said, failures=0)
        engine.fault = lambda *_: None
        assert len(sample(engine, tmp_path / "s", questions(), said)) == QUESTIONS
    stored = b"".join(file.read_bytes() for file in (tmp_path / "s").iterdir())
    captured = capsys.readouterr()
    assert KEY not in f"{said}{stored.decode(errors='replace')}{captured.out}{captured.err}"


@pytest.mark.parametrize("key", [f"{KEY}\n", f" {KEY}", f'"{KEY}"', f"Bearer {KEY}", f"{KEY}\r", f"\ufeff{KEY}"])
def test_a_key_that_is_no_header_is_named_and_not_shown(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_SERVER_KEY", key)
    with Engine(key=KEY).running() as engine, pytest.raises(ConfigError, match=r"^DRAFTSMITH_SERVER_KEY: ") as said:
        sample(engine, tmp_path / "s", questions())
    assert KEY not in str(said.value)


def test_a_long_message_with_the_key_is_masked_before_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_SERVER_KEY", KEY)
    middle = client.LONGEST_REASON * 2 // 3 - len(KEY) // 2
    assert KEY[:9] not in client._shown(ValueError(), "x" * middle + KEY + "y" * client.LONGEST_REASON)


@pytest.mark.parametrize(
    ("name", "value"),
    [("ALL_PROXY", "socks5://u:hunter2@127.0.0.1:9"), ("HTTP_PROXY", "http://127.0.0.1:port"), ("http_proxy", "x://y")],
)
def test_proxies_that_cannot_be_used(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    for kind in (httpx.Client, DefaultAsyncHttpxClient):
        with pytest.raises(ConfigError, match=f"environment's {name.upper()} cannot be used.*NO_PROXY$") as said:
            client.opened(kind, "http://192.0.2.1:8000/v1")
        assert "hunter2" not in str(said.value)
        client.opened(kind, "http://127.0.0.1:8000/v1")


def test_certificates_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read for this machine's servers, too; a file that holds none is named."""
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match=r"^SSL_CERT_FILE=.*none\.pem cannot be read .*; expected certificates in P"):
        client.opened(httpx.Client, "https://localhost:8000/v1")
    given: list[Any] = []
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    client.opened(lambda **options: given.append(options["verify"]), "https://localhost:8000/v1")
    assert given[0].get_ca_certs()


@pytest.mark.parametrize(
    ("path", "said"), [("/llm", "such as http://localhost:8000/v1"), ("/v1/chat/completions", "expected {url}/v1")]
)
def test_addresses_with_the_wrong_path(path: str, said: str, tmp_path: Path) -> None:
    with Engine(posts=("/v1/completions",)).running() as engine, pytest.raises(DraftsmithError) as error:
        sample(engine, tmp_path / "s", questions(), url=engine.url + path)
    assert "status 404" in str(error.value)
    assert str(error.value).endswith(said.format(url=engine.url))
    assert "are kept" not in str(error.value)


def test_several_responses_of_a_server_that_answers_every_seed_alike(tmp_path: Path) -> None:
    alike = Engine(answer=lambda prompt, _, most: answer_tokens(prompt, 0, most))
    with alike.running(), pytest.raises(ConfigError, match="responses=3, and the server answers every seed alike"):
        sample(alike, tmp_path / "alike", questions(), responses=3)
    with Engine().running() as engine:
        assert len(sample(engine, tmp_path / "s", questions(), responses=3)) == 3 * QUESTIONS
