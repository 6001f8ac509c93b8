"""Drafters receive the target's features of each committed token, in order, for any accepted path."""

import pytest
import torch
from conftest import make_llama
from targets.tiny import build
from targets.vision import vision_config
from torch import Tensor
from transformers import GitForCausalLM, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from draftsmith import SpeculativeDecoder
from draftsmith.errors import ConfigError
from draftsmith.heads.base import FINAL, Context, Drafter, Level, Needs
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.hidden_states import layer_lists

PROMPTS = [[5, 9, 33, 2], [7], [40, 3]]


class Knowing(Drafter):
    """Drafter that proposes the target's text with some errors and stores all features that it receives."""

    type = "knowing"
    needs = Needs(layers=(1, 3, FINAL))

    def __init__(self, target: LlamaForCausalLM) -> None:
        super().__init__()
        self.target = [target]
        self.seen: dict[int, list[Tensor]] = {}

    def start(self, context: Context) -> None:
        super().start(context)
        self.texts = list(context.texts)

    def begin(self, rows: list[int]) -> Tensor:
        kept = [self.seen.setdefault(id(text), []) for text in self.context.texts]
        unread = [
            len(text.tokens) - 1 - sum(map(len, of_text))
            for text, of_text in zip(self.context.texts, kept, strict=True)
        ]
        for of_text, count, features_nF in zip(kept, unread, self.context.take_features(unread), strict=True):
            of_text.append(features_nF[:count])
        self.paths: list[list[list[int]]] = [[[]] for _ in self.context.texts]
        return torch.stack([self._logits(text.tokens) for text in self.context.texts])

    def extend(self, level: Level) -> Tensor:
        tokens, parents = level.tokens_Bn.tolist(), level.parents_Bn
        above = [[0]] * len(tokens) if parents is None else parents.tolist()
        self.paths = [
            [[*paths[parent], token] for token, parent in zip(*of_row, strict=True)]
            for paths, *of_row in zip(self.paths, tokens, above, strict=True)
        ]
        rows = zip(self.context.texts, self.paths, strict=True)
        return torch.stack([torch.stack([self._logits(text.tokens + path) for path in paths]) for text, paths in rows])

    def _logits(self, tokens: list[int]) -> Tensor:
        logits_V = self.target[0](torch.tensor([tokens])).logits[0, -1]
        return logits_V.roll(1) if len(tokens) % 5 == 0 else logits_V


@pytest.mark.parametrize("policy", ["chain:draft_length=4", "best-first:size=9,depth=3", "best-first:size=8,depth=4"])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS])
@torch.no_grad()
def test_features_are_those_of_a_plain_pass(policy: str, prompts: list[list[int]]) -> None:
    target = make_llama(num_hidden_layers=4).requires_grad_(False)
    drafter = Knowing(target)
    decoder = SpeculativeDecoder(target, drafter, policy=policy)
    outputs = decoder.generate_batch(prompts, max_new_tokens=25, eos_token_id=None)
    assert max(record.accepted for out in outputs for record in out.rounds) >= 2, "paths are longer than one token"
    for text, prompt, out in zip(drafter.texts, prompts, outputs, strict=True):
        seen = torch.cat(drafter.seen[id(text)])
        plain = target(torch.tensor([prompt + out.tokens]), output_hidden_states=True).hidden_states
        expected = torch.cat([plain[1][0], plain[3][0], plain[-1][0]], -1)
        assert len(seen) > len(prompt) + 15
        torch.testing.assert_close(seen, expected[: len(seen)], rtol=1e-4, atol=1e-4)


def test_layers_of_a_language_model_that_contains_an_encoder_of_images() -> None:
    model = build(GitForCausalLM, vision_config(GitForCausalLM))
    assert layer_lists(model) == ["git.encoder.layer"]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_layers_of_an_encoder_decoder_that_are_lists_themselves(layers: int) -> None:
    """T5 keeps two parts of a layer of the encoder in a list, three of the decoder."""
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(num_layers=layers, **sizes))
    assert layer_lists(model) == ["encoder.block", "decoder.block"]
    draft = DraftModel.from_target(model, num_hidden_layers=layers, init="target_layers")
    assert len(draft.trained_blocks()) == 2 * layers
    target = T5ForConditionalGeneration(T5Config(num_layers=6, **sizes))
    copied = DraftModel.from_target(target, num_hidden_layers=layers, init="target_layers", keep="first").state_dict()
    last = f"decoder.block.{layers - 1}.layer.0.SelfAttention.q.weight"
    assert torch.equal(copied[f"model.{last}"], target.state_dict()[last])
    model = T5ForConditionalGeneration(T5Config(num_layers=3, num_decoder_layers=1, **sizes))
    with pytest.raises(ConfigError, match="no list of 3 layers"):
        layer_lists(model)
