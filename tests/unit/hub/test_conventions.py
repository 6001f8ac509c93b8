"""The self-test of imported drafters: a drafter that is read by the wrong convention is told from one that is not."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_llama, make_tokenizer, mostly_slow
from datasets import Dataset
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith import ConfigError, load_drafter
from draftsmith.decode.sampling import Sampling
from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.eval.teacher_forced import sample_texts
from draftsmith.heads import HEADS
from draftsmith.heads.base import TrainableDrafter
from draftsmith.hub.conventions import (
    PROMPTS,
    ConventionAlpha,
    mean_of_texts,
    prompts_of,
    readings_of,
    self_test_lines,
    settle,
)
from draftsmith.hub.export import export_drafter
from draftsmith.train.step import AgreementStep, Last, collate

THREE = "eagle3 of three layers"
OPTIONS: dict[str, dict[str, Any]] = {
    THREE: {"layers": [1, 2, 3], "train_steps": 2},
    "dflash": {"block_size": 4},
    "eagle3": {"layers": [1], "train_steps": 2},
    "dflash from the anchor": {"block_size": 4, "markov_rank": 4, "sample_from_anchor": True},
    "dflash from the mask": {"block_size": 4, "markov_rank": 4},
}


@cache
def fitted(kind: str) -> tuple[LlamaForCausalLM, TrainableDrafter]:
    """Return a target and a drafter that was trained on a few of its texts, such as those of the self-test."""
    target, tokenizer = make_llama(num_hidden_layers=4 if kind == THREE else 3).requires_grad_(False), make_tokenizer()
    torch.manual_seed(0)
    drafter = HEADS[kind.split()[0]].from_target(target, **OPTIONS[kind])
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    texts = sample_texts(target, prompts, Sampling(1.0), max_new_tokens=48)
    spans = [[[text.prompt_length, len(text.tokens)]] for text in texts]
    rows = Dataset.from_dict({"input_ids": [text.tokens for text in texts], "spans": spans})
    batch = collate(rows, [*range(len(texts))], torch.device("cpu"))
    step = AgreementStep(drafter, Objective(), OnlineTeacher(target, drafter.needs.layers))
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-2)
    for _ in range(160):
        optimizer.zero_grad()
        step(batch, 0.0, Last()).loss.backward()
        optimizer.step()
    return target, drafter.eval()


CASES: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "first position": ("dflash", lambda config: config.update(sample_from_anchor=True), "sample_from_anchor=False"),
    "layers": ("eagle3", lambda config: config.update(eagle_aux_hidden_state_layer_ids=[2]), "layer ids one lower"),
    "one layer": (
        THREE,
        lambda config: config.update(eagle_aux_hidden_state_layer_ids=[1, 2, 4]),
        "layer id 3 in place of 4",
    ),
    "order of layers": (
        THREE,
        lambda config: config.update(eagle_aux_hidden_state_layer_ids=[3, 2, 1]),
        "layer ids in reverse",
    ),
}


@pytest.mark.parametrize("name", mostly_slow(CASES, "first position"))
def test_the_right_convention_is_found(name: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Of a drafter in vLLM's layout, read as it was written and after a change that no reader can see."""
    kind, change, convention = CASES[name]
    target, fit = fitted(kind)
    folder = export_drafter(fit, target, "vllm", tmp_path / "theirs", target_name="tiny").folder
    drafter = load_drafter(folder, target)
    prompts, _ = prompts_of(None, tiny_tokenizer, None)
    right, *others = readings_of(target, drafter, prompts)
    assert not any(reading.better for reading in others), others
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    drafter = load_drafter(folder, target)
    assert not any(reading.better for reading in readings_of(target, drafter, prompts[:5])), "of too few texts"
    wrong, *others = readings_of(target, drafter, prompts)
    found = {reading.convention: reading for reading in others}
    assert found[convention].better, found
    shared = len(right.alphas)  # with the first position, a block proposes one token more
    assert found[convention].alphas[:shared] == pytest.approx(right.alphas)
    _, line = self_test_lines([wrong, *others])
    assert f"with {convention}, a gain of 0." in line, "the best of those that are better"
    again = readings_of(target, drafter, prompts)[0]
    assert again.alphas == pytest.approx(wrong.alphas), "the drafter is left as it was"


UNSTATED = {
    "dflash from the anchor": ("sample_from_anchor", True),
    "dflash from the mask": ("sample_from_anchor", False),
}


@pytest.mark.parametrize("name", mostly_slow(UNSTATED, "dflash from the mask"))
def test_a_missing_key_that_engines_replace_differently_is_settled(
    name: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """By the text of the target, or it is refused; nothing is assumed without the self-test."""
    (key, value), (target, fit) = UNSTATED[name], fitted(name)
    folder = export_drafter(fit, target, "vllm", tmp_path / "theirs", target_name="tiny").folder
    config = json.loads((folder / "config.json").read_text())
    assert config.pop(key) is value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"{key} is missing in config.json, and engines replace it by different"):
        load_drafter(folder, target)
    drafter = load_drafter(folder, target, unstated=True)
    prompts, _ = prompts_of(None, tiny_tokenizer, None)
    for few in (prompts[:5], [], [[]]):
        with pytest.raises(ConfigError, match=f"{key} is missing in config.json, and the self-test does not show it"):
            settle(drafter, readings_of(target, drafter, few))
    (line,) = settle(drafter, readings_of(target, drafter, prompts))
    assert f"{key} is missing in config.json; {str(value).lower()} fits the target's text (alpha 0." in line
    read = {"anchors": 64, "mask_token": drafter.mask_token, "plain_target": True}
    assert drafter.options() == {**fit.options(), **read}
    assert drafter.max_draft_length == fit.max_draft_length


def test_windows_whose_rule_is_missing_are_refused(tmp_path: Path) -> None:
    """Engines differ without the key, and nothing is guessed."""
    target = make_llama(num_hidden_layers=3).requires_grad_(False)
    drafter = HEADS["dflash"].from_target(target, block_size=4)
    folder = export_drafter(drafter, target, "vllm", tmp_path / "theirs", target_name="tiny").folder
    config = json.loads((folder / "config.json").read_text())
    windows = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3, "use_sliding_window": True}
    config["transformer_layer_config"] |= windows
    config.pop("sliding_window_non_causal", None)
    (folder / "config.json").write_text(json.dumps(config))
    for unstated in (False, True):
        with pytest.raises(ConfigError, match=r"no sliding_window_non_causal in config\.json, .*; expected true or"):
            load_drafter(folder, target, unstated=unstated)


def test_the_prompts_go_through_the_chat_template(tmp_path: Path) -> None:
    """Also those of a file; without a template, texts are continued."""
    tokenizer, file = make_tokenizer(), tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": [f"question {number}"]}) + "\n" for number in range(40)))
    assert prompts_of(None, tokenizer, None)[0] == [tokenizer(text)["input_ids"] for text in PROMPTS]
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}a:"
    asked = [tokenizer(f"<user>{text}a:", add_special_tokens=False)["input_ids"] for text in PROMPTS]
    assert prompts_of(None, tokenizer, None)[0] == asked
    of_file, _ = prompts_of(str(file), tokenizer, None)
    assert of_file == [
        tokenizer(f"<user>question {number}a:", add_special_tokens=False)["input_ids"] for number in range(32)
    ]
    other = tmp_path / "other.jinja"
    other.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    for source, text in ((None, PROMPTS[0]), (str(file), "question 0")):
        asked = tokenizer(f"[{text}]", add_special_tokens=False)["input_ids"]
        assert prompts_of(source, tokenizer, None, str(other))[0][0] == asked


def test_positions_of_a_text_are_not_independent() -> None:
    """Equal ones count as one: the standard error of six numbers, and no interval for five."""
    values = [0.0, 0.1, 0.2, 0.3, 0.4, 0.8]
    mean, error = mean_of_texts([np.full(10, value) for value in values])
    assert (mean, error) == pytest.approx((0.3, np.std(values, ddof=1) / 6**0.5))
    assert mean_of_texts([np.ones(10)] * 5) == (1.0, float("inf"))


def test_an_alpha_far_below_that_of_such_drafters() -> None:
    """As that of a shifted lm_head, which no convention explains."""
    own, other = (
        ConventionAlpha("as read", (0.085, 0.091), 300, 8),
        ConventionAlpha("another", (0.084, 0.09), 300, 8, -0.001, 0.01),
    )
    first, line = self_test_lines([own, other])
    assert first == "self-test: alpha 0.085 at the first draft position and 0.091 at position 2, 300 tokens of 8 texts"
    assert line.startswith("warning: alpha 0.085 is far below that of published drafters (at least 0.25), and no")
    assert len(self_test_lines([replace(own, alphas=(0.3, 0.2)), other])) == 1
    named = (("best", (0.5, 0.4)), ("next", (0.5, 0.3)))
    best, second = (ConventionAlpha(name, alphas, 300, 8, sum(alphas) / 2 - 0.088, 0.3) for name, alphas in named)
    unsure = ConventionAlpha("unsure", (0.6, 0.5), 300, 8, 0.46, 0.47)
    _, line = self_test_lines([own, second, best, unsure])
    said = "warning: alpha would be 0.500 at the first draft position and 0.400 at position 2 with best, a gain of "
    assert line.startswith(f"{said}0.362 ± 0.300:")
    assert self_test_lines([]) == []


@pytest.mark.parametrize(("context", "tokens"), [(12, 0), (20, 1), (60, 100)])
def test_short_contexts_limit_the_texts(context: int, tokens: int, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Prompts of 16 to 36 tokens; an import does not fail for want of room."""
    target = make_llama(max_position_embeddings=context, eos_token_id=None).requires_grad_(False)
    drafter = HEADS["eagle3"].from_target(target, layers=[1])
    found = readings_of(target, drafter, prompts_of(None, tiny_tokenizer, None)[0])
    assert bool(found) == (tokens > 0)
    assert all(reading.tokens >= tokens for reading in found)
