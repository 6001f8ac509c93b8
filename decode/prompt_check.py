"""Checks that a model continues prompts with images from the cache as it does in a plain forward pass."""

from collections import Counter
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from draftsmith.decode.attention import WITH_ROLLBACK, passes_of
from draftsmith.decode.capability import HALF_TOLERANCE, TOLERANCE
from draftsmith.decode.model_runner import ModelRunner
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.processor_inputs import ProcessorInputs, extended, inputs_for

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
