"""Models without rollback, and with indexers: logits after discarded drafts, states for drafters, texts of a batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import VOCAB as LLAMA_VOCAB
from conftest import make_llama
from recurrent_models import INDEXED_TREES, OTHERS, build, noisy

from draftsmith import SpeculativeDecoder
from draftsmith.decode.passes import eager
from draftsmith.decode.passes.attention import passes_of, run_with
from draftsmith.decode.passes.capability import capability_of
from draftsmith.decode.passes.checks import rollback_gap, why_wrong
from draftsmith.decode.passes.eager import RereadingPasses
from draftsmith.decode.passes.plan import MOST_AGAIN, Plan
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.heads.draft_tree import Draft

ROUNDING = 1e-5
"""Norms and scans are computed in float32; a wrong state changes logits by more than 0.1."""
PASSES = {"rwkv": "copied", "deepseek_v4": "copied", "deepseek_v32": "masked" if INDEXED_TREES else "copied"}
AGAIN = [family for family in OTHERS if PASSES[family] != "masked"]


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.filterwarnings("ignore:model_type=")
@torch.inference_mode()
def test_logits_after_discarded_drafts_are_those_of_plain_passes(family: str) -> None:
    model = build(family)
    capability = capability_of(model)
    assert passes_of(model) == PASSES[family]
    assert bool(capability.no_trees) == bool(capability.no_ragged) == (family in AGAIN)
    for rows in (1,) if family in AGAIN else (1, 2):
        assert rollback_gap(model, rows) < ROUNDING


def test_a_model_that_reads_again_is_named_in_a_warning() -> None:
    with pytest.warns(UserWarning, match="model_type='rwkv': each round copies its own cache and reads up to 16 com"):
        SpeculativeDecoder(build("rwkv"))


def same(cache: Any) -> Any:
    return cache


def one_token_late(self: RereadingPasses, inputs: dict[str, Any], end: int, *, moves: bool) -> Any:
    output = CONTINUE(self, inputs, end, moves=moves)
    self._cached += moves
    return output


CONTINUE = RereadingPasses._continue


@pytest.mark.parametrize(
    ("owner", "name", "mutant"), [(eager, "deepcopy", same), (RereadingPasses, "_continue", one_token_late)]
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
    for number in range(2 * MOST_AGAIN):
        draft = [10 + number % 7, 11 + number % 5]
        read: list[int] = []
        embeddings = model.get_input_embeddings()
        counter = embeddings.register_forward_pre_hook(lambda _, inputs, read=read: read.append(inputs[0].shape[1]))
        read_NV = runner.tree(torch.tensor([[text[-1], *draft]]), [(-1, 0)])[0]
        counter.remove()
        longest = max(longest, *read)
        if number % 8 == 7:
            expected_NV = model(input_ids=torch.tensor([[*text, *draft]]), use_cache=False).logits[0, -3:]
            torch.testing.assert_close(read_NV, expected_NV, rtol=ROUNDING, atol=ROUNDING)
        kept = number % 2
        runner.commit([[0, *range(1, 1 + kept)]])
        text += draft[: 1 + kept] if kept else [12]
    assert len(text) > 3 * MOST_AGAIN
    assert longest < MOST_AGAIN + 3


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
def test_texts_of_a_batch_are_decoded_one_after_another() -> None:
    """With a draft model that reads again, for a target that does, and for one that does not."""
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5]]
    for target in (build("rwkv"), make_llama().double()):
        drafter = noisy(build("rwkv", vocab_size=LLAMA_VOCAB)) if target.config.model_type == "llama" else noisy(target)
        plain = SpeculativeDecoder(target)
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

    assert gap() < ROUNDING
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
    torch.testing.assert_close(read_NV[0], expected_V, rtol=ROUNDING, atol=ROUNDING)
