"""Recurrent layers, caches without rollback, indexers: logits after discarded drafts, and drafters of such models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import VOCAB as LLAMA_VOCAB
from conftest import make_llama
from datasets import Dataset
from recurrent_models import FAMILIES, INDEXED_TREES, OTHERS, build, noisy
from torch import Tensor

from draftsmith import SpeculativeDecoder
from draftsmith.decode.passes import eager
from draftsmith.decode.passes import recurrent as recurrent_state
from draftsmith.decode.passes.attention import passes_of, run_with
from draftsmith.decode.passes.capability import capability_of
from draftsmith.decode.passes.checks import TOLERANCE, rollback_gap, why_wrong
from draftsmith.decode.passes.eager import RecomputingPasses
from draftsmith.decode.passes.plan import MOST_RECOMPUTED, Plan
from draftsmith.decode.passes.recurrent import Mixer
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.heads import HEADS, DraftModel
from draftsmith.heads.base import Level
from draftsmith.heads.draft_model import EarlyExit
from draftsmith.heads.draft_tree import Draft
from draftsmith.heads.rows import Counts
from draftsmith.train.step import AgreementStep, Last, collate

ROUNDING = 3e-4
"""Scans are computed in float32 and summed in another order; a wrong state changes logits by more than 0.1."""
ALLOWED = TOLERANCE[torch.float64]


REREAD_ROUNDING = 1e-5
"""Norms and scans of models that read tokens again, and of those with indexers."""
PASSES = {"rwkv": "copied", "deepseek_v4": "copied", "deepseek_v32": "masked" if INDEXED_TREES else "copied"}


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
@pytest.mark.filterwarnings("ignore:model_type=")
@torch.inference_mode()
def test_logits_after_discarded_drafts_are_those_of_plain_passes(family: str) -> None:
    model, again = build(family), False
    if family in OTHERS:
        capability = capability_of(model)
        assert passes_of(model) == PASSES[family]
        again = PASSES[family] == "copied"
        assert bool(capability.no_trees) == bool(capability.no_ragged) == again
    for rows in (1,) if again else (1, 2):  # two: a ragged batch
        assert rollback_gap(model, rows) < (REREAD_ROUNDING if family in OTHERS else ROUNDING)


def keeps_the_draft(self: Mixer, counts: Counts) -> None:
    self._saved, self._last = self._last or self._saved, None
    self._inputs, self._committed, self._drafted = {}, counts.map(lambda count: 0 * count), 0


def one_token_less(self: Mixer, counts: Counts) -> None:
    KEEP(self, counts + -1)


def without_convolutions(states: Any, rows: list[int] | None = None) -> Any:
    copied = COPIED(states, rows)
    copied.conv_states = {key: state - state for key, state in copied.conv_states.items() if state is not None}
    return copied


def of_other_rows(states: Any, rows: list[int] | None = None) -> Any:
    return COPIED(states, None if rows is None else [1 - row for row in rows])


def inputs_of_other_rows(old: Tensor | None, new: Tensor, before: list[int]) -> Tensor:
    return JOINED(None if old is None else old.flip(0), new, before)


def keeps_old_states(self: Mixer, call: Any, inputs: Any, lengths: list[int]) -> Any:
    """Where the saved states move on; prompts are shorter."""
    saved = COPIED(self._saved)
    outputs = ADVANCE(self, call, inputs, lengths)
    self._saved = saved if max(lengths) >= MOST_RECOMPUTED else self._saved
    return outputs


KEEP, ADVANCE, COPIED, JOINED = Mixer.keep, Mixer._advance, recurrent_state.copied, recurrent_state._joined


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "rows"),
    [
        (Mixer, "keep", keeps_the_draft, 1),
        (Mixer, "keep", one_token_less, 1),
        (Mixer, "_advance", keeps_old_states, 1),
        (recurrent_state, "copied", without_convolutions, 1),
        (recurrent_state, "copied", of_other_rows, 2),
        (recurrent_state, "_joined", inputs_of_other_rows, 2),
    ],
)
@torch.inference_mode()
def test_the_check_notices_wrong_states(
    owner: Any, name: str, mutant: Callable[..., Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    assert rollback_gap(build("mamba2"), rows) > 5 * ALLOWED
    model = build("mamba2")
    if rows == 1:  # read another way
        with pytest.warns(UserWarning, match="each round copies its own cache"):
            assert capability_of(model).no_ragged
    else:
        assert "logits differ from those of a plain pass by" in capability_of(model).no_ragged


@torch.inference_mode()
def test_states_after_each_token_are_kept_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jamba's mixers read drafts token by token; as a control, all rows keep the state of the first one's token."""
    monkeypatch.setattr(Mixer, "keep", lambda self, counts: KEEP(self, counts.keep([0] * len(counts))))
    assert rollback_gap(build("jamba"), 1) < ROUNDING
    assert rollback_gap(build("jamba"), 2) > 5 * ALLOWED


@pytest.mark.parametrize("family", ["mamba2", "jamba"])
@torch.inference_mode()
def test_rows_that_leave_a_batch(family: str) -> None:
    """Of three texts two remain, one in another row, while tokens are read again; drafts are read in two passes."""
    model = build(family)
    generator = torch.Generator().manual_seed(3)
    texts = torch.randint(3, 61, (3, 12 + MOST_RECOMPUTED), generator=generator).tolist()
    runner = ModelRunner(model, 3)
    runner.append([text[:length] for text, length in zip(texts, (4, 2, 3), strict=True)])
    runner.tree(
        torch.tensor([text[length : length + 3] for text, length in zip(texts, (4, 2, 3), strict=True)]), [(-1, 0)]
    )
    runner.commit([[0], [0, 1], [0]])
    runner.drop([2, 1])
    rows = [texts[2], texts[1]]
    for _ in range(MOST_RECOMPUTED // 2 + 1):
        starts = list(runner.lengths)
        tokens_BQ = torch.tensor([row[start : start + 3] for row, start in zip(rows, starts, strict=True)])
        logits_BQV = torch.cat([runner.line(tokens_BQ[:, :1]), runner.line(tokens_BQ[:, 1:])], 1)
        for row, start, logits_QV in zip(rows, starts, logits_BQV, strict=True):
            expected_QV = model(input_ids=torch.tensor([row[: start + 3]]), use_cache=False).logits[0, start:]
            torch.testing.assert_close(logits_QV, expected_QV, rtol=ROUNDING, atol=ROUNDING)
        runner.commit([[0], [0, 1]] if starts[1] < 9 else [[0, 1], [0]])


class Compared(DraftModel):
    """A draft model that compares its logits with those of plain forward passes."""

    compared = 0

    def begin(self, rows: list[int]) -> Tensor:
        self.drafted: list[list[int]] = [[] for _ in self.context.sequences]
        return self._same(super().begin(rows))

    def extend(self, level: Level) -> Tensor:
        for drafted, token in zip(self.drafted, level.tokens_Bn[:, 0].tolist(), strict=True):
            drafted.append(token)
        return self._same(super().extend(level)[:, 0])[:, None]

    def _same(self, logits_BV: Tensor) -> Tensor:
        for text, drafted, logits_V in zip(self.context.sequences, self.drafted, logits_BV, strict=True):
            ids = torch.tensor([[*text.tokens, *drafted]])
            expected_V = self.model(input_ids=ids, use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits_V, expected_V, rtol=ROUNDING, atol=ROUNDING)
            self.compared += 1
        return logits_BV


@pytest.mark.parametrize("family", ["mamba2", "jamba"])
def test_a_recurrent_draft_model_of_a_transformer(family: str) -> None:
    target = make_llama().double()
    drafter = Compared(build(family, vocab_size=LLAMA_VOCAB))
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5]]
    decoder, alone = SpeculativeDecoder(target, drafter, draft_length=3), SpeculativeDecoder(target)
    for texts in ([prompts[0]], prompts):
        expected = [alone.generate(prompt, max_new_tokens=16, eos_token_id=None).tokens for prompt in texts]
        outputs = decoder.generate_batch(texts, max_new_tokens=16, eos_token_id=None, temperature=0.0)
        assert [out.tokens for out in outputs] == expected
    assert drafter.compared > 50


DRAFTERS: dict[str, dict[str, Any]] = {
    "draft_model": {"num_hidden_layers": 2, "init": "target_layers"},
    "medusa": {},
    "eagle3": {"layers": [1, 2]},
}
ROWS = Dataset.from_list(
    [{"input_ids": [5, 6, 7, 8, 9, 10], "spans": [[2, 6]]}, {"input_ids": [3, 4, 2, 1], "spans": [[3, 4]]}]
)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_drafter_of_a_hybrid_is_trained_and_decodes(kind: str) -> None:
    """Twenty steps on two texts lower the loss; texts drafted by the result are the target's."""
    target = build("granitemoehybrid").float().requires_grad_(False)
    torch.manual_seed(3)
    drafter = HEADS[kind].from_target(target, **DRAFTERS[kind])
    step = AgreementStep(drafter, Objective(), OnlineTeacher(target, drafter.needs.layers))
    optimizer = torch.optim.Adam(drafter.parameters(), 1e-2)
    losses = []
    for _ in range(20):
        loss = step(collate(ROWS, [0, 1], torch.device("cpu")), 0.0, Last())[0]
        optimizer.zero_grad()
        loss.backward()
        assert [name for name, weight in drafter.named_parameters() if weight.grad is None] == []
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    prompts = [[5, 6, 7], [3, 4]]
    plain = SpeculativeDecoder(target)
    expected = [plain.generate(prompt, max_new_tokens=12, eos_token_id=None).tokens for prompt in prompts]
    decoder = SpeculativeDecoder(target, drafter.eval(), draft_length=3)
    outputs = decoder.generate_batch(prompts, max_new_tokens=12, eos_token_id=None)
    assert [out.tokens for out in outputs] == expected


@pytest.mark.parametrize("family", ["jamba", "falcon_h1", "mamba2", "kimi_linear"])
def test_the_first_layers_of_a_hybrid_draft(family: str) -> None:
    """Types of layers are listed in the config, derived from it, or both."""
    target = build(family)
    expected = SpeculativeDecoder(target).generate([5, 6, 7], max_new_tokens=6).tokens
    for drafter in (EarlyExit(target, layers=1), DraftModel.from_target(target).double()):
        assert SpeculativeDecoder(target, drafter).generate([5, 6, 7], max_new_tokens=6).tokens == expected


@torch.inference_mode()
def test_the_scan_of_a_draft_is_not_padded_to_a_whole_chunk() -> None:
    model, seen = build("mamba2", chunk_size=64), []
    mixer = model.get_submodule("backbone.layers.0.mixer")
    mixer.get_submodule("in_proj").register_forward_pre_hook(
        lambda _, arguments: seen.append((arguments[0].shape[1], mixer.chunk_size))
    )
    assert rollback_gap(model, 1) < ROUNDING
    short = [(width, chunk) for width, chunk in seen if chunk != 64]  # the others are plain passes
    assert any(width > 1 for width, _ in short)
    assert all(width == chunk for width, chunk in short)
    assert mixer.chunk_size == 64


# Models without rollback, and with indexers.


def test_a_model_that_reads_again_is_named_in_a_warning() -> None:
    with pytest.warns(UserWarning, match="model_type='rwkv': each round copies its own cache and recomputes up to 16"):
        SpeculativeDecoder(build("rwkv"))


def same(cache: Any) -> Any:
    return cache


def one_token_late(self: RecomputingPasses, inputs: dict[str, Any], end: int, *, moves: bool) -> Any:
    output = CONTINUE(self, inputs, end, moves=moves)
    self._cached += moves
    return output


CONTINUE = RecomputingPasses._continue


@pytest.mark.parametrize(
    ("owner", "name", "mutant"), [(eager, "deepcopy", same), (RecomputingPasses, "_continue", one_token_late)]
)
@torch.inference_mode()
def test_the_check_notices_wrong_caches(
    owner: Any, name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("deepseek_v4")
    run_with(model, "copied")
    monkeypatch.setattr(owner, name, mutant)
    assert why_wrong(lambda: rollback_gap(model, 1), model)


@pytest.mark.parametrize("family", ["rwkv", "deepseek_v4"])
@torch.inference_mode()
def test_few_tokens_are_read_again_and_logits_stay_those_of_plain_passes(family: str) -> None:
    """Over more rounds than the cache moves on after, with drafts that are discarded in part."""
    model, longest = build(family), 0
    run_with(model, "copied")
    runner, text = ModelRunner(model, 1, Plan(widths={3: 8})), [5, 6, 7, 8, 9]  # padding would be in the cache
    runner.append([text[:-1]])
    for number in range(2 * MOST_RECOMPUTED):
        draft = [10 + number % 7, 11 + number % 5]
        read: list[int] = []
        embeddings = model.get_input_embeddings()
        counter = embeddings.register_forward_pre_hook(lambda _, inputs, read=read: read.append(inputs[0].shape[1]))
        read_NV = runner.tree(torch.tensor([[text[-1], *draft]]), [(-1, 0)])[0]
        counter.remove()
        longest = max(longest, *read)
        if number % 8 == 7:
            expected_NV = model(input_ids=torch.tensor([[*text, *draft]]), use_cache=False).logits[0, -3:]
            torch.testing.assert_close(read_NV, expected_NV, rtol=REREAD_ROUNDING, atol=REREAD_ROUNDING)
        kept = number % 2
        runner.commit([[0, *range(1, 1 + kept)]])
        text += draft[: 1 + kept] if kept else [12]
    assert len(text) > 3 * MOST_RECOMPUTED
    assert longest < MOST_RECOMPUTED + 3


@torch.inference_mode()
def test_states_for_drafters_are_those_of_the_new_tokens() -> None:
    model = build("rwkv")
    run_with(model, "copied")
    text = [5, 6, 7, 8, 9, 10, 11]
    runner = ModelRunner(model, 1, Plan(remember=True, layers=(1,)))
    expected = model(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
    runner.append([text[:4]])
    torch.testing.assert_close(runner.features_BQF, expected[0][:, :4])
    torch.testing.assert_close(runner.states, expected[-1][:, 3])
    runner.tree(torch.tensor([text[4:6]]), [(-1,)])
    runner.commit([[0]])
    runner.tree(torch.tensor([text[5:]]), [(-1,)])
    torch.testing.assert_close(runner.features_BQF, expected[0][:, 5:])
    torch.testing.assert_close(runner.states, expected[-1][:, 5:])


@pytest.mark.filterwarnings("ignore:model_type=")
def test_a_draft_model_that_reads_again() -> None:
    """For a target that does not: texts of the batch are decoded one after another."""
    target, prompts = make_llama().double(), [[5, 6, 7], [9, 8, 7, 6, 5]]
    plain, drafter = SpeculativeDecoder(target), noisy(build("rwkv", vocab_size=LLAMA_VOCAB))
    expected = [plain.generate(prompt, max_new_tokens=40, eos_token_id=None).tokens for prompt in prompts]
    outputs = SpeculativeDecoder(target, drafter, draft_length=3).generate_batch(
        prompts, max_new_tokens=40, eos_token_id=None
    )
    assert [output.tokens for output in outputs] == expected


@pytest.mark.skipif(not INDEXED_TREES, reason="this transformers' indexed attention reads chains only")
@torch.inference_mode()
def test_a_tree_after_more_tokens_than_an_indexer_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("deepseek_v32")
    context, draft = [*range(3, 33)], Draft((40, 41, 42, 43), (-1, 0, -1, 2))
    assert len(context) > model.config.index_topk

    def gap() -> float:
        runner = ModelRunner(model, 2)
        runner.append([context[:-1], context[2:-1]])
        runner.tree(torch.tensor([[context[-1], 50, 51], [context[-1], 52, 53]]), [(-1, 0), (-1, 0)])
        runner.commit([[0], [0]])
        read_BNV = runner.tree(torch.tensor([[44, *draft.tokens]] * 2), [draft.parents] * 2)
        gaps = []
        for row, begin in enumerate((0, 2)):
            for node in range(4):
                text = [*context[begin:], 44, *(draft.tokens[step] for step in draft.path(node))]
                expected_V = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
                gaps.append((read_BNV[row, node + 1] - expected_V).abs().max().item())
        return max(gaps)

    assert gap() < REREAD_ROUNDING
    # As a control: `attend` is not told of the choice, and the comparison before use reads fewer tokens than it.
    monkeypatch.setattr("draftsmith.decode.passes.attention.text_config", lambda model: None)
    run_with(model, "grouped")
    assert gap() > 0.1


@torch.inference_mode()
def test_the_keys_of_an_indexer_follow_those_of_its_layer() -> None:
    """After a path whose tokens move to other slots, in a text of more tokens than the indexer chooses."""
    model = build("deepseek_v32")
    run_with(model, "masked")
    context = [*range(3, 33)]
    runner = ModelRunner(model, 1)
    runner.append([context[:-1]])
    runner.tree(torch.tensor([[context[-1], 50, 51, 52, 53]]), [(-1, -1, 1, 2)])
    runner.commit([[0, 2, 3, 4]])
    text = [*context, 51, 52, 53, 44]
    read_NV = runner.tree(torch.tensor([text[-1:]]), [()])[0]
    expected_V = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(read_NV[0], expected_V, rtol=REREAD_ROUNDING, atol=REREAD_ROUNDING)
