"""Compare greedy texts with and without a drafter, and tell rounding from bugs.

The reference are logits of plain forward passes, which share no code with the decoder. A text can be read in one pass,
token by token or in blocks. These are mathematically equal, but floating-point sums have another order; their measured
differences from a pass in twice the precision define a near tie.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache.rollback import cache_name
from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.errors import DraftsmithError
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.results import DivergenceKind
from draftsmith.heads.hidden_states import inputs_for, prompt_positions
from draftsmith.heads.model_config import start_token

# Shapes: B texts after one prompt, T tokens of each, V vocabulary.

BLOCK = 5
"""Tokens of a forward pass that verifies four draft tokens."""


@torch.inference_mode()
def read(model: PreTrainedModel, prompt: Prompt, texts_BT: Tensor, *, width: int | None = None) -> Tensor:
    """Return the logits [B, T, V] from which each token of `texts_BT` is chosen, on the model's device.

    Args:
        prompt: tokens before every text, and its images; for an encoder-decoder model, the encoder's input.
        texts_BT: [B, T]; the last token of a text makes no difference.
        width: tokens per forward pass after the prompt's; None reads everything in one pass.
    """
    device = next(model.parameters()).device
    texts_BT = texts_BT.to(device)
    B, T = texts_BT.shape
    if prompt.inputs or hasattr(model.base_model, "get_rope_index"):
        return torch.cat([_read_one_by_one(model, prompt, text_1T, width) for text_1T in texts_BT.split(1)])
    prompt_BP = torch.tensor([prompt.input_ids], device=device).expand(B, -1)
    fixed: dict[str, object] = {}
    name = "input_ids"
    if model.config.is_encoder_decoder:
        states = model.get_encoder()(input_ids=prompt_BP, attention_mask=torch.ones_like(prompt_BP))
        fixed, name = {"encoder_outputs": states, "attention_mask": torch.ones_like(prompt_BP)}, "decoder_input_ids"
        prompt_BP = torch.full((B, 1), start_token(model), device=device)
    ids = torch.cat([prompt_BP, texts_BT[:, :-1]], 1)
    first = prompt_BP.shape[1]
    accepted = inspect.signature(model.forward).parameters
    keeps, held = "logits_to_keep" in accepted, cache_name(accepted)
    if width is None:
        kept_T = torch.arange(ids.shape[1] - T, ids.shape[1], device=device)  # a view is slow in bf16 on a CPU
        keep = {"logits_to_keep": kept_T} if keeps else {}
        return model(**{name: ids}, **fixed, **keep, use_cache=False).logits[:, -T:]
    logits, cache = [], None
    ends = [*range(first, ids.shape[1], width), ids.shape[1]]
    for start, end in zip([0, *ends], ends, strict=False):
        keep = {"logits_to_keep": torch.tensor([end - 1], device=device)} if keeps and start == 0 else {}
        output = model(**{name: ids[:, start:end]}, **fixed, **keep, **{held: cache}, use_cache=True)
        cache = output[held]
        logits.append(output.logits[:, -1:] if start == 0 else output.logits)
    return torch.cat(logits, 1)


def _read_one_by_one(model: PreTrainedModel, prompt: Prompt, text_1T: Tensor, width: int | None) -> Tensor:
    """Return the logits [1, T, V] from which each token of one text is chosen.

    The prompt has a pass of its own: a text may contain the placeholder of an image, for which there is none.
    """
    device, first = text_1T.device, len(prompt.input_ids)
    inputs = inputs_for(model, prompt.inputs or {})
    prompt_1P = torch.tensor([prompt.input_ids], device=device)
    accepted = inspect.signature(model.forward).parameters
    held = cache_name(accepted)
    _, shift = prompt_positions(model, prompt_1P, inputs)
    keep = {"logits_to_keep": torch.tensor([first - 1], device=device)} if "logits_to_keep" in accepted else {}
    output = model(input_ids=prompt_1P, **inputs, **keep, use_cache=True)
    logits = [output.logits[:, -1:]]
    width = width or text_1T.shape[1]
    for start in range(0, text_1T.shape[1] - 1, width):
        part_1W = text_1T[:, start : min(start + width, text_1T.shape[1] - 1)]
        # Without them, models with M-RoPE take the shift from the prompt that they have read last.
        positions_1W = torch.arange(part_1W.shape[1], device=device)[None] + first + start + shift
        where = {"position_ids": positions_1W} if "position_ids" in accepted else {}
        output = model(input_ids=part_1W, **where, **{held: output[held]}, use_cache=True)
        logits.append(output.logits)
    return torch.cat(logits, 1)


# Shapes: T tokens of a text, V vocabulary, K largest logits, R readings.

MULTIPLE = 4
"""Factor of the measured error: two logits may move towards each other, and the decoder's order of summation is not
among those that are measured. In 19 changes of the argmax of SmolLM2 and Gemma 3 in bfloat16, between passes of 1 to 8
tokens, the factor was at most 0.96."""
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
MESSAGE = 200
"""Characters of an error's message that are kept."""
BEST = 10
"""Number of largest logits that are compared; logits far below them may be rounded more coarsely."""


@dataclass(frozen=True)
class Divergence:
    """A greedy token that is not the target's argmax after the same text."""

    prompt: str
    position: int
    """Index of the token among the new ones, from 0."""
    token: int | None
    """The token with the drafter; None if that text has ended."""
    expected: int | None
    """The token of the target alone, or its argmax in one plain forward pass."""
    margin: float | None
    """Difference of the two largest logits in twice the precision; None if only one of the texts has ended, or if that
    pass failed."""
    gap: float | None
    """Difference of the largest logit and that of `token`, likewise."""
    bound: float | None
    """The largest gap that rounding explains, likewise: `MULTIPLE` times the largest error of the logits there."""
    kind: DivergenceKind
    failure: str | None = None
    """The error that ended the pass in twice the precision."""


@dataclass(frozen=True)
class GreedyCheck:
    """The result over all prompts."""

    prompts: int = 0
    identical: int = 0
    """Texts that equal the target's own."""
    tokens: int = 0
    drafted: int | None = 0
    """Draft tokens that were verified; with none, nothing was tested. None: a server does not count them."""
    divergences: list[Divergence] = field(default_factory=list)
    """The first token of each text that differs from the target's own, and every token that is not its argmax."""

    @property
    def bugs(self) -> list[Divergence]:
        return [divergence for divergence in self.divergences if divergence.kind == "bug"]

    @property
    def not_judged(self) -> list[Divergence]:
        return [divergence for divergence in self.divergences if divergence.kind == "difference not judged"]


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

    After a near tie two texts differ and can no longer be compared. Therefore every token is also compared with one
    plain forward pass over the drafter's text: it has to be the argmax or a near tie.
    """
    identical = tokens = drafted = 0
    differing: list[Divergence] = []
    for prompt, own in zip(prompts, alone, strict=True):
        options = {"max_new_tokens": max_new_tokens, "temperature": 0.0}
        output = decoder.generate(prompt.input_ids, inputs=prompt.inputs, **options)
        identical += output.tokens == own
        tokens += len(output.tokens)
        drafted += sum(record.drafted for record in output.rounds)
        differing += divergences(target, prompt, output.tokens, own)
        done(len(output.tokens))
    return GreedyCheck(len(prompts), identical, tokens, drafted, differing)


def divergences(
    target: PreTrainedModel,
    prompt: Prompt,
    tokens: list[int],
    alone: list[int],
    *,
    slack: float = 0.0,
) -> list[Divergence]:
    """Return where `tokens` first differ from `alone`, and where they are not the target's argmax.

    Args:
        slack: added to the gap that rounding explains.
    """

    def logits(width: int | None = None) -> Tensor:
        return read(target, prompt, torch.tensor([tokens]), width=width)[0]

    whole_TV = logits() if tokens else torch.empty(0, 1)
    best = whole_TV.argmax(-1).tolist()
    expected = {place: best[place] for place, token in enumerate(tokens) if token != best[place]}
    parts = next(
        (i for i, (a, b) in enumerate(zip(tokens, alone, strict=False)) if a != b), min(len(tokens), len(alone))
    )
    if parts < max(len(tokens), len(alone)):
        expected[parts] = alone[parts] if parts < len(alone) else None
    if not expected:
        return []
    ends = {place for place, token in expected.items() if place == len(tokens) or token is None}
    found = [_other_end(prompt, place, tokens, expected.pop(place)) for place in ends]
    if not expected:
        return found
    try:
        with widened(target):
            exact_TV = logits()
    except WiderPassFailed as error:
        for place, token in expected.items():
            judged = (None, None, None, "difference not judged", str(error))
            found.append(Divergence(prompt.id, place, tokens[place], token, *judged))
    else:
        bound_T = _bound([whole_TV, logits(1), logits(BLOCK)], exact_TV) + slack
        for place, token in expected.items():
            judged = _judge(exact_TV[place].double(), tokens[place], float(bound_T[place]))
            found.append(Divergence(prompt.id, place, tokens[place], token, *judged))
    return sorted(found, key=attrgetter("position"))


def _other_end(prompt: Prompt, place: int, tokens: list[int], expected: int | None) -> Divergence:
    """Return the difference of two texts of which one has ended, which no rounding explains."""
    token = tokens[place] if place < len(tokens) else None
    return Divergence(prompt.id, place, token, expected, None, None, None, "bug")


def _judge(exact_V: Tensor, token: int, bound: float) -> tuple[float, float, float, DivergenceKind]:
    """Return the margin of the two largest logits, the gap to that of `token`, the bound, and what they mean."""
    first, second = exact_V.topk(2).values.tolist()
    gap = first - float(exact_V[token])
    kind: DivergenceKind = "near tie" if gap <= bound else "bug"
    return first - second, gap, bound, kind


def _bound(readings: list[Tensor], exact_TV: Tensor) -> Tensor:
    """Return the largest gap [T] of two logits that rounding explains.

    It is `MULTIPLE` times the largest error in the ten largest logits of the position, and at least one unit in the
    last place of the largest logit, since equal results do not prove equal sums.

    Args:
        readings: logits [T, V] in the target's own precision: of one pass, token by token and in blocks of five.
        exact_TV: logits in twice the precision.
    """
    best_TK = exact_TV.topk(min(BEST, exact_TV.shape[1])).indices
    exact_TK = exact_TV.gather(1, best_TK).double()
    errors_RTK = torch.stack([reading.gather(1, best_TK).double() - exact_TK for reading in readings])
    step_T = torch.finfo(readings[0].dtype).eps * exact_TK.abs().amax(1)
    return MULTIPLE * errors_RTK.abs().amax((0, 2)).maximum(step_T)


class WiderPassFailed(DraftsmithError):
    """A pass in twice the precision failed."""


@contextmanager
def widened(model: PreTrainedModel) -> Iterator[None]:
    """Give the weights and buffers of `model` twice the precision inside the context.

    Raises:
        WiderPassFailed: naming the error of a pass inside the context.
    """
    wider = WIDER.get(model.dtype, torch.float64)
    kept = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    try:
        for tensor, data in kept:
            tensor.data = data.to(wider)
        yield
    except (RuntimeError, TypeError, ValueError) as error:  # too little memory, or kernels of one precision only
        raise WiderPassFailed(f"{type(error).__name__}: {' '.join(str(error).split())[:MESSAGE]}") from error
    finally:
        for tensor, data in kept:
            tensor.data = data
