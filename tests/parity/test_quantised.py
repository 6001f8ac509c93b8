"""Quantised targets: the text is that of the quantised model itself. Needs torchao, which is not among the packages.

Weights only: where activations are rounded to eight bits too, the last bits of attention decide about whole steps, and
a text read token by token parts from one read in blocks, in transformers' assisted generation as here.
"""

import pytest
import torch
from conftest import make_llama

from draftsmith import SpeculativeDecoder
from draftsmith.heads.draft_model import DraftModel, EarlyExit

quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")


@pytest.mark.parametrize("policy", ["chain", "best-first"])
def test_greedy_text_is_that_of_the_quantised_model(policy: str) -> None:
    target = make_llama(hidden_size=64, intermediate_size=128)
    quantization.quantize_(target, quantization.Int8WeightOnlyConfig())
    for drafter in (DraftModel(make_llama(1)), EarlyExit(target, layers=1)):
        decoder = SpeculativeDecoder(target, drafter, policy=policy)
        for prompt in ([5, 6, 7], [9, 8], [20] * 6):
            ids = torch.tensor([prompt])
            expected = target.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0
            )
            assert decoder.generate(prompt, max_new_tokens=40).tokens == expected[0, len(prompt) :].tolist()
