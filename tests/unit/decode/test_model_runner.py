"""The model runner and its cache: logits equal those with transformers' cache, without the rejected tokens."""

from collections.abc import Callable

import pytest
import torch
from conftest import make_t5
from transformers import (
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    T5ForConditionalGeneration,
)

from draftsmith.decode.passes import graphs
from draftsmith.decode.passes.plan import Plan
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.heads.base import Level
from draftsmith.heads.draft_tree import Draft

CLOSE = {"atol": 2e-5, "rtol": 2e-5}
"""fp32 sums over 32 entries in another order; a wrong mask or position changes logits by about 0.1."""


def read_afresh(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0, -1]


def branch(runner: ModelRunner, root: int, draft: Draft, rows: int = 1) -> torch.Tensor:
    return runner.tree(torch.tensor([[root, *draft.tokens]] * rows), [draft.parents])


@torch.inference_mode()
def test_the_lm_head_reads_the_last_token_of_each_text(tiny_target: LlamaForCausalLM) -> None:
    """Texts of a batch end at different columns; all their columns together are far more logits than are used."""
    texts, read = [[2, 3, 4, 5, 6, 7, 8], [9, 10], [11, 12, 13], [14, 15, 16, 17]], []
    head = tiny_target.get_output_embeddings()
    hook = head.register_forward_hook(lambda _, arguments, logits: read.append(logits[..., 0].numel()))
    runner = ModelRunner(tiny_target, len(texts), Plan(remember=True))
    ours = runner.append(texts)
    hook.remove()
    assert read == [len(texts)]
    torch.testing.assert_close(ours, torch.stack([read_afresh(tiny_target, text) for text in texts]), **CLOSE)
    torch.testing.assert_close(head(runner.states), ours, **CLOSE)


@torch.inference_mode()
def test_the_lm_head_in_16_bits_reads_no_view_of_the_last_states(tiny_target: LlamaForCausalLM) -> None:
    """On a CPU: such a view has the stride of the whole text, and its product takes 60 times as long."""
    target, strides = tiny_target.bfloat16(), list[tuple[int, ...]]()
    head = target.lm_head.forward
    target.lm_head.forward = lambda states_BnH: [strides.append(states_BnH.stride()), head(states_BnH)][1]
    ModelRunner(target, 1).append([list(range(2, 22))])
    runner = ModelRunner(target, 1)
    runner.read_prompts([list(range(2, 22))], [None])
    assert strides == [(32, 32, 1)] * 2


@torch.inference_mode()
def test_storage_grows_in_steps_and_keeps_what_it_holds(tiny_target: LlamaForCausalLM) -> None:
    tiny_target.config.max_position_embeddings = 2048
    runner = ModelRunner(tiny_target, 1)
    runner.append([[5, 6, 7]])
    layer = runner.passes.cache.layers[0]
    first, moves, last = layer.keys.data_ptr(), 0, layer.keys.data_ptr()
    text = [5, 6, 7]
    for token in range(700):
        logits = branch(runner, token % 60 + 2, Draft())[0][0]
        runner.commit([[0]])
        text.append(token % 60 + 2)
        moves += layer.keys.data_ptr() != last
        last = layer.keys.data_ptr()
    assert moves == 2, "storage doubles: 259, 518, 1036 slots"
    assert last != first
    torch.testing.assert_close(logits, read_afresh(tiny_target, text), **CLOSE)


@torch.inference_mode()
def test_rows_of_different_length_do_not_see_one_another(tiny_target: LlamaForCausalLM) -> None:
    prompts = [[5, 6, 7, 9, 4], [40], [33, 34, 2]]
    runner = ModelRunner(tiny_target, 3)
    first = runner.append(prompts)
    for prompt, logits in zip(prompts, first, strict=True):
        torch.testing.assert_close(logits, read_afresh(tiny_target, prompt), **CLOSE)
    draft = Draft((10, 11, 12), (-1, -1, 0))
    branch(runner, 8, draft, rows=3)
    runner.commit([[0], [0, 1, 3], [0, 2]])
    kept = [[*prompts[0], 8], [*prompts[1], 8, 10, 12], [*prompts[2], 8, 11]]
    runner.drop([1, 2])
    more = runner.append([[20, 21], []])
    torch.testing.assert_close(more[0], read_afresh(tiny_target, [*kept[1], 20, 21]), **CLOSE)
    assert runner.lengths == [6, 5], "an empty row stays as it is"
    for logits, text in zip(branch(runner, 30, Draft(), rows=2), [[*kept[1], 20, 21], kept[2]], strict=True):
        torch.testing.assert_close(logits[0], read_afresh(tiny_target, [*text, 30]), **CLOSE)


def t5() -> T5ForConditionalGeneration:
    model = make_t5(1).double()
    for parameter in model.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    return model


def mistral() -> MistralForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 2, "initializer_range": 0.5}
    return MistralForCausalLM(MistralConfig(**sizes, max_position_embeddings=128)).double().eval()


@torch.inference_mode()
@pytest.mark.parametrize(("make", "compile"), [(t5, False), (mistral, False), (mistral, True)])
def test_positions_of_nodes_that_were_read_before(
    make: Callable[[], PreTrainedModel], compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative biases and windows read them: slots of a tree rise with every node, positions with every level."""
    monkeypatch.setitem(graphs.OPTIONS, "cpu", {"disable": True})
    model, read = make(), []
    for plan in (Plan(sources=[[7, 8, 9]]), Plan(sources=[[7, 8, 9]], compile=compile, longest=60)):
        runner = ModelRunner(model, 1, plan)
        runner.append([[5, 6, 7]])
        read.append(branch(runner, 8, Draft((10, 11, 12, 13, 14), (-1, -1, 1, 2, 3))))
        runner.commit([[]])
        levels = [([8], [0]), ([10, 11], [0, 0]), ([12], [1]), ([13], [0]), ([14], [0])]
        parts = [
            runner.extend(Level(torch.tensor([tokens]), torch.tensor([parents]) if depth > 1 else None, depth))
            for depth, (tokens, parents) in enumerate(levels, 1)
        ]
        read.append(torch.cat(parts, 1))
        runner.close()
    for logits in read[1:]:
        torch.testing.assert_close(logits, read[0], rtol=0, atol=1e-9)
    if make is mistral:
        alone_QV = model(torch.tensor([[5, 6, 7, 8, 11, 12, 13, 14]])).logits[0, -5:]
        torch.testing.assert_close(read[0][0, [0, 2, 3, 4, 5]], alone_QV, rtol=0, atol=1e-9)
