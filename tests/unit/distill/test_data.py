"""Prompts, samples and the teacher: what training is fed."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from conftest import make_llama
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.distill import samples as samples_module
from draftsmith.distill.jsonl import answered_ids, conversation, prompt_ids, read_rows
from draftsmith.distill.samples import ExampleSettings, SampleSettings, target_samples, training_examples
from draftsmith.distill.targets import LoadedTarget, load_target
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.errors import ConfigError


def test_bad_files_are_refused_with_the_line(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    with pytest.raises(ConfigError, match="there is none"):
        read_rows(file)
    file.write_text("\n\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_rows(file)
    file.write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(ConfigError, match=r"p\.jsonl:2: not JSON"):
        read_rows(file)
    file.write_text('{"prompt": "a"}\n\n[1]\n')
    with pytest.raises(ConfigError, match=r"p\.jsonl:3: list"):
        read_rows(file)
    with pytest.raises(ConfigError, match=r"p\.jsonl:4: keys \['answer'\]"):
        conversation(file, 4, {"answer": "x"})


def test_gzip_and_all_layouts_are_read(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl.gz"
    rows = [{"prompt": "a"}, {"turns": ["b", "c"]}, {"question": "d"}]
    messages = [{"role": "user", "content": "e"}, {"role": "assistant", "content": "f"}]
    rows.append({"messages": messages})
    with gzip.open(file, "wt") as out:
        out.write("\n".join(json.dumps(row) for row in rows))
    asked = [conversation(file, number, row) for number, row in read_rows(file)]
    assert asked == ["a", [{"role": "user", "content": "b"}], "d", messages[:1]]


@pytest.fixture
def loaded(tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> LoadedTarget:
    return LoadedTarget(tiny_target, tiny_tokenizer, "tiny", None)


def test_answers_of_a_file(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    ids = tiny_tokenizer("abcdef")["input_ids"]
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    for row in ({"prompt": "ab", "response": "cd"}, {"messages": messages}):
        assert answered_ids(tiny_tokenizer, file, 1, row, 9) == (ids[:2], [*ids[2:4], 1])
    assert answered_ids(tiny_tokenizer, file, 1, {"text": "abcdef"}, 2) == (ids[:2], ids[2:])
    assert answered_ids(tiny_tokenizer, file, 1, {"text": "abcdef"}, 9) == (ids[:3], ids[3:])
    with pytest.raises(ConfigError, match=r"p\.jsonl:7: no answer"):
        answered_ids(tiny_tokenizer, file, 7, {"prompt": "ab"}, 9)


def test_chat_template_is_used_for_messages(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    asked = [{"role": "user", "content": "ab"}]
    plain = prompt_ids(tiny_tokenizer, asked)
    tiny_tokenizer.chat_template = (
        "{% for m in messages %}U{{ m.content }}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
    )
    letters = tiny_tokenizer("UA")["input_ids"]
    assert prompt_ids(tiny_tokenizer, asked) == [letters[0], *plain, letters[1]]


def test_long_prompts_are_left_out_and_counted(loaded: LoadedTarget, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"prompt": "a" * length}) + "\n" for length in (3, 9, 4, 200)))
    said: list[str] = []
    settings = ExampleSettings(str(file), 10, 5, 8, False, 0)
    examples = training_examples(loaded, settings, said.append)
    assert [len(example.prompt) for example in examples] == [3, 4]
    assert said == [f"2 of 4 prompts of {file} are longer than 5 tokens: left out"]
    with pytest.raises(ConfigError, match=r"data\.prompt_tokens=2; expected room for at least one prompt"):
        training_examples(loaded, ExampleSettings(str(file), 10, 2, 8, False, 0), said.append)


PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [3]]


def test_greedy_samples_are_the_targets_own(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    rows = target_samples(loaded, PROMPTS, SampleSettings(12, 0.0, 3, 0), progress=False)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        expected = loaded.model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert row["input_ids"] == expected[0].tolist()
        assert row["prompt_length"] == len(prompt)


def test_samples_are_cached_by_target_and_settings(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    calls = []
    original = samples_module.sample_responses
    monkeypatch.setattr(samples_module, "sample_responses", lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    first = target_samples(loaded, PROMPTS, SampleSettings(12, 1.0, 3, 0), progress=False)
    again = target_samples(loaded, PROMPTS, SampleSettings(12, 1.0, 3, 0), progress=False)
    assert [row["input_ids"] for row in first] == [row["input_ids"] for row in again]
    assert len(calls) == 1
    other = target_samples(loaded, PROMPTS, SampleSettings(12, 1.0, 3, 1), progress=False)
    assert [row["input_ids"] for row in other] != [row["input_ids"] for row in first]
    target_samples(LoadedTarget(make_llama(3), loaded.tokenizer, "tiny", None), PROMPTS, SampleSettings(12, 1.0, 3, 0))
    assert len(calls) == 3


def test_sampling_follows_the_targets_distribution(loaded: LoadedTarget) -> None:
    count = 4000
    rows = samples_module.sample_responses(loaded, [[5, 6]] * count, SampleSettings(1, 1.0, 500, 0), progress=False)
    share = torch.bincount(torch.tensor([row["input_ids"][2] for row in rows]), minlength=64) / count
    with torch.inference_mode():
        p = loaded.model(torch.tensor([[5, 6]])).logits[0, -1].softmax(-1)
    # Six standard deviations of each share: a false failure over 64 tokens has a probability below 1e-6.
    assert ((share - p).abs() < 6 * (p * (1 - p) / count).sqrt() + 1e-3).all()


def test_samples_that_do_not_fit_the_context_are_refused(loaded: LoadedTarget) -> None:
    with pytest.raises(ConfigError, match=r"response_tokens=132; expected at most the target's context of 128"):
        target_samples(loaded, PROMPTS, SampleSettings(128, 1.0, 3, 0))


def test_teacher_states_give_the_targets_logits(tiny_target: LlamaForCausalLM) -> None:
    teacher = OnlineTeacher(tiny_target)
    ids = torch.randint(2, 64, (2, 9))
    attention = torch.ones_like(ids)
    attention[1, 6:] = 0
    signals = teacher.signals(ids, attention, torch.ones(2, 9, dtype=torch.bool))
    logits = tiny_target(ids, attention_mask=attention).logits
    torch.testing.assert_close(teacher.lm_head(signals.hidden_BTH)[attention.bool()], logits[attention.bool()])
    assert not signals.hidden_BTH.requires_grad


def test_a_target_that_caps_its_logits_is_refused() -> None:
    config = Gemma2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=0.1,
        initializer_range=0.3,
    )
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM transforms its logits behind the lm_head"):
        OnlineTeacher(Gemma2ForCausalLM(config).eval())


def test_missing_targets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        load_target(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"target\.dtype='int3'; expected one of float32"):
        load_target(str(tmp_path), dtype="int3")
    with pytest.raises(ConfigError, match="expected 'embedded', a local folder or a Hub id"):
        load_target(str(tmp_path))
