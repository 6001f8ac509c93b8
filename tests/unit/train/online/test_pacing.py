"""When learning steps, compares and gives up."""

import pytest
from conftest import make_llama

from draftsmith import OnlineLearning, SpeculativeDecoder
from draftsmith.heads import DraftModel
from draftsmith.train.online.budget import START
from draftsmith.train.online.judge import Verdict


def _decoder(learn: OnlineLearning) -> SpeculativeDecoder:
    target = make_llama().requires_grad_(False)
    drafter = DraftModel.from_target(target, init="target_layers", num_hidden_layers=1).eval().requires_grad_(False)
    return SpeculativeDecoder(target, drafter, draft_length=3, learn=learn)


def test_a_gain_that_grows_is_not_refused() -> None:
    """Only comparisons without a larger gain than before count as undecided."""
    learn = OnlineLearning(patience=2)
    _decoder(learn)
    refused = []
    for gain in (0.01, 0.02, 0.03, 0.01, 0.04, 0.02, 0.04):
        learn._weigh(Verdict(2.0, 2.0 * (1 + gain), gain, (gain - 0.1, gain + 0.1)))
        refused.append(learn.refused)
    assert refused == [0, 0, 0, 0, 0, 0, 1]


def test_by_the_clock_learning_keeps_its_share_and_a_pause_leaves_no_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes between two looks at the clock: each round decodes for one, each step takes one."""
    learn, seconds = OnlineLearning(judge_every=10_000, batch_rows=4), iter(range(10**6))
    monkeypatch.setattr("draftsmith.train.online.learner.now", lambda _: float(next(seconds)))
    decoder = _decoder(learn)
    learn._budget.expect(1.0)
    for start in range(0, 256, 4):
        prompts = [[2 + start % 50, 3, 4 + number] for number in range(4)]
        decoder.generate_batch(prompts, max_new_tokens=20, eos_token_id=None)
        account = learn._budget._all
        assert account.learning <= START * (account.decoding + account.learning)
    assert account.tokens == 0, "what was decoded before the first step is credit"
    assert learn.steps == account.learning > 2
    learn._pause("a test")
    learn._asleep_until = learn.tokens
    learn.between_rounds()
    assert learn.updates[-1].kind == "resumed"
    assert learn.steps == account.learning
