"""Models of `recurrent_models` against transformers' `generate`, in float64: each design, alone and in a batch."""

import pytest
import torch
from drawn_tree import ChosenTree, widths_shape
from recurrent_models import FAMILIES, OTHERS, build, noisy

from draftsmith import SpeculativeDecoder
from draftsmith.decode.policies import Chain
from draftsmith.errors import ConfigError

PROMPTS = [[7, 8, 9], [5, 4, 3, 2, 20, 21, 22, 23, 24, 25], [11, 12]]
NEW_TOKENS = 20
FAST = ("jamba", "mamba2", "falcon_h1", "nemotron_h", "qwen3_next", "lfm2", "zamba2", *OTHERS)


@pytest.mark.parametrize(
    "family", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in {**FAMILIES, **OTHERS}]
)
@pytest.mark.filterwarnings("ignore:model_type=")
def test_greedy_text_is_that_of_generate(family: str) -> None:
    model = build(family)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        expected.append(out[0, len(prompt) :].tolist())
    assert len({tuple(text) for text in expected}) > 1, "the texts have to tell prompts apart"
    decoder = SpeculativeDecoder(model, noisy(model), policy=Chain(4))
    alone = [decoder.generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
    assert [out.tokens for out in alone] == expected
    accepted = {record.accepted for out in alone for record in out.rounds if record.drafted == 4}
    assert len(accepted - {4}) > 1, "drafts have to be rejected at several depths"
    batch = decoder.generate_batch(PROMPTS, max_new_tokens=NEW_TOKENS)
    assert [out.tokens for out in batch] == expected, "in a batch"


def test_trees_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="model_type='lfm2' reads chains only: its recurrent layers read one token"):
        SpeculativeDecoder(build("lfm2"), noisy(build("lfm2")), policy=ChosenTree(widths_shape((2, 2))))
