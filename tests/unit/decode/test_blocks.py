"""Blocks read with the features before them, against a pass for each feature; chains from logits of one pass."""

from typing import Any

import pytest
import torch
from conftest import make_llama, spread
from torch import Tensor

from draftsmith import SpeculativeDecoder
from draftsmith.decode.passes import graphs
from draftsmith.decode.passes.plan import Plan
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.decode.target import TransformersTarget
from draftsmith.heads import HEADS
from draftsmith.heads.base import TrainableDrafter
from draftsmith.heads.block_network import DFlashNetwork, Visibility
from draftsmith.heads.dflash import DFlash

SIZE = 4
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", {"block_size": 5}),
    "dflash from the anchor, 32 tokens": (
        "dflash",
        {"block_size": 4, "sample_from_anchor": True, "draft_vocabulary": list(range(0, 64, 2))},
    ),
    "peagle": ("peagle", {"num_tokens": 4}),
}

SEEN = [Visibility((None, None)), Visibility((3, None)), Visibility((3, 2), causal_windows=False)]
SEEN += [
    Visibility((5, None), windows_from_anchor=False),
    Visibility((4, 2), causal_windows=False, windows_from_anchor=False),
]
SEEN += [Visibility((None, 3), causal=True, windows_from_anchor=False)]


def network(sees: Visibility) -> DFlashNetwork:
    torch.manual_seed(4)
    drafter = DFlash.from_target(make_llama().double(), layers=[1, 2], block_size=SIZE, num_hidden_layers=2)
    drafter = drafter.double().eval()
    for parameter in drafter.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    drafter.body.sees = sees
    return drafter.body


@torch.inference_mode()
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("sees", SEEN, ids=str)
def test_one_pass_is_equal_to_many(sees: Visibility, compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of equal and of different lengths, with equal and with different numbers of new features, some without."""
    monkeypatch.setitem(graphs.OPTIONS, "cpu", {"disable": True})
    body = network(sees)
    width = 2 * SIZE + 1
    rounds = [[5, 5], [2, 2], [4, 1], [0, 3], [1, 1], [9, 2], [3, 8]]  # 9: more than a compiled pass holds
    features_BTF = torch.randn(2, 40, body.fc.in_features, dtype=torch.float64)
    fused = ModelRunner(body, 2, Plan(compile=compile, longest=60, width=width))
    alone = [ModelRunner(body, 1, Plan(longest=60, width=width)) for _ in range(2)]
    done = [0, 0]
    for number, counts in enumerate(rounds):
        tokens_Bb = torch.tensor([[3 + number], [7 + number]]).repeat(1, SIZE)
        new = [features_BTF[row, done[row] : done[row] + count] for row, count in enumerate(counts)]
        new_BCF = torch.nn.utils.rnn.pad_sequence(new, batch_first=True, padding_value=1.0)
        together = fused.block(tokens_Bb, new_BCF, counts)
        for row, runner in enumerate(alone):
            for feature_F in new[row]:
                runner.block(tokens_Bb[row, None] + 1, feature_F[None, None], [1])
            expected = runner.block(tokens_Bb[row, None], new_BCF[:1, :0], [0])
            torch.testing.assert_close(together[row, None], expected, rtol=0, atol=1e-12)
        done = [start + count for start, count in zip(done, counts, strict=True)]
        assert fused.lengths == done
    fused.close()


def make(name: str, target: Any) -> TrainableDrafter:
    kind, options = DRAFTERS[name]
    torch.manual_seed(2)
    drafter = HEADS[kind].from_target(target, **options).eval()
    for parameter in drafter.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return drafter


@pytest.mark.parametrize(("name", "temperature"), spread(DRAFTERS, [0.0, 0.7]))
def test_chains_of_known_logits_are_those_of_single_tokens(
    name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens, drawn with the same numbers, the same drafts and records of rounds."""
    target = make_llama(num_hidden_layers=4)
    drafter = make(name, target)
    decoder = SpeculativeDecoder(target, drafter, draft_length=drafter.max_draft_length)
    prompts = [[5, 9, 33, 2], [7], [40, 3]]

    verify, drafts = TransformersTarget.verify, list[list[list[int]]]()

    def noted(reader: TransformersTarget, tokens_BQ: Tensor, shapes: Any) -> Tensor:
        drafts.append(tokens_BQ.tolist())
        return verify(reader, tokens_BQ, shapes)

    monkeypatch.setattr(TransformersTarget, "verify", noted)

    def texts() -> list[Any]:
        drafts.clear()
        settings = {"max_new_tokens": 20, "temperature": temperature, "eos_token_id": None}
        outputs = [decoder.generate(prompts[0], **settings), *decoder.generate_batch(prompts, seeds=5, **settings)]
        rounds = [[(one.drafted, one.accepted, one.overlap) for one in out.rounds] for out in outputs]
        return [[out.tokens for out in outputs], rounds, list(drafts)]

    ours = texts()
    monkeypatch.setattr(drafter, "chain_logits", lambda length: None)
    assert ours == texts()
    wrong_1DV = torch.nn.functional.one_hot(torch.tensor([[1] * 4]), 64) * 90.0
    monkeypatch.setattr(
        drafter, "chain_logits", lambda n: wrong_1DV[:, :n].expand(len(drafter.context.sequences), -1, -1)
    )
    assert ours != texts(), "whole chains are drafted from these logits"
