"""Prompts, target samples, packing and the online teacher."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import YARN, make_llama
from datasets import Dataset
from tokenizers.processors import TemplateProcessing
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from draftsmith.bars import Bars
from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.distill import dataset
from draftsmith.distill.asked import question_numbers
from draftsmith.distill.chat_template import Chat
from draftsmith.distill.data_section import DataSection
from draftsmith.distill.dataset import (
    FEATURES,
    LengthStatistics,
    hold_out,
    length_statistics,
    pack,
    read_examples,
)
from draftsmith.distill.load_target import LoadedTarget, load_target, load_tokenizer
from draftsmith.distill.objective import Objective
from draftsmith.distill.regeneration import Sampler, Share, samples_key, target_samples
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.heads import DraftModel, Medusa

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [3]]
TEMPLATE = (
    "{% for m in messages %}{{ 'U' if m.role == 'user' else 'A' }}{{ m.content }}{{ 'E' if m.role == 'assistant' }}"
    "{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def loaded(tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> LoadedTarget:
    return LoadedTarget(tiny_target, tiny_tokenizer, "tiny", None)


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def questions(prompts: list[list[int]] = PROMPTS) -> Dataset:
    rows = [
        {"input_ids": ids, "spans": [], "opening": str(i), "turns": "", "images": ""} for i, ids in enumerate(prompts)
    ]
    return Dataset.from_list(rows, features=FEATURES)


def sampler(
    loaded: LoadedTarget,
    tokens: int,
    temperature: float,
    batch_size: int,
    seed: int,
    drafter_share: float = 0.0,
    responses: int = 1,
    **options: Any,
) -> Sampler:
    data = DataSection(
        response_tokens=tokens,
        temperature=temperature,
        batch_size=batch_size,
        drafter_share=drafter_share,
        responses=responses,
    )
    return Sampler(loaded, Chat(loaded.tokenizer), data, seed, **options)


def source_of(prompts: str, count: int, prompt_tokens: int, response_tokens: int, **more: Any) -> DataSection:
    limits = {"count": count, "prompt_tokens": prompt_tokens, "response_tokens": response_tokens}
    return DataSection(prompts=prompts, **limits, **more)


def test_what_is_left_out_is_counted_by_reason(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["abc", "a" * 9, "abcd", "b" * 200, "abc"]
    source = write(tmp_path / "p.jsonl", [{"prompt": text} for text in texts])
    said: list[str] = []
    chat = Chat(loaded.tokenizer)
    rows = read_examples(chat, source_of(source, 10, 5, 8), 128, said.append)
    assert [len(ids) for ids in rows["input_ids"]] == [3, 4]
    assert said == [
        f"{source}: 2 of 5 have prompts longer than data.prompt_tokens=5: left out",
        f"{source}: 1 of 5 are the same as another: left out",
    ]
    again: list[str] = []
    assert read_examples(chat, source_of(source, 10, 5, 8), 128, again.append).to_list() == rows.to_list()
    assert again == said, "the same lines are printed for cached examples"
    reading: list[str] = []
    monkeypatch.setattr(dataset, "SECONDS", 0)
    read_examples(chat, source_of(source, 11, 5, 8), 128, reading.append)
    assert [line.partition(", at most ")[0] for line in reading[:2]] == [
        f"{source}: 1 rows read, 1 of 11 samples",
        f"{source}: 3 rows read, 2 of 11 samples",
    ]
    assert all(line.endswith(" left") for line in reading[:2])
    twice = read_examples(chat, source_of(source, 10, 5, 8, deduplicate=False), 128, said.append)
    assert len(twice) == 3
    short = read_examples(chat, source_of(source, 10, 300, 8), 128, said.append)
    assert len(short) == 3
    assert said[-2] == (
        f"{source}: 1 of 5 do not fit the target's context of 128 with data.response_tokens=8 after them: left out"
    )
    with pytest.raises(ConfigError, match=r"leaves nothing to train on \(.* 5 of 5 have prompts longer"):
        read_examples(chat, source_of(source, 10, 2, 8), 128, said.append)


def test_rows_without_a_question_or_an_answer_are_left_out_and_counted(loaded: LoadedTarget, tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}
    rows = [[], [answer, user], [{**user, "content": " "}, answer], [user, {**answer, "content": ""}], [user, answer]]
    source = write(tmp_path / "p.jsonl", [{"messages": messages} for messages in rows])
    for answered, left_out in ((True, 4), (False, 3)):  # the target answers what has no answer
        said: list[str] = []
        settings = source_of(source, 10, 9, 9, response="text" if answered else "target", deduplicate=False)
        assert len(read_examples(Chat(loaded.tokenizer), settings, 128, said.append)) == 5 - left_out
        why = ("are empty", "begin with an answer", "have an empty question", "have an empty answer")
        assert said == [f"{source}: 1 of 5 {reason}: left out" for reason in why[:left_out]]


def test_conversations_that_continue_differently_are_no_twins(loaded: LoadedTarget, tmp_path: Path) -> None:
    chats = [{"turns": ["ab", later]} for later in ("cd", "ef", "ef")]
    source, chat = write(tmp_path / "p.jsonl", chats), Chat(loaded.tokenizer)
    for every_turn, left in ((False, 1), (True, 2)):
        settings = source_of(source, 10, 9, 9, turns="all" if every_turn else "first")
        assert len(read_examples(chat, settings, 128, lambda _: None)) == left


def test_messages_of_tables_may_have_dates(loaded: LoadedTarget, tmp_path: Path) -> None:
    """WildChat's have the time of each message."""
    user, answer = (
        {"role": role, "content": "ab", "timestamp": datetime(2023, 4, 9)} for role in ("user", "assistant")
    )
    Dataset.from_list([{"conversation": [user, answer, user]}]).to_parquet(tmp_path / "p.parquet")
    settings = source_of(str(tmp_path / "p.parquet"), 10, 9, 9, turns="all")
    (row,) = read_examples(Chat(loaded.tokenizer), settings, 128, lambda _: None)
    turns = json.loads(row["turns"])["turns"]
    assert [[message["timestamp"] for message in turn] for turn in turns] == [["2023-04-09 00:00:00"]] * 2


def test_a_file_that_changed_is_read_again(loaded: LoadedTarget, tmp_path: Path) -> None:
    chat = Chat(loaded.tokenizer)
    for texts in (["abc"], ["abc", "abcd"]):
        source = write(tmp_path / "p.jsonl", [{"prompt": text} for text in texts])
        assert len(read_examples(chat, source_of(source, 10, 9, 9), 128, lambda _: None)) == len(texts)


def test_examples_are_read_again_with_another_tokenizer(
    loaded: LoadedTarget, tiny_target_folder: Path, tmp_path: Path
) -> None:
    """Its vocabulary may be the same: the token that ends an answer and the tokens around a text are not in it."""
    source = write(tmp_path / "p.jsonl", [{"prompt": "ab", "response": "cd"}])

    def read(tokenizer: Any) -> list[int]:
        settings = source_of(source, 10, 9, 9, response="text")
        return read_examples(Chat(tokenizer), settings, 128, lambda _: None)[0]["input_ids"]

    again = load_tokenizer(str(tiny_target_folder))[0]
    again("ab", padding="max_length", max_length=9, truncation=True)
    assert read(loaded.tokenizer) == read(again) == [2, 3, 4, 5, 1]
    assert len(list((tmp_path / "cache" / "examples").glob("*/rows.arrow"))) == 1, "a tokenizer that was loaded again"
    again.eos_token = "9"
    assert read(again) == [2, 3, 4, 5, 63]
    again.backend_tokenizer.post_processor = TemplateProcessing(single="9 $A", special_tokens=[("9", 63)])
    assert read(again) == [63, 2, 3, 4, 5, 63]


def test_conversations_that_begin_alike_are_held_out_together() -> None:
    rows = [
        {"input_ids": [i, i], "spans": [], "opening": opening, "turns": "", "images": ""}
        for i, opening in enumerate(["a", "b", "a", "c", "b", "d"])
    ]
    examples = Dataset.from_list(rows, features=FEATURES)
    kept, heldout = hold_out(examples, 2)
    assert kept["opening"] == ["a", "a", "c"]
    assert sorted(prompt.input_ids for prompt in heldout) == [[1, 1], [5, 5]]
    with pytest.raises(ConfigError, match=r"holds 4 usable prompts; expected more than evaluation\.count=4"):
        hold_out(examples, 4)


def test_greedy_samples_are_the_targets_own(loaded: LoadedTarget) -> None:
    rows = target_samples(sampler(loaded, 12, 0.0, 3, 0), questions(), progress=False)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        expected = loaded.model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert row["input_ids"] == expected[0].tolist()
        assert row["spans"] == [[len(prompt), len(row["input_ids"])]]


def test_several_responses_are_drawn_each_by_itself(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first responses are those of responses=1; with more responses only new ones are drawn, also after a kill."""
    folder = tmp_path / "answers"
    alone = target_samples(sampler(loaded, 12, 1.0, 3, 0), questions(), folder=tmp_path / "alone", progress=False)
    original, answered = Sampler.answer, []

    def killed(self: Sampler, rows: list, indices: list[int], response: int) -> list:
        if len(answered) == 5:  # each response to four questions is two parts
            answered.append("killed")
            raise KeyboardInterrupt
        answered.append((tuple(indices), response))
        return original(self, rows, indices, response)

    monkeypatch.setattr(Sampler, "answer", killed)
    two = target_samples(sampler(loaded, 12, 1.0, 3, 0, responses=2), questions(), folder=folder, progress=False)
    with pytest.raises(KeyboardInterrupt):
        target_samples(sampler(loaded, 12, 1.0, 3, 0, responses=4), questions(), folder=folder, progress=False)
    four = target_samples(sampler(loaded, 12, 1.0, 3, 0, responses=4), questions(), folder=folder, progress=False)
    assert [response for _, response in answered[:5]] == [0, 0, 1, 1, 2]
    assert [response for _, response in answered[6:]] == [2, 3, 3]
    assert two.to_list()[:4] == alone.to_list()
    assert four.to_list()[:8] == two.to_list()
    assert four["question"] == [0, 1, 2, 3] * 4
    assert len({tuple(ids) for ids in four["input_ids"]}) == 16
    names = sorted(place.name for place in tmp_path.iterdir() if place.name.startswith("answers"))
    assert names == ["answers", "answers-1", "answers-2", "answers-3"], "no parts are left"
    key = samples_key(sampler(loaded, 12, 1.0, 3, 0), questions())
    assert key == samples_key(sampler(loaded, 12, 1.0, 3, 0, responses=2), questions())


def test_samples_are_cached_by_target_and_settings(loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    first = target_samples(sampler(loaded, 12, 1.0, 9, 0), questions(), progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "answer", lambda *_: pytest.fail("the responses are on disk"))
        for size in (9, 2):  # the prompts that are decoded together do not count
            again = target_samples(sampler(loaded, 12, 1.0, size, 0), questions(), progress=False)
            assert first.to_list() == again.to_list()
    another = LoadedTarget(make_llama(3), loaded.tokenizer, "tiny", None)
    for other in (sampler(loaded, 12, 1.0, 9, 1), sampler(loaded, 12, 0.9, 9, 0), sampler(another, 12, 1.0, 9, 0)):
        found = target_samples(other, questions(), progress=False)
        assert found["input_ids"] != first["input_ids"]
        alone = other.answer([{"input_ids": PROMPTS[0], "turns": "", "number": question_numbers(questions())[0]}], [0])
        assert found["input_ids"][0] == alone[0]["input_ids"]


@pytest.mark.parametrize("named_in", ["config", "generation_config"])
def test_sampled_responses_end_where_decoded_texts_do(named_in: str, loaded: LoadedTarget) -> None:
    """The EOS of config.json counts where generation_config.json names none."""
    ids = PROMPTS[0]
    free = SpeculativeDecoder(loaded.model).generate(ids, max_new_tokens=12, eos_token_id=None).tokens
    loaded.model.generation_config.eos_token_id = None
    getattr(loaded.model, named_in).eos_token_id = free[3]
    (row,) = sampler(loaded, 12, 0.0, 4, 0).answer([{"input_ids": ids, "turns": ""}], [0])
    assert row["input_ids"] == [*ids, *free[: free.index(free[3]) + 1]]


def test_another_data_set_asks_only_what_is_new(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers belong to their question: more questions, fewer, in another order, and the same one twice."""
    asked: list[list[int]] = []
    original = Sampler.answer

    def noted(self: Sampler, rows: list[dict[str, Any]], *of: Any) -> list:
        asked.extend(row["input_ids"] for row in rows)
        return original(self, rows, *of)

    monkeypatch.setattr(Sampler, "answer", noted)

    def sampled(prompts: list[list[int]], said: list[str], folder: Path | None = None, seed: int = 0) -> Dataset:
        asked.clear()
        one = sampler(loaded, 12, 1.0, 1, seed, responses=2)
        return target_samples(one, questions(prompts), folder=folder, progress=False, say=said.append)

    said: list[str] = []
    first = sampled(PROMPTS[:2], said)
    again = sampled([PROMPTS[3], PROMPTS[1], PROMPTS[0], PROMPTS[2], PROMPTS[0]], said)
    assert sorted(asked) == sorted([PROMPTS[3], PROMPTS[2], PROMPTS[0]] * 2)
    assert [again["input_ids"][index] for index in (2, 1, 7, 6)] == first["input_ids"]
    assert again["question"] == [0, 1, 2, 3, 4] * 2
    assert again["input_ids"][2] != again["input_ids"][4], "a question that is asked twice has two answers"
    one = sampled(PROMPTS[1:2], said)
    assert asked == []
    assert one["input_ids"] == [first["input_ids"][1], first["input_ids"][3]]
    assert said == ["responses: 4 of 4 are new", "responses: 6 of 10 are new", "responses: 0 of 2 are new"]
    alone = sampled([PROMPTS[3], PROMPTS[1], PROMPTS[0], PROMPTS[2], PROMPTS[0]], said, folder=tmp_path / "alone")
    assert alone.to_list() == again.to_list()
    sampled(PROMPTS[:2], said, seed=1)
    assert len(asked) == 4, "another seed gives other answers"


def test_answers_of_a_killed_run_are_kept_for_another_data_set(
    loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, count = Sampler.answer, [0]

    def killed(self: Sampler, *of: Any) -> list:
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        return original(self, *of)

    said: list[str] = []
    monkeypatch.setattr(Sampler, "answer", killed)
    for prompts, size in ((PROMPTS, 1), ([*PROMPTS, [7, 7]], 2)):
        if size == 1:
            with pytest.raises(KeyboardInterrupt):
                target_samples(sampler(loaded, 12, 1.0, size, 0), questions(prompts), progress=False)
        else:
            target_samples(sampler(loaded, 12, 1.0, size, 0), questions(prompts), progress=False, say=said.append)
    assert said == ["responses: 3 of 5 are new"]


def test_progress_moves_in_every_round(
    loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All prompts are one part; the bar shows some of them as answered before the part ends."""
    monkeypatch.setattr(Bars, "seconds", 0.001)
    target_samples(sampler(loaded, 60, 1.0, 4, 0), questions())
    lines = [line.split() for line in capsys.readouterr().err.splitlines() if line.startswith("sampling")]
    assert {"1/4", "2/4"} & {word for line in lines for word in line}
    assert all(line[-1] == "left" for line in lines)
    one, shares = sampler(loaded, 12, 1.0, 4, 0), list[float]()
    one.advance = shares.append
    one.answer([{"input_ids": ids, "turns": ""} for ids in PROMPTS], [0, 1, 2, 3])
    assert max(shares) <= 1 / 12 + 1e-9
    assert 1 < sum(shares) <= 4 + 1e-9


def test_the_key_of_samples_knows_the_config_and_the_end_of_answers(loaded: LoadedTarget) -> None:
    first = samples_key(sampler(loaded, 12, 1.0, 1, 0), questions())
    scaled = LoadedTarget(make_llama(rope_parameters=YARN), loaded.tokenizer, "tiny", None)
    assert samples_key(sampler(scaled, 12, 1.0, 1, 0), questions()) != first
    loaded.model.generation_config.eos_token_id = [1]
    assert samples_key(sampler(loaded, 12, 1.0, 1, 0), questions()) == first
    loaded.model.generation_config.eos_token_id = [1, 2]
    assert samples_key(sampler(loaded, 12, 1.0, 1, 0), questions()) != first


def test_sampling_continues_after_the_last_part(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill in the third of four parts two are kept, and the final text is that of an uninterrupted run."""
    whole = target_samples(sampler(loaded, 12, 1.0, 1, 0), questions(), folder=tmp_path / "whole", progress=False)
    original, answered = Sampler.answer, []

    def killed(self: Sampler, rows: list, indices: list[int], response: int) -> list:
        answered.append(indices)
        if len(answered) == 3:
            raise KeyboardInterrupt
        return original(self, rows, indices, response)

    monkeypatch.setattr(Sampler, "answer", killed)
    with pytest.raises(KeyboardInterrupt):
        target_samples(sampler(loaded, 12, 1.0, 1, 0), questions(), folder=tmp_path / "torn", progress=False)
    resumed = target_samples(sampler(loaded, 12, 1.0, 1, 0), questions(), folder=tmp_path / "torn", progress=False)
    assert answered[2] == answered[3], "the part in hand alone is lost"
    assert len(answered) == 5
    assert resumed.to_list() == whole.to_list()
    assert not (tmp_path / "torn.parts").exists()


def test_the_key_of_samples_knows_the_template_of_later_turns(loaded: LoadedTarget) -> None:
    """Conversations may have equal first prompts and different later ones."""
    turns = json.dumps({"turns": [[{"role": "user", "content": "a"}]] * 2, "tools": None})
    asked = questions().remove_columns("turns").add_column("turns", [turns] * len(PROMPTS))
    loaded.tokenizer.chat_template = TEMPLATE
    first = samples_key(sampler(loaded, 12, 1.0, 1, 0), asked)
    assert first == samples_key(sampler(loaded, 12, 1.0, 1, 0), asked)
    plain = samples_key(sampler(loaded, 12, 1.0, 1, 0), questions())
    loaded.tokenizer.chat_template = TEMPLATE + " "
    assert samples_key(sampler(loaded, 12, 1.0, 1, 0), asked) != first
    assert samples_key(sampler(loaded, 12, 1.0, 1, 0), questions()) == plain, "plain text goes through no template"


def test_a_full_disk_keeps_the_parts_before(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, written = Dataset.to_parquet, []

    def full(self: Dataset, path: Path) -> None:
        written.append(path)
        if len(written) == 3:
            path.write_bytes(b"torn")
            raise OSError(28, "No space left on device")
        original(self, path)

    monkeypatch.setattr(Dataset, "to_parquet", full)
    folder = tmp_path / "full"
    with pytest.raises(
        DraftsmithError, match=r"part-00002.* cannot be written .*No space left.* finished parts are kept"
    ):
        target_samples(sampler(loaded, 12, 1.0, 1, 0), questions(), folder=folder, progress=False)
    assert sorted(file.name for file in (tmp_path / "full.parts").glob("*.[!j]*")) == [
        "part-00000.parquet",
        "part-00001.parquet",
    ]
    assert len(target_samples(sampler(loaded, 12, 1.0, 1, 0), questions(), folder=folder, progress=False)) == 4
    assert len(written) == 5


def test_processes_share_the_parts(loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes in turn: the second samples only its own parts, and the first joins all parts."""
    alone = target_samples(sampler(loaded, 12, 1.0, 1, 0), questions(), folder=tmp_path / "alone", progress=False)
    done: list[list[int]] = []
    original = Sampler.answer
    monkeypatch.setattr(Sampler, "answer", lambda self, *of: (done.append(of[1]), original(self, *of))[1])
    folder = tmp_path / "shared"

    class _Later(Exception):
        pass

    waited: list[int] = []

    def waits() -> None:
        waited.append(len(done))
        if len(waited) == 2:
            raise _Later

    with pytest.raises(_Later):
        target_samples(sampler(loaded, 12, 1.0, 1, 0), questions(), folder=folder, share=Share(1, 2, waits))
    assert waited == [0, 2], "before all see the same, and after the parts"
    both = target_samples(sampler(loaded, 12, 1.0, 1, 0), questions(), folder=folder, share=Share(0, 2))
    assert both.to_list() == alone.to_list()
    assert sorted(done) == [[0], [1], [2], [3]]


def test_sampling_follows_the_targets_distribution(loaded: LoadedTarget) -> None:
    count = 4000
    rows = sampler(loaded, 1, 1.0, 500, 0).answer([{"input_ids": [5, 6], "turns": ""}] * count, list(range(count)))
    share = torch.bincount(torch.tensor([row["input_ids"][2] for row in rows]), minlength=64) / count
    with torch.inference_mode():
        p = loaded.model(torch.tensor([[5, 6]])).logits[0, -1].softmax(-1)
    # Six standard deviations of each share: a false failure over 64 tokens has a probability below 1e-6.
    assert ((share - p).abs() < 6 * (p * (1 - p) / count).sqrt() + 1e-3).all()


def test_a_drafter_makes_sampling_no_different(loaded: LoadedTarget) -> None:
    drafter = DraftModel(make_llama())
    alone, drafted = sampler(loaded, 12, 0.0, 4, 0), sampler(loaded, 12, 0.0, 4, 0, drafter=drafter)
    rows = [{"input_ids": ids, "turns": ""} for ids in PROMPTS]
    assert alone.answer(rows, [0, 1, 2, 3]) == drafted.answer(rows, [0, 1, 2, 3])
    assert alone.tokens / alone.rounds == 1
    assert drafted.tokens / drafted.rounds > 1


def test_the_drafter_answers_its_share(loaded: LoadedTarget) -> None:
    """Greedy decoding shows which model wrote a response: the drafter's are its own greedy text."""
    drafter = DraftModel(make_llama(5))
    count = 60
    rows = [{"input_ids": [3 + i], "turns": ""} for i in range(count)]
    found = sampler(loaded, 8, 0.0, 60, 0, 0.5, drafter=drafter).answer(rows, list(range(count)))
    by = {"target": 0, "drafter": 0}
    for row in found:
        for name, model in (("target", loaded.model), ("drafter", drafter.model)):
            ids = torch.tensor([row["input_ids"][:1]])
            text = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=1)[0].tolist()
            by[name] += text == row["input_ids"]
    assert sum(by.values()) == count
    assert 15 < by["drafter"] < 45
    with pytest.raises(ConfigError, match=r"drafter_share=0\.5 with drafter\.type='medusa'; expected a 'draft_model'"):
        sampler(loaded, 8, 0.0, 60, 0, 0.5, drafter=Medusa.from_target(loaded.model))


def test_each_response_has_later_turns_of_its_own(loaded: LoadedTarget, tmp_path: Path) -> None:
    loaded.tokenizer.chat_template = TEMPLATE
    turns = [[{"role": "user", "content": "ab"}], [{"role": "user", "content": "cd"}]]
    rows = [
        {
            "input_ids": Chat(loaded.tokenizer).plain("UabA"),
            "spans": [],
            "opening": "ab",
            "turns": json.dumps({"turns": turns, "tools": None}),
            "images": "",
        }
    ]
    asked = Dataset.from_list(rows, features=FEATURES)
    several = sampler(loaded, 5, 1.0, 2, 0, responses=3)
    found = target_samples(several, asked, folder=tmp_path / "answers", progress=False)
    said = [json.loads(messages) for messages in found["messages"]]
    said = [messages for messages in said if len(messages) == 4]  # an answer that a template shows otherwise is alone
    assert len(said) == 3
    assert len({messages[1]["content"] for messages in said}) == 3


def test_later_turns_are_asked_after_the_targets_own_answers(loaded: LoadedTarget) -> None:
    tokenizer = loaded.tokenizer
    tokenizer.chat_template = TEMPLATE
    turns = [[{"role": "user", "content": "ab"}], [{"role": "user", "content": "cd"}]]
    asked = json.dumps({"turns": turns, "tools": None})
    first = Chat(tokenizer).plain("UabA")
    rows = sampler(loaded, 5, 0.0, 2, 0).answer([{"input_ids": first, "turns": asked}], [7])
    answer = loaded.model.generate(torch.tensor([first]), max_new_tokens=5, do_sample=False, pad_token_id=0)[0]
    text = tokenizer.decode(answer[len(first) :], skip_special_tokens=True)
    again = Chat(tokenizer).plain(f"UabA{text}EUcdA")
    second = loaded.model.generate(torch.tensor([again]), max_new_tokens=5, do_sample=False, pad_token_id=0)[0]
    assert rows == [
        {
            "input_ids": second.tolist(),
            "spans": [[len(first), len(answer)], [len(again), len(second)]],
            "question": 7,
            "messages": rows[0]["messages"],
        }
    ]

    said = json.loads(rows[0]["messages"])
    assert [message["role"] for message in said] == ["user", "assistant"] * 2
    assert said[1]["content"] == text


def test_samples_that_do_not_fit_the_context_are_refused(loaded: LoadedTarget) -> None:
    with pytest.raises(ConfigError, match=r"response_tokens=132; expected at most the target's context of 128"):
        target_samples(sampler(loaded, 128, 1.0, 3, 0), questions())


def test_packing_keeps_every_sample_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 40, (200,), generator=generator).tolist()
    samples = [torch.randint(2, 64, (length,), generator=generator).tolist() for length in lengths]
    rows = Dataset.from_list([{"input_ids": ids, "spans": [[0, 1], [0, len(ids)]]} for ids in samples])
    packed = pack(rows, 64)
    assert sum(lengths) / (64 * len(packed)) > 0.97
    found = []
    for row in packed:
        assert len(row["input_ids"]) == sum(row["documents"]) <= 64
        begin, spans = 0, []
        for length in row["documents"]:
            found.append(row["input_ids"][begin : begin + length])
            spans.append([begin + 1, begin + length])
            begin += length
        assert row["spans"] == spans, "a document's first token has nothing before it"
    assert sorted(found) == sorted(samples)
    assert len(pack(rows, 10)) >= sum(length > 5 for length in lengths), "longer ones have rows of their own"


def test_length_statistics() -> None:
    rows = Dataset.from_list([{"input_ids": list(range(n)), "spans": [[1, 2], [3, n]]} for n in range(4, 104)])
    statistics = length_statistics(rows)
    assert statistics == LengthStatistics(samples=100, tokens=5350, trained=5150, p5=9, p50=54, p95=99, longest=103)


def test_teacher_states_give_the_targets_logits(tiny_target: LlamaForCausalLM) -> None:
    teacher = OnlineTeacher(tiny_target)
    ids = torch.randint(2, 64, (2, 9))
    attention = torch.ones_like(ids)
    attention[1, 6:] = 0
    signals = teacher.signals(ids, attention, torch.ones(2, 9, dtype=torch.bool))
    logits = tiny_target(ids, attention_mask=attention).logits
    torch.testing.assert_close(teacher.lm_head(signals.hidden_BTH)[attention.bool()], logits[attention.bool()])
    assert not signals.hidden_BTH.requires_grad


TINY = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "initializer_range": 0.3}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    "options",
    [{}, {"init": "target_layers", "lora_rank": 2}, {"config": {"model_type": "gemma2", "head_dim": 4, **TINY}}],
    ids=["random", "pruned", "config"],
)
def test_p_and_q_are_soft_capped_where_the_models_are(options: dict[str, Any]) -> None:
    """Loss and gradient equal those from the logits of full forward passes of both models."""
    torch.manual_seed(0)
    config = Gemma2Config(**TINY, head_dim=8, final_logit_softcapping=2.0, attn_logit_softcapping=1.0)
    target = Gemma2ForCausalLM(config).double().eval().requires_grad_(False)
    drafter = DraftModel.from_target(target, **options).double().eval()
    ids_BT = torch.randint(2, 64, (2, 9))
    teacher = OnlineTeacher(target)
    signals = teacher.signals(ids_BT, torch.ones_like(ids_BT), torch.ones_like(ids_BT, dtype=torch.bool))
    sums = Objective()(drafter.unroll(signals), signals, teacher.lm_head)
    p_log, q_log = (model(ids_BT).logits.log_softmax(-1) for model in (target, drafter.model))
    plain = (p_log.exp() * (p_log - q_log)).sum()
    torch.testing.assert_close(sums.loss, plain)
    trained = [weight for weight in drafter.parameters() if weight.requires_grad]
    for ours, theirs in zip(*(torch.autograd.grad(loss, trained) for loss in (sums.loss, plain)), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert float((p_log.exp() - teacher.lm_head.lm_head(signals.hidden_BTH).softmax(-1)).abs().max()) > 0.1


def test_missing_targets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        load_target(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"target\.dtype='int3'; expected one of float32"):
        load_target(str(tmp_path), dtype="int3")
    with pytest.raises(ConfigError, match="expected 'embedded', a local folder, a GGUF file or a Hub id"):
        load_target(str(tmp_path))


def test_a_target_has_the_given_attention_implementation(tiny_target_folder: Path) -> None:
    name = str(tiny_target_folder)
    assert load_target(name).model.config._attn_implementation == "sdpa"
    assert load_target(name, attn_implementation="eager").model.config._attn_implementation == "eager"
    for wrong, message in {
        "flex_attention": r"'flex_attention'; expected sdpa, eager, flash_attention_2",
        "user/flash-attn": r"'user/flash-attn'; expected sdpa, eager, flash_attention_2",
        "flash_attention_2": r"flash_attention_2 with dtype=float32; expected bfloat16 or float16",
    }.items():
        with pytest.raises(ConfigError, match=rf"target\.attn_implementation=.?{message}"):
            load_target(name, attn_implementation=wrong)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"attn_implementation=flash_attention_2; expected one that target="):
            load_target(name, attn_implementation="flash_attention_2", dtype="bfloat16")
