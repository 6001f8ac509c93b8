"""Timed passes and rounds read the tokens of a text, and prompts once. No test here asserts seconds."""

from collections.abc import Callable

import pytest
import torch
from conftest import make_llama
from recurrent_models import build
from transformers import PreTrainedModel

from draftsmith.decode.costs import Costs
from draftsmith.decode.policies import BestFirst
from draftsmith.decode.profiling import measure_costs
from draftsmith.decode.sampling import Sampling
from draftsmith.eval.forecast.forecast import forecast
from draftsmith.eval.forecast.hardware import TimedArm, _Fixed, end
from draftsmith.eval.settings import ForecastSettings
from draftsmith.eval.teacher_forced import TargetText
from draftsmith.heads import HEADS, DraftModel
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_model import EarlyExit
from draftsmith.heads.retrieval import PromptLookup

PROMPTS = [[5, 9, 12, 7, 30, 5, 9], [3, 3, 8], [40, 2, 17, 21]]


def reading(model: PreTrainedModel) -> list[list[int]]:
    """The tokens of every pass from now on."""
    passes: list[list[int]] = []
    model.get_input_embeddings().register_forward_hook(lambda _, ids, __: passes.append(ids[0].flatten().tolist()))
    return passes


@pytest.mark.parametrize("text", [[], torch.arange(7, 60).tolist()], ids=["of the vocabulary", "a prompt"])
def test_measured_passes_read_different_tokens(text: list[int]) -> None:
    """A mixture of experts reads as many weights as in decoding; for one repeated token it would read few."""
    model = make_llama()
    passes = reading(model)
    measure_costs(model, EarlyExit(model, layers=1), text=text)
    wide = [tokens for tokens in passes if len(tokens) in (8, 16)]
    assert wide
    assert sum(len(set(tokens)) for tokens in wide) > 0.75 * sum(map(len, wide))
    passes.clear()
    model.config.image_token_id = 9  # the placeholder of an image, for which these passes have no states
    measure_costs(model, text=[3, 9, 4, 7, 70, 1, 5])
    assert {token for tokens in passes for token in tokens} == {3, 4, 5, 7}, "nor special tokens"


def test_passes_over_drafts_read_different_tokens() -> None:
    model, text = make_llama(), TargetText(torch.randint(5, 64, (60,)).tolist(), 20, 120)
    passes = reading(model)
    for length in (3, 7, 15):
        rounds = TimedArm(model, _Fixed(length), length).rounds([text], Sampling(1.0), 0, {})
        assert {record.drafted for record in rounds} == {length}
        wide = [tokens for tokens in passes if len(tokens) == 1 + length]
        assert sum(len(set(tokens)) for tokens in wide) > 0.75 * sum(map(len, wide)) > 0


def _deeper() -> PreTrainedModel:
    return make_llama(num_hidden_layers=4)


def _recurrent() -> PreTrainedModel:
    return build("bamba")


@pytest.mark.parametrize(
    ("make", "drafted"),
    [
        (make_llama, lambda target: DraftModel(make_llama(1))),
        (_deeper, lambda target: HEADS["eagle3"].from_target(target).eval()),
        (make_llama, lambda target: HEADS["medusa"].from_target(target, num_heads=3).eval()),
        (make_llama, lambda target: PromptLookup()),
        (_recurrent, lambda target: PromptLookup()),
    ],
    ids=["draft model", "states of layers", "last state", "copies", "a target that cannot go back"],
)
@torch.inference_mode()
def test_rounds_after_prompts_that_were_read_before_are_the_same(
    make: Callable[[], PreTrainedModel], drafted: Callable[[PreTrainedModel], Drafter]
) -> None:
    target = make()
    drafter = drafted(target)
    prompts = [[5, 9, 12, 7, 30, 5, 9, 5, 9, 12, 7, 30], [3, 3, 8, 3, 3, 8, 11, 6]]
    texts = [TargetText(prompt, 4, 100) for prompt in prompts][: 1 if make is _recurrent else 2]
    costs = Costs({1: 1.0, 2: 1.0, 3: 3.0, 4: 1.0}, {1: 1.0})
    arms = [TimedArm(target), TimedArm(target, _Fixed(3), 3, costs)]
    arms += [TimedArm(target, drafter, length, costs) for length in (1, 2)]
    shared = {}
    for arm in [*arms, *reversed(arms)]:
        for temperature in (0.0, 1.0):
            alone = arm.rounds(texts, Sampling(temperature), 5, {})
            after = arm.rounds(texts, Sampling(temperature), 5, shared)
            assert [(r.drafted, r.accepted, r.committed) for r in after] == [
                (r.drafted, r.accepted, r.committed) for r in alone
            ]
            for one, other in zip(after, alone, strict=True):
                assert one.overlap == pytest.approx(other.overlap, abs=1e-5)
    end(shared)


@pytest.mark.parametrize("own", [True, False])
def test_a_profile_without_the_seconds_of_a_tree_says_what_is_assumed(own: bool) -> None:
    target, tree = make_llama(num_hidden_layers=3, eos_token_id=None), str(BestFirst(3, 2))
    drafters = {"d": EarlyExit(target, layers=1)}
    policies = {tree: {1: 0.5}} if own else {}
    costs = Costs({1: {1: 1.3}}, chains={1: {1: 0.2}}, alone={1: 1.0}, policies=policies)
    profile = {"": costs, "d": costs}
    settings = ForecastSettings(
        target="t", drafters={"d": "d"}, prompts="p", policies=(tree,), temperatures=(0.0,), max_new_tokens=40
    )
    found = forecast(target, drafters, PROMPTS, settings, profile)
    assert any(f"no seconds of rounds of {tree}" in note for note in found.notes) != own
    (row,) = [row for row in found.rows if row["policy"] == tree]
    assert row["speed"][0]["speedup"] == pytest.approx(
        row["tau"] / (2.0 if own else 1.5), rel=0.03
    )  # the last round has no room for a draft
