"""Checks of models on first use: rollback of recurrent layers, prompts with images, and invariant passes.

Logits after discarded draft tokens, or after a prompt with images, are compared with those of plain passes.
"""

from collections import Counter
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from draftsmith.decode.passes.attention import WITH_ROLLBACK, passes_of
from draftsmith.decode.passes.base import INVARIANT_SLOTS, INVARIANT_WIDTH, Plan
from draftsmith.decode.passes.recurrent import is_recurrent
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.hidden_states import ProcessorInputs, extended, inputs_for
from draftsmith.heads.lm_head import evaluating
from draftsmith.heads.model_config import EXPERTS, context_limit, text_config, uncompiled

if TYPE_CHECKING:
    from draftsmith.decode.passes.capability import Capability

TOLERANCE = {torch.float64: 0.02, torch.float32: 0.02}
HALF_TOLERANCE = 0.2
"""Relative to the standard deviation of the logits: above rounding, below the effect of a wrong position or mask."""
CONTEXTS = (6, 3)
"""Tokens of two texts before the first draft."""
ROUNDS = ((1, 3), (3, 2), (3, 4), (3, 1), (3, 4), (3, 2), (4, 2), (1, 3))
"""Committed tokens of both texts in each round. More than a mixer reads again in one pass."""
WIDTH = 4


def check_rollback(model: PreTrainedModel, tolerance: float, rows: int) -> None:
    """Raise ConfigError unless logits after discarded drafts equal those of a plain forward pass.

    Args:
        tolerance: the largest difference, relative to the standard deviation of the logits.
        rows: 1, or 2 for a batch of texts of different lengths.
    """
    kind, what = model.config.model_type, "a text" if rows == 1 else "texts of different lengths"
    try:
        gap = rollback_gap(model, rows)
    except ConfigError:
        raise
    except Exception as error:  # models raise errors without a common base class
        raise ConfigError(
            f"model_type={kind!r} cannot read drafts ({reason_of(error)}); expected another target"
        ) from error
    if not gap < tolerance:
        raise ConfigError(
            f"model_type={kind!r} has recurrent layers, and after discarded draft tokens of {what} its logits "
            f"differ from those of a plain forward pass (by {gap:.2g} standard deviations); expected another target"
        )


def rollback_gap(model: PreTrainedModel, rows: int) -> float:
    """Return the largest difference of logits between chains after discarded drafts and plain forward passes.

    It is relative to the standard deviation of the logits. `rows`: 1, or 2 for a batch of texts of different lengths.
    """
    generator = torch.Generator().manual_seed(0)
    length = max(CONTEXTS) + sum(max(counts) for counts in ROUNDS) + WIDTH
    texts = torch.randint(text_config(model).vocab_size, (rows, length), generator=generator).tolist()
    device = next(model.parameters()).device
    expected_BTV = model(input_ids=torch.tensor(texts, device=device), use_cache=False).logits
    runner = ModelRunner(model, rows)
    runner.append([text[:context] for text, context in zip(texts, CONTEXTS, strict=False)])
    gap = 0.0
    for counts in ROUNDS:
        kept, starts = counts[:rows], list(runner.lengths)
        # The tokens after the committed ones are others than the text's.
        drafts = [
            text[start : start + count] + text[: WIDTH - count]
            for text, start, count in zip(texts, starts, kept, strict=True)
        ]
        logits_BQV = runner.tree(torch.tensor(drafts, device=device), [tuple(range(-1, WIDTH - 2))])
        for row, (start, count) in enumerate(zip(starts, kept, strict=True)):
            difference = logits_BQV[row, :count] - expected_BTV[row, start : start + count]
            gap = max(gap, float(difference.abs().max().nan_to_num(torch.inf)))
        runner.commit([list(range(count)) for count in kept])
    return gap / float(expected_BTV.float().std().clamp_min(1e-6))


# Prompts with images.

CHAIN = 3
_CHECKED: "WeakKeyDictionary[PreTrainedModel, set[frozenset[str]]]" = WeakKeyDictionary()


def usable_inputs(model: PreTrainedModel, ids: list[int], given: ProcessorInputs | None) -> ProcessorInputs | None:
    """Return the processor's tensors of a prompt, placed for the model; None without any.

    Raises:
        ConfigError: for a model that does not read them, or does not continue the prompt as `check_prompt` requires.
    """
    if not given:
        return None
    if model.config.is_encoder_decoder:
        raise ConfigError("inputs with an encoder-decoder target; expected prompts without images")
    if passes_of(model) not in WITH_ROLLBACK:
        raise ConfigError("inputs with a target that reads tokens again in each round; expected prompts of text")
    inputs = inputs_for(model, given)
    if inputs:
        check_prompt(model, ids, inputs)
    return inputs


def check_prompt(model: PreTrainedModel, ids: list[int], inputs: ProcessorInputs) -> None:
    """Raise ConfigError unless logits after a prompt with these tensors equal those of a plain forward pass.

    Measured once for a model and the names of the tensors: no config says how positions and masks continue after an
    image.
    """
    checked = _CHECKED.setdefault(model, set())
    if frozenset(inputs) in checked:
        return
    refusal = f"model_type={model.config.model_type!r} with {', '.join(inputs)}"
    try:
        gap = _gap(model, ids, inputs)
    except ConfigError:
        raise
    except Exception as error:  # models raise errors without a common base class
        raise ConfigError(
            f"{refusal}: its forward pass fails ({reason_of(error)}); expected tensors of its own processor for this "
            "prompt, and a model that reads images with the prompt only"
        ) from error
    if not gap < TOLERANCE.get(next(model.parameters()).dtype, HALF_TOLERANCE):
        raise ConfigError(
            f"{refusal}: after the prompt its logits with a cache differ from those without (by {gap:.2g} standard "
            "deviations); expected another target, or prompts without images"
        )
    checked.add(frozenset(inputs))


def _gap(model: PreTrainedModel, ids: list[int], inputs: ProcessorInputs) -> float:
    """Return the largest difference of logits after the prompt and a chain, in standard deviations."""
    counts = Counter(ids)
    text = min(reversed(ids), key=counts.__getitem__)  # placeholders of images are the frequent tokens
    tokens, device = [*ids, *[text] * CHAIN], next(model.parameters()).device
    runner = ModelRunner(model, 1)
    after_prompt_V = runner.read_prompts([ids], [inputs])[0]
    after_chain_QV = runner.tree(torch.tensor([tokens[-CHAIN:]], device=device), [tuple(range(-1, CHAIN - 2))])[0]
    read_QV = torch.cat([after_prompt_V[None], after_chain_QV])
    whole = extended(inputs, len(ids), len(tokens))
    output = model(input_ids=torch.tensor([tokens], device=device), **whole, use_cache=False)
    expected_QV = output.logits[0, -CHAIN - 1 :]
    return float((read_QV - expected_QV).abs().max() / expected_QV.float().std().clamp_min(1e-6))


# Passes in which the logits of a token do not depend on its place: greedy texts equal the target's bit by bit. In bf16,
# passes over one and over several tokens choose other kernels and round differently, which changes the argmax at near
# ties. With one number of tokens and of slots for every pass, each row of it is computed in the same way.

CHAINS_ONLY = "invariant=True computes the tokens of a branch in another order"
_MEASURED: "WeakKeyDictionary[PreTrainedModel, bool]" = WeakKeyDictionary()


def require_invariant(model: PreTrainedModel, capability: "Capability", *, compile: bool) -> None:
    """Raise ConfigError unless the logits of a token are equal at every place of a pass; measured once a model."""
    if compile:
        raise ConfigError("invariant=True with compile=True, whose kernels depend on the text's length; expected one")
    if any(getattr(text_config(model), name, None) for name in EXPERTS):
        raise ConfigError(
            f"invariant=True with model_type={capability.kind!r}, whose experts read as many tokens as are routed to "
            "them; expected invariant=False"
        )
    if model.config.is_encoder_decoder or capability.no_ragged or is_recurrent(model):
        raise ConfigError(
            f"invariant=True with model_type={capability.kind!r}; expected a decoder-only target with attention layers"
        )
    if model not in _MEASURED:
        with evaluating(model), uncompiled(model):
            _MEASURED[model] = _is_invariant(model)
    if not _MEASURED[model]:
        parameter = next(model.parameters())
        dtype = str(parameter.dtype).removeprefix("torch.")
        raise ConfigError(
            f"invariant=True with model_type={capability.kind!r} in {dtype} on {parameter.device.type}: the logits of "
            "a token depend on its place in a pass; expected invariant=False"
        )


@torch.inference_mode()
def _is_invariant(model: PreTrainedModel) -> bool:
    """Return whether passes that start at each token of a chain return the same logits for it, bit by bit."""
    device, generator = next(model.parameters()).device, torch.Generator().manual_seed(0)
    limit = context_limit(model.config)
    # Passes end before, at and after a multiple of the slots, if the context is as long.
    before = INVARIANT_SLOTS - INVARIANT_WIDTH - INVARIANT_WIDTH // 2
    before = before if limit is None else max(1, min(before, limit - INVARIANT_WIDTH))
    count = before + INVARIANT_WIDTH
    tokens_1T = torch.randint(text_config(model).vocab_size, (1, count), generator=generator).to(device)
    runner = ModelRunner(model, 1, Plan(invariant=True))
    runner.append(tokens_1T[:, :before].tolist())
    chain_1Q = tokens_1T[:, before:]
    first_1QV = runner.line(chain_1Q)
    for start in range(1, INVARIANT_WIDTH):
        runner.commit([[0]])
        if not torch.equal(runner.line(chain_1Q[:, start:]), first_1QV[:, start:]):
            return False
    return True
