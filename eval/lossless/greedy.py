"""Greedy texts with and without a drafter: are they the same tokens, and where not, is it rounding or a bug?

The target's logits along texts by plain forward passes: a reference that shares no code with the decoder.

The same tokens can be read whole, one by one or in blocks. Mathematically that is one and the same; in floating point
each way adds up in another order. How far the results differ is what a near tie, or a tolerance, is measured by.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.eval.prompts import Prompt
from draftsmith.heads.model_config import start_token

# Shapes: B texts behind one prompt, T tokens of each, V vocabulary.

BLOCK = 5
"""A verification of four draft tokens."""


@torch.inference_mode()
def read(model: PreTrainedModel, prompt: list[int], texts_BT: Tensor, *, width: int | None = None) -> Tensor:
    """Logits [B, T, V] that each token of `texts_BT` was to be chosen by, on the model's device.

    Args:
        prompt: what stands before every text; for an encoder-decoder model, what its encoder reads.
        texts_BT: [B, T]; what a text's last token is makes no difference.
        width: tokens of a forward pass behind the prompt's; None reads everything in one.
    """
    device = next(model.parameters()).device
    texts_BT = texts_BT.to(device)
    B, T = texts_BT.shape
    prompt_BP = torch.tensor([prompt], device=device).expand(B, -1)
    fixed: dict[str, object] = {}
    name = "input_ids"
    if model.config.is_encoder_decoder:
        states = model.get_encoder()(input_ids=prompt_BP, attention_mask=torch.ones_like(prompt_BP))
        fixed, name = {"encoder_outputs": states, "attention_mask": torch.ones_like(prompt_BP)}, "decoder_input_ids"
        prompt_BP = torch.full((B, 1), start_token(model), device=device)
    ids = torch.cat([prompt_BP, texts_BT[:, :-1]], 1)
    first = prompt_BP.shape[1]
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    if width is None:
        keep = {"logits_to_keep": T} if keeps else {}
        return model(**{name: ids}, **fixed, **keep, use_cache=False).logits[:, -T:]
    logits, cache = [], None
    ends = [*range(first, ids.shape[1], width), ids.shape[1]]
    for start, end in zip([0, *ends], ends, strict=False):
        keep = {"logits_to_keep": 1} if keeps and start == 0 else {}
        output = model(**{name: ids[:, start:end]}, **fixed, **keep, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits[:, -1:] if start == 0 else output.logits)
    return torch.cat(logits, 1)


# Shapes: T tokens of a text, V vocabulary.

MULTIPLE = 4
"""Of the measured difference: two tokens' logits may move towards each other, and the decoder's own order of adding up
is not among the three that are measured."""
BEST = 10
"""Logits of a place that compete; what is far below them may be rounded more coarsely."""


@dataclass(frozen=True)
class Divergence:
    """A greedy token that is not the target's favourite behind the same text."""

    prompt: str
    position: int
    """Of the token among the new ones, from 0."""
    token: int | None
    """With the drafter; None where that text has ended."""
    expected: int | None
    """The target's alone, or its argmax in one plain forward pass."""
    margin: float | None
    """Between the two largest logits there, read one token at a time; None where one text goes on and one does not."""
    gap: float | None
    """From the largest logit down to that of `token`."""
    bound: float
    """The gap that rounding explains: `MULTIPLE` times the largest difference between readings of this text."""
    kind: Literal["near tie", "bug"]


@dataclass(frozen=True)
class GreedyCheck:
    """What came of all prompts."""

    prompts: int = 0
    identical: int = 0
    """Texts that are the target's own, token by token."""
    tokens: int = 0
    drafted: int = 0
    """Draft tokens that were verified; without any nothing was tested."""
    divergences: list[Divergence] = field(default_factory=list)
    """The first of each text that parts from the target's own, and every token that is not the target's argmax."""

    @property
    def bugs(self) -> list[Divergence]:
        return [found for found in self.divergences if found.kind == "bug"]


def check_greedy(
    target: PreTrainedModel,
    decoder: SpeculativeDecoder,
    prompts: list[Prompt],
    alone: list[list[int]],
    *,
    max_new_tokens: int,
    done: Callable[[int], None],
) -> GreedyCheck:
    """Decode every prompt with the drafter and compare with `alone`, the target's own text for each.

    Behind a near tie two texts go different ways and cannot be compared any more. So every token, there and elsewhere,
    is also held against one plain forward pass over the drafter's text: it has to be the argmax, or nearly tie with it.
    """
    identical = tokens = drafted = 0
    found: list[Divergence] = []
    for prompt, own in zip(prompts, alone, strict=True):
        output = decoder.generate(prompt.input_ids, max_new_tokens=max_new_tokens, temperature=0.0)
        identical += output.tokens == own
        tokens += len(output.tokens)
        drafted += sum(record.drafted for record in output.rounds)
        found += divergences(target, prompt, output.tokens, own)
        done(len(output.tokens))
    return GreedyCheck(len(prompts), identical, tokens, drafted, found)


def divergences(target: PreTrainedModel, prompt: Prompt, tokens: list[int], alone: list[int]) -> list[Divergence]:
    """Where `tokens` part from `alone`, and where they are not the target's argmax behind themselves."""
    whole_TV = _logits(target, prompt, tokens)
    best = whole_TV.argmax(-1).tolist()
    expected = {place: best[place] for place, token in enumerate(tokens) if token != best[place]}
    parts = next(
        (i for i, (a, b) in enumerate(zip(tokens, alone, strict=False)) if a != b), min(len(tokens), len(alone))
    )
    if parts < max(len(tokens), len(alone)):
        expected[parts] = alone[parts] if parts < len(alone) else None
    if not expected:
        return []
    single_TV, bound = _single_and_bound(target, prompt, tokens, whole_TV)
    return [_judge(prompt, place, tokens, expected[place], single_TV, bound) for place in sorted(expected)]


def _judge(
    prompt: Prompt, place: int, tokens: list[int], expected: int | None, single_TV: Tensor, bound: float
) -> Divergence:
    if place == len(tokens) or expected is None:  # one text ends where the other goes on: no rounding does that
        token = tokens[place] if place < len(tokens) else None
        return Divergence(prompt.id, place, token, expected, None, None, bound, "bug")
    first, second = single_TV[place].topk(2).values.tolist()
    gap = first - float(single_TV[place, tokens[place]])
    kind = "near tie" if gap <= bound else "bug"
    return Divergence(prompt.id, place, tokens[place], expected, first - second, gap, bound, kind)


def _logits(target: PreTrainedModel, prompt: Prompt, tokens: list[int], width: int | None = None) -> Tensor:
    return read(target, prompt.input_ids, torch.tensor([tokens]), width=width)[0]


def _single_and_bound(
    target: PreTrainedModel, prompt: Prompt, tokens: list[int], whole_TV: Tensor
) -> tuple[Tensor, float]:
    """Logits read one by one, in fp64, and the gap that rounding explains.

    The bound is measured, not assumed: plain passes of the model over the same tokens, whole, one by one and in blocks
    of five, and the largest difference between any two of them in the ten best logits of any place. It is never below
    one unit in the last place of the largest logit, which equal results may still hide.
    """
    single_TV = _logits(target, prompt, tokens, 1)
    best_TK = whole_TV.topk(min(BEST, whole_TV.shape[1])).indices
    step = torch.finfo(single_TV.dtype).eps * float(single_TV.gather(1, best_TK).abs().max())
    readings = [whole_TV, single_TV, _logits(target, prompt, tokens, BLOCK)]
    readings_TK = [reading.double().gather(1, best_TK) for reading in readings]
    noise = max(float((a - b).abs().max()) for place, a in enumerate(readings_TK) for b in readings_TK[:place])
    return single_TV.double(), MULTIPLE * max(noise, step)
