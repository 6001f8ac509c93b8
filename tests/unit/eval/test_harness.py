"""The run itself on tiny models: what is asked, in which order, and what is kept."""

import pytest
import torch
from conftest import make_llama
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.decode.costs import Costs
from draftsmith.distill.conversation import Conversation
from draftsmith.errors import ConfigError
from draftsmith.eval.baseline import compare_with_generate
from draftsmith.eval.evaluation import evaluate
from draftsmith.eval.harness import EvaluationRun
from draftsmith.eval.journal import Place
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.settings import BASELINE, Settings
from draftsmith.heads import Medusa
from draftsmith.heads.draft_model import DraftModel

SETTINGS = Settings(
    target="t",
    drafters={"d": "x"},
    prompts="p",
    max_new_tokens=6,
    draft_lengths=(2,),
    repeats=2,
    temperatures=(0.0, 1.0),
    chat_template="plain",
)


def _prompt(name: str, tokenizer: PreTrainedTokenizerFast, *turns: str, category: str = "c") -> Prompt:
    asked = Conversation(name, [{"role": "user", "content": turn} for turn in turns])
    return Prompt(name, category, tokenizer(turns[0])["input_ids"], asked if len(turns) > 1 else None)


@pytest.fixture(autouse=True)
def _no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs only decide paddings here, and speeds nothing: seconds for each test."""
    monkeypatch.setattr("draftsmith.eval.harness.measure_costs", lambda *_, **__: Costs({1: 1.0}, {1: 0.1}))
    monkeypatch.setattr("draftsmith.eval.baseline.TOKENS", 8)
    monkeypatch.setattr("draftsmith.eval.baseline.TRIALS", 1)
    monkeypatch.setattr("draftsmith.eval.baseline.PAIRS", 1)


@pytest.fixture
def prompts(tiny_tokenizer: PreTrainedTokenizerFast) -> list[Prompt]:
    return [_prompt("a", tiny_tokenizer, "abc", "de", "f"), _prompt("b", tiny_tokenizer, "hello", category="k")]


@pytest.fixture
def run(tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, prompts: list[Prompt]) -> EvaluationRun:
    found = EvaluationRun(tiny_target, {"d": DraftModel(make_llama(seed=1))}, prompts, SETTINGS, tiny_tokenizer)
    found.measure(progress=False)
    return found


def test_later_turns_follow_the_baselines_answers(run: EvaluationRun, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """In every arm, at each temperature and in each repeat: the drafter's own sampled answer is never read."""
    for temperature in (0.0, 1.0):
        for repeat in range(2):
            asked = []
            for turn in range(3):
                place = Place(repeat, temperature, 1, 0, turn)
                (prompt,) = run.asked(place)
                asked.append(tiny_tokenizer.decode(prompt.input_ids))
                own = run.journal.cells[BASELINE, place].texts[0].tokens
                seed = 10_007 * repeat + 1_000_003 * turn
                options = {"max_new_tokens": 6, "temperature": temperature, "seed": seed}
                again = run.arms[BASELINE].generate(prompt.input_ids, **options)
                assert again.tokens == own, "the text that is read is the one that was asked"
                asked.append(tiny_tokenizer.decode(own, skip_special_tokens=True))
            unknown = tiny_tokenizer.decode(tiny_tokenizer("\n")["input_ids"])
            assert asked[2] == unknown.join(["abc", asked[1], "de"])
            assert asked[4] == unknown.join(["abc", asked[1], "de", asked[3], "f"])
            assert prompt.id == "a"


def test_turns_without_room_are_left_out_in_all_arms(
    tiny_tokenizer: PreTrainedTokenizerFast, prompts: list[Prompt]
) -> None:
    """Questions alone take 8 tokens; after an answer of 6 the second has 12 and fits in 14, the third does not."""
    settings = SETTINGS.model_copy(update={"repeats": 1, "temperatures": (0.0,)})
    drafters = {"d": DraftModel(make_llama(seed=1))}
    for context, count in ((14, 1), (12, 2)):
        target = make_llama(max_position_embeddings=context)
        found = evaluate(target, drafters, prompts, settings, tokenizer=tiny_tokenizer, progress=False)
        text = f"{count} of 4 questions had no room in the context of {context} tokens"
        assert any(text in note for note in found.notes)


def test_batches_decode_what_each_prompt_gives_alone(
    tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    prompts = [_prompt(name, tiny_tokenizer, name * 3, category="x" if name > "c" else "y") for name in "abcde"]
    settings = SETTINGS.model_copy(update={"batch_sizes": (1, 2), "repeats": 1})
    run = EvaluationRun(tiny_target, {"d": DraftModel(make_llama(seed=1))}, prompts, settings, tiny_tokenizer)
    run.measure(progress=False)
    for temperature in (0.0, 1.0):
        texts = [
            {text.prompt: text.tokens for cell in run.grid.cells(arm, temperature, size) for text in cell.texts}
            for arm in (BASELINE, ("d", "chain:draft_length=2"))
            for size in (1, 2)
        ]
        assert all(set(found) == set("abcde") for found in texts)
        assert texts[0] == texts[1]
        assert texts[2] == texts[3]
    assert {cell.group for cell in run.grid.cells(BASELINE, 0.0, 2, "y")} == {1, 2}
    assert len(run.grid.cells(BASELINE, 0.0, 2)) == 3


def test_draft_lengths_that_a_drafter_does_not_reach(tiny_target: LlamaForCausalLM, prompts: list[Prompt]) -> None:
    drafters = {"d": Medusa.from_target(tiny_target, num_heads=2)}
    with pytest.raises(ConfigError, match="draft_length=3; expected at most 2"):
        EvaluationRun(tiny_target, drafters, prompts[1:], SETTINGS.model_copy(update={"draft_lengths": (3,)}))
    run = EvaluationRun(tiny_target, drafters, prompts[1:], SETTINGS.model_copy(update={"draft_lengths": (1, 3)}))
    assert run.options == {"d": [{"draft_length": 1}]}
    assert run.left_out == ["d at gamma=3: it proposes at most 2 tokens."]


def test_the_baseline_is_compared_with_generate_on_the_same_tokens(
    tiny_target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the model's own generation config says: of 40 greedy tokens of 64 some come twice.

    Six texts, after one to warm up, are enough where all of their ratios are on one side of the limit.
    """
    monkeypatch.setattr("draftsmith.eval.baseline.TOKENS", 40)
    monkeypatch.setattr("draftsmith.eval.baseline.PAIRS", 12)
    monkeypatch.setattr("draftsmith.eval.baseline.SLOWER_THAN_GENERATE", 0.0)
    asked, generate = [], tiny_target.generate
    monkeypatch.setattr(tiny_target, "generate", lambda *ids, **more: asked.append(ids) or generate(*ids, **more))
    tiny_target.generation_config.update(do_sample=True, repetition_penalty=3.0, no_repeat_ngram_size=1, max_length=9)
    before = tiny_target.generation_config
    found = compare_with_generate(tiny_target, [Prompt("a", "c", [5, 6, 7]), Prompt("b", "c", [9])])
    assert (found["prompts"], found["identical"]) == (2, 2)
    assert len(asked) == 7
    assert found["generate_tokens_per_second"] > 0
    low, high = found["ratio_interval"]
    assert 0 < low <= found["ratio"] <= high
    assert tiny_target.generation_config is before


def test_samples_show_every_token_and_its_kind(
    tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, prompts: list[Prompt]
) -> None:
    drafters = {"d": DraftModel(make_llama(seed=1)), "self": DraftModel(tiny_target)}
    settings = SETTINGS.model_copy(update={"repeats": 1, "temperatures": (0.0,)})
    found = evaluate(tiny_target, drafters, prompts, settings, tokenizer=tiny_tokenizer, progress=False).samples
    assert [(sample["prompt"], sample["drafter"]) for sample in found] == [
        (prompt, drafter) for prompt in "ab" for drafter in ("d", "self")
    ]
    texts = {}
    for sample in found:
        pieces = [piece for round_ in sample["rounds"] for piece, _ in round_]
        texts.setdefault(sample["prompt"], set()).add("".join(pieces))
        kinds = [kind for round_ in sample["rounds"] for _, kind in round_]
        assert kinds[0] == "target"
        if sample["drafter"] == "self":
            assert "corrected" not in kinds, "a target that drafts for itself is never corrected"
    assert all(len(found) == 1 for found in texts.values()), "greedy texts are the same whoever drafts"
    assert torch.is_inference_mode_enabled() is False
