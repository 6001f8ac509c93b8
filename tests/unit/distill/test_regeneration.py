"""Responses that are sampled from the target, their cache, and runs that continue."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import YARN, make_llama
from datasets import Dataset

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.distill.answered import sampling_key
from draftsmith.distill.chat_template import Chat
from draftsmith.distill.data_section import DataSection
from draftsmith.distill.dataset import FEATURES
from draftsmith.distill.load_target import LoadedTarget
from draftsmith.distill.regeneration import Sampler, Share, sampling_counts, target_samples
from draftsmith.distill.server.answers import KEPT
from draftsmith.distill.turns import question_numbers
from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.heads import DraftModel
from draftsmith.storage import JsonLines, cache_dir, writing

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [3]]
TEMPLATE = (
    "{% for m in messages %}{{ 'U' if m.role == 'user' else 'A' }}{{ m.content }}{{ 'E' if m.role == 'assistant' }}"
    "{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)


def questions(prompts: list[list[int]] = PROMPTS) -> Dataset:
    more = {"spans": [], "turns": "", "images": ""}
    rows = [{"input_ids": ids, "opening": str(i), **more} for i, ids in enumerate(prompts)]
    return Dataset.from_list(rows, features=FEATURES)


class Batches(list[tuple[list[int], int, list[list[int]]]]):
    """The indices, the number of the response and the prompts of each batch."""

    kill: int = -1

    @property
    def prompts(self) -> list[list[int]]:
        return [prompt for *_, prompts in self for prompt in prompts]


def sampler(
    loaded: LoadedTarget, tokens: int, temperature: float, batch: int, seed: int, responses: int = 1, **options: Any
) -> Sampler:
    data = DataSection(response_tokens=tokens, temperature=temperature, batch_size=batch, responses=responses)
    return Sampler(loaded, Chat(loaded.tokenizer), data, seed, **options)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Batches:
    """The batches that samplers answer from now on; `kill` says at which one a run is killed."""
    original, batches = Sampler.complete, Batches()

    def complete(self: Sampler, texts: list, response: int, add: Any) -> None:
        batches.append(([text.index for text, _ in texts], response, [text.prompt for text, _ in texts]))
        if len(batches) == batches.kill:
            raise KeyboardInterrupt
        original(self, texts, response, add)

    monkeypatch.setattr(Sampler, "complete", complete)
    return batches


def test_greedy_samples_are_the_targets_own(loaded: LoadedTarget) -> None:
    rows = target_samples(sampler(loaded, 12, 0.0, 3, 0), questions(), progress=False)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        expected = loaded.model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert row["input_ids"] == expected[0].tolist()
        assert row["spans"] == [[len(prompt), len(row["input_ids"])]]


def test_several_responses_are_drawn_each_by_itself(loaded: LoadedTarget, tmp_path: Path, answered: Batches) -> None:
    """The first responses are those of responses=1; with more responses only new ones are drawn, also after a kill."""
    folder = tmp_path / "answers"
    alone = target_samples(sampler(loaded, 12, 1.0, 3, 0), questions(), folder=tmp_path / "alone", progress=False)
    answered.clear()
    answered.kill = 6  # each response to four questions is two batches
    two = target_samples(sampler(loaded, 12, 1.0, 3, 0, responses=2), questions(), folder=folder, progress=False)
    with pytest.raises(KeyboardInterrupt):
        target_samples(sampler(loaded, 12, 1.0, 3, 0, responses=4), questions(), folder=folder, progress=False)
    four = target_samples(sampler(loaded, 12, 1.0, 3, 0, responses=4), questions(), folder=folder, progress=False)
    assert [response for _, response, _ in answered] == [0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert two.to_list()[:4] == alone.to_list()
    assert four.to_list()[:8] == two.to_list()
    assert four["question"] == [0, 1, 2, 3] * 4
    assert len({tuple(ids) for ids in four["input_ids"]}) == 16
    key = sampling_key(sampler(loaded, 12, 1.0, 3, 0), questions())
    assert key == sampling_key(sampler(loaded, 12, 1.0, 3, 0, responses=2), questions())


def test_samples_are_cached_by_target_and_settings(loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    first = target_samples(sampler(loaded, 12, 1.0, 9, 0), questions(), progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "complete", lambda *_: pytest.fail("the responses are on disk"))
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


def test_another_data_set_asks_only_what_is_new(loaded: LoadedTarget, tmp_path: Path, answered: Batches) -> None:
    """Answers belong to their question: more questions, fewer, in another order, and the same one twice."""
    said: list[str] = []

    def sampled(prompts: list[list[int]], folder: Path | None = None, seed: int = 0) -> Dataset:
        answered.clear()
        one = sampler(loaded, 12, 1.0, 1, seed, responses=2)
        return target_samples(one, questions(prompts), folder=folder, progress=False, say=said.append)

    more = [PROMPTS[3], PROMPTS[1], PROMPTS[0], PROMPTS[2], PROMPTS[0]]
    first = sampled(PROMPTS[:2])
    again = sampled(more)
    assert sorted(answered.prompts) == sorted([PROMPTS[3], PROMPTS[2], PROMPTS[0]] * 2)
    assert [again["input_ids"][index] for index in (2, 1, 7, 6)] == first["input_ids"]
    assert again["question"] == [0, 1, 2, 3, 4] * 2
    assert again["input_ids"][2] != again["input_ids"][4], "a question that is asked twice has two answers"
    one = sampled(PROMPTS[1:2])
    assert answered == []
    assert one["input_ids"] == [first["input_ids"][1], first["input_ids"][3]]
    assert said == ["responses: 4 of 4 are new", "responses: 6 of 10 are new", "responses: 0 of 2 are new"]
    assert sampled(more, folder=tmp_path / "alone").to_list() == again.to_list()
    sampled(PROMPTS[:2], seed=1)
    assert len(answered) == 4, "another seed gives other answers"


def test_answers_of_a_killed_run_are_kept_for_another_data_set(loaded: LoadedTarget, answered: Batches) -> None:
    said: list[str] = []
    answered.kill = 3
    with pytest.raises(KeyboardInterrupt):
        target_samples(sampler(loaded, 12, 1.0, 1, 0), questions(), progress=False)
    more = questions([*PROMPTS, [7, 7]])
    target_samples(sampler(loaded, 12, 1.0, 2, 0), more, progress=False, say=said.append)
    assert said == ["responses: 3 of 5 are new"]


def test_the_key_of_samples_knows_the_config_and_the_end_of_answers(loaded: LoadedTarget) -> None:
    first = sampling_key(sampler(loaded, 12, 1.0, 1, 0), questions())
    scaled = LoadedTarget(make_llama(rope_parameters=YARN), loaded.tokenizer, "tiny", None)
    assert sampling_key(sampler(scaled, 12, 1.0, 1, 0), questions()) != first
    loaded.model.generation_config.eos_token_id = [1]
    assert sampling_key(sampler(loaded, 12, 1.0, 1, 0), questions()) == first
    loaded.model.generation_config.eos_token_id = [1, 2]
    assert sampling_key(sampler(loaded, 12, 1.0, 1, 0), questions()) != first


def test_sampling_continues_after_the_last_batch(loaded: LoadedTarget, tmp_path: Path, answered: Batches) -> None:
    """After a kill in the third of four batches two are kept, and the final text is that of an uninterrupted run."""
    whole = target_samples(sampler(loaded, 12, 1.0, 1, 0), questions(), folder=tmp_path / "whole", progress=False)
    answered.clear()
    answered.kill = 3
    with pytest.raises(KeyboardInterrupt):
        target_samples(sampler(loaded, 12, 1.0, 1, 0), questions(), folder=tmp_path / "torn", progress=False)
    resumed = target_samples(sampler(loaded, 12, 1.0, 1, 0), questions(), folder=tmp_path / "torn", progress=False)
    assert answered[2] == answered[3], "the batch in hand alone is lost"
    assert len(answered) == 5
    assert resumed.to_list() == whole.to_list()
    for key in ("tokens", "rounds", "tau"):
        assert sampling_counts(tmp_path / "torn")[key] == sampling_counts(tmp_path / "whole")[key]


def test_the_key_of_samples_knows_the_template_of_later_turns(loaded: LoadedTarget) -> None:
    """Conversations may have equal first prompts and different later ones."""
    turns = json.dumps({"turns": [[{"role": "user", "content": "a"}]] * 2, "tools": None})
    asked = questions().remove_columns("turns").add_column("turns", [turns] * len(PROMPTS))
    loaded.tokenizer.chat_template = TEMPLATE
    first = sampling_key(sampler(loaded, 12, 1.0, 1, 0), asked)
    assert first == sampling_key(sampler(loaded, 12, 1.0, 1, 0), asked)
    plain = sampling_key(sampler(loaded, 12, 1.0, 1, 0), questions())
    loaded.tokenizer.chat_template = TEMPLATE + " "
    assert sampling_key(sampler(loaded, 12, 1.0, 1, 0), asked) != first
    assert sampling_key(sampler(loaded, 12, 1.0, 1, 0), questions()) == plain, "plain text goes through no template"


def test_a_full_disk_keeps_the_answers_before(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, written = JsonLines.append, list[Any]()

    def full(self: JsonLines, value: dict[str, Any]) -> int:
        written.extend([value] * ("answer" in value))
        if len(written) == 3:
            with writing(self.path, KEPT):
                raise OSError(28, "No space left on device")
        return original(self, value)

    monkeypatch.setattr(JsonLines, "append", full)
    folder = tmp_path / "full"
    with pytest.raises(DraftsmithError, match=r"answers-0.* cannot be written .*No space left.* so far are kept"):
        target_samples(sampler(loaded, 12, 1.0, 1, 0), questions(), folder=folder, progress=False)
    assert len(target_samples(sampler(loaded, 12, 1.0, 1, 0), questions(), folder=folder, progress=False)) == 4
    assert len(written) == 5


TURNS = json.dumps({"turns": [[{"role": "user", "content": "ab"}], [{"role": "user", "content": "cd"}]], "tools": None})


def test_a_conversation_continues_with_the_turn_that_was_not_answered(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded.tokenizer.chat_template = TEMPLATE
    row = {"input_ids": Chat(loaded.tokenizer).plain("UabA"), "spans": [], "opening": "", "turns": TURNS, "images": ""}
    asked = Dataset.from_list([row], features=FEATURES)
    original, turns = Sampler._decode, []

    def killed(self: Sampler, texts: list, response: int) -> list:
        turns.extend(turn for _, turn in texts)
        if len(turns) == 4:
            raise KeyboardInterrupt
        return original(self, texts, response)

    monkeypatch.setattr(Sampler, "_decode", killed)
    whole = target_samples(sampler(loaded, 5, 1.0, 1, 0), asked, folder=tmp_path / "whole", progress=False)
    with pytest.raises(KeyboardInterrupt):
        target_samples(sampler(loaded, 5, 1.0, 1, 0), asked, folder=tmp_path / "torn", progress=False)
    torn = target_samples(sampler(loaded, 5, 1.0, 1, 0), asked, folder=tmp_path / "torn", progress=False)
    assert turns == [0, 1, 0, 1, 1]
    assert torn.to_list() == whole.to_list()


def test_answers_that_earlier_versions_stored_are_read(loaded: LoadedTarget) -> None:
    """They kept a data set for each response, and parts while they sampled."""
    one = sampler(loaded, 12, 1.0, 1, 0, responses=2)
    rows = target_samples(one, questions(), progress=False)
    numbers = question_numbers(questions())
    cache = cache_dir() / "samples" / one.target_key(questions())
    shutil.rmtree(cache)
    stored = rows.add_column("number", numbers * 2)
    stored.select(range(4)).save_to_disk(cache / "earlier" / "rows")
    (cache / "earlier-1.parts").mkdir()
    stored.select(range(4, 7)).to_parquet(cache / "earlier-1.parts" / "part-00000.parquet")
    said: list[str] = []
    again = target_samples(one, questions(), progress=False, say=said.append)
    assert said == ["responses: 1 of 8 are new"]
    assert again.to_list() == rows.to_list()


def test_processes_share_the_batches(loaded: LoadedTarget, tmp_path: Path, answered: Batches) -> None:
    """Two processes in turn: the second samples only its own batches, and the first joins all answers."""
    alone = target_samples(sampler(loaded, 12, 1.0, 1, 0), questions(), folder=tmp_path / "alone", progress=False)
    answered.clear()
    folder = tmp_path / "shared"

    class _Later(Exception):
        pass

    waited: list[int] = []

    def waits() -> None:
        waited.append(len(answered))
        if len(waited) == 2:
            raise _Later

    with pytest.raises(_Later):
        target_samples(sampler(loaded, 12, 1.0, 1, 0), questions(), folder=folder, share=Share(1, 2, waits))
    assert waited == [0, 2], "before all see the same, and after the batches"
    both = target_samples(sampler(loaded, 12, 1.0, 1, 0), questions(), folder=folder, share=Share(0, 2))
    assert both.to_list() == alone.to_list()
    assert sorted(indices for indices, *_ in answered) == [[0], [1], [2], [3]]


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
