"""Checks of models on first use: logits after drafts and after prompts with images, and passes that are invariant.

Logits are compared with those of plain forward passes without a cache: no config says how positions, masks and states
continue.
"""

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.passes.attention import WITH_ROLLBACK, passes_of
from draftsmith.decode.passes.plan import INVARIANT_SLOTS, INVARIANT_WIDTH, Plan
from draftsmith.decode.passes.recurrent import is_recurrent
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.draft_tree import chain_parents
from draftsmith.heads.hidden_states import ProcessorInputs, extended, inputs_for
from draftsmith.heads.lm_head import evaluating
from draftsmith.heads.model_config import EXPERTS, context_limit, text_config, uncompiled

# Shapes: B sequences, T positions, Q tokens of a chain, V vocabulary.

TOLERANCE = {torch.float64: 0.02, torch.float32: 0.02}
HALF_TOLERANCE = 0.2
"""Relative to the standard deviation of the logits: above rounding, below the effect of a wrong position or mask."""
CONTEXT, DRAFT = 6, 3
"""Tokens before a draft, and of the chain from its root on; fewer before it in a shorter context."""
ROUNDS = ((1, 3), (1, 1))
"""Committed tokens of two sequences in each round; the second one begins two tokens shorter, and in the last round both
have one length."""
MANY_ROUNDS = ((1, 2), (2, 1), *[(2, 2)] * 7, (3, 2), (1, 3), (1, 2), (1, 1))
"""More than a mixer, or a copied cache, recomputes in one pass; most drafts are discarded in part."""


def why_wrong(gap: Callable[[], float], model: PreTrainedModel, where: str = "") -> str:
    """Return why the logits that `gap` compares differ, or cannot be computed; empty if they are equal.

    `where`: the first words of the reason, for logits that were not computed here.
    """
    dtype = next(model.parameters()).dtype
    try:
        found = gap()
    except ConfigError:
        raise  # it says itself what the model lacks
    except Exception as error:  # models raise errors without a common base class
        return f"{where}its forward pass over a draft fails ({reason_of(error)})"
    if found != found:
        name = str(dtype).removeprefix("torch.")
        return f"it returns NaN logits in {name}: its weights are damaged, or overflow in that dtype"
    if found < tolerance_of(model):
        return ""
    return f"{where}logits differ from those of a plain pass by {found:.2g} standard deviations"


def tolerance_of(model: PreTrainedModel) -> float:
    """Return the largest difference of logits that rounding explains, in standard deviations."""
    return TOLERANCE.get(next(model.parameters()).dtype, HALF_TOLERANCE)


def difference(read: Tensor, expected: Tensor) -> Tensor:
    """Return the largest difference, relative to the standard deviation of the logits; NaN if any is NaN."""
    return (read - expected).abs().max() / expected.float().std().clamp_min(1e-6)


def random_tokens(model: PreTrainedModel, count: int, seed: int = 0) -> list[int]:
    """Return random tokens without padding, which some models do not count among the positions."""
    config, generator = text_config(model), torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (2 * count,), generator=generator).tolist()
    padding = getattr(config, "pad_token_id", None)  # RWKV's config has none
    return [token for token in tokens if token != padding][:count]


def context_of(model: PreTrainedModel) -> int:
    """Return the number of tokens before the drafts; ConfigError for a model that cannot read enough of them."""
    limit = context_limit(model.config) or CONTEXT + DRAFT
    if limit < DRAFT + DRAFT:
        raise ConfigError(
            f"model_type={model.config.model_type!r} reads at most {limit} tokens; expected a context of at least "
            f"{DRAFT + DRAFT}, which drafts are verified in"
        )
    return min(CONTEXT, limit - DRAFT)


def ids_of(model: PreTrainedModel, rows: list[list[int]]) -> Tensor:
    """Return tokens on the model's device."""
    return torch.tensor(rows, device=next(model.parameters()).device)


def source_of(model: PreTrainedModel) -> list[int]:
    """Return the tokens that an encoder reads; none without an encoder."""
    return random_tokens(model, context_of(model), seed=3) if model.config.is_encoder_decoder else []


def plain_logits(model: PreTrainedModel, texts: list[list[int]]) -> Tensor:
    """Return the logits [B, T, V] of one plain forward pass over equally long texts."""
    ids_BT = ids_of(model, texts)
    inputs: dict[str, Any] = {"input_ids": ids_BT}
    if model.config.is_encoder_decoder:
        inputs = {"input_ids": ids_of(model, [source_of(model)] * len(texts)), "decoder_input_ids": ids_BT}
    elif "position_ids" in inspect.signature(model.forward).parameters:  # from 0 as in `generate`, for RoBERTa too
        inputs["position_ids"] = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand(ids_BT.shape)
    return model(**inputs, use_cache=False).logits


def reader(model: PreTrainedModel, contexts: list[list[int]]) -> ModelRunner:
    """Return a runner that has read these contexts."""
    runner = ModelRunner(model, len(contexts), Plan(sources=[source_of(model) for _ in contexts]))
    runner.append(contexts)
    return runner


def rollback_gap(model: PreTrainedModel, rows: int, rounds: tuple[tuple[int, int], ...] = MANY_ROUNDS) -> float:
    """Return the largest difference between chains after discarded drafts and plain forward passes over the sequences.

    `rows`: 1, or 2 for a batch of sequences, at first of different lengths.
    """
    before = context_of(model) - 1
    length = before + sum(max(counts) for counts in rounds)
    texts = [random_tokens(model, length, seed=row) for row in range(rows)]
    expected_BTV = plain_logits(model, texts)
    runner = reader(model, [text[: before - 2 * row] for row, text in enumerate(texts)])
    gaps = []
    for counts in rounds:
        starts = list(runner.lengths)
        # The tokens after the committed ones are others than the text's.
        drafts = [
            text[start : start + count] + text[: DRAFT - count]
            for text, start, count in zip(texts, starts, counts, strict=False)
        ]
        logits_BQV = runner.tree(ids_of(model, drafts), [chain_parents(DRAFT - 1)])
        for row, (start, count) in enumerate(zip(starts, counts, strict=False)):
            gaps.append((logits_BQV[row, :count] - expected_BTV[row, start : start + count]).abs().max())
        runner.commit([list(range(count)) for count in counts[:rows]])
    return float(torch.stack(gaps).max() / expected_BTV.float().std().clamp_min(1e-6))


# Prompts with images.

CHAIN = 3
_CHECKED: "WeakKeyDictionary[PreTrainedModel, set[frozenset[str]]]" = WeakKeyDictionary()


def usable_inputs(model: PreTrainedModel, ids: list[int], given: ProcessorInputs | None) -> ProcessorInputs | None:
    """Return the processor's tensors of a prompt, placed for the model; None without any.

    Raises:
        ConfigError: for a model that does not read them, or whose logits after the prompt and after a chain differ from
            those of a plain forward pass; measured once for a model and the names of the tensors.
    """
    if not given:
        return None
    if model.config.is_encoder_decoder:
        raise ConfigError("inputs with an encoder-decoder target; expected prompts without images")
    if passes_of(model) not in WITH_ROLLBACK:
        raise ConfigError("inputs with a target that recomputes tokens in each round; expected prompts of text")
    inputs = inputs_for(model, given)
    checked = _CHECKED.setdefault(model, set())
    if inputs and frozenset(inputs) not in checked:
        if reason := why_wrong(lambda: _image_gap(model, ids, inputs), model, "after the prompt, "):
            raise ConfigError(
                f"model_type={model.config.model_type!r} with {', '.join(inputs)}: {reason}; expected tensors of its "
                "own processor, a model that reads images with the prompt only, or prompts without images"
            )
        checked.add(frozenset(inputs))
    return inputs


def _image_gap(model: PreTrainedModel, ids: list[int], inputs: ProcessorInputs) -> float:
    """Return the largest difference of logits after the prompt and a chain, in standard deviations."""
    counts = Counter(ids)
    text = min(reversed(ids), key=counts.__getitem__)  # placeholders of images are the frequent tokens
    tokens = [*ids, *[text] * CHAIN]
    runner = ModelRunner(model, 1)
    after_prompt_V = runner.read_prompts([ids], [inputs])[0]
    after_chain_QV = runner.tree(ids_of(model, [tokens[-CHAIN:]]), [chain_parents(CHAIN - 1)])[0]
    read_QV = torch.cat([after_prompt_V[None], after_chain_QV])
    whole = extended(inputs, len(ids), len(tokens))
    output = model(input_ids=ids_of(model, [tokens]), **whole, use_cache=False)
    return float(difference(read_QV, output.logits[0, -CHAIN - 1 :]))


# Passes in which the logits of a token do not depend on its index: greedy sequences equal the target's bit by bit. In
# bf16, passes over one and over several tokens choose other kernels and round differently, which changes the argmax at
# near ties. With one number of tokens and of slots for every pass, each row of it is computed in the same way.

CHAINS_ONLY = "invariant=True computes the tokens of a branch in another order"
_MEASURED: "WeakKeyDictionary[PreTrainedModel, bool]" = WeakKeyDictionary()


def require_invariant(model: PreTrainedModel, *, ragged: bool, compile: bool) -> None:
    """Raise ConfigError unless the logits of a token are equal at every index of a pass; measured once a model.

    `ragged`: whether sequences of different lengths share its passes.
    """
    kind = model.config.model_type
    if compile:
        raise ConfigError("invariant=True with compile=True, whose kernels depend on the text's length; expected one")
    if any(getattr(text_config(model), name, None) for name in EXPERTS):
        raise ConfigError(
            f"invariant=True with model_type={kind!r}, whose experts read as many tokens as are routed to "
            "them; expected invariant=False"
        )
    if model.config.is_encoder_decoder or not ragged or is_recurrent(model):
        raise ConfigError(
            f"invariant=True with model_type={kind!r}; expected a decoder-only target with attention layers"
        )
    if model not in _MEASURED:
        with evaluating(model), uncompiled(model):
            _MEASURED[model] = _is_invariant(model)
    if not _MEASURED[model]:
        parameter = next(model.parameters())
        dtype = str(parameter.dtype).removeprefix("torch.")
        raise ConfigError(
            f"invariant=True with model_type={kind!r} in {dtype} on {parameter.device.type}: the logits of "
            "a token depend on its index in a pass; expected invariant=False"
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
