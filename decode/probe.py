"""One small question to every model before it is trusted: does it read a tree of tokens as it reads their paths?

Some architectures derive positions from places in the cache, ignore masks or keep state that cannot be rolled back.
Decoding with them would be wrong without any sign of it, so they are refused.
"""

import inspect
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from draftsmith.decode.reader import Reader
from draftsmith.decode.target import RootedTree
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.draft import Draft

TOLERANCE = {torch.float64: 0.02, torch.float32: 0.02}
HALF_TOLERANCE = 0.2
"""Of the logits' standard deviation: rounding stays below it, a wrong position or mask rarely does."""

_PASSED: "WeakKeyDictionary[nn.Module, bool]" = WeakKeyDictionary()


@torch.inference_mode()
def require_tree_reading(model: nn.Module) -> None:
    """ConfigError, with the reason, unless `model` reads trees right. Asked once for each model."""
    if model in _PASSED:
        return
    kind = getattr(model.config, "model_type", type(model).__name__)
    if not model.config.is_encoder_decoder and "position_ids" not in inspect.signature(model.forward).parameters:
        # ALiBi and its like: so small a difference that the question below could miss it in half precision.
        raise ConfigError(
            f"model_type={kind!r} takes no position_ids: its positions follow from places in the cache, which a draft "
            "tree's siblings share out wrongly; expected another target"
        )
    context, draft = _question(model)
    tolerance = TOLERANCE.get(next(model.parameters()).dtype, HALF_TOLERANCE)
    try:
        logits_NV = _as_tree(model, context, draft)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError, NotImplementedError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"model_type={kind!r} cannot read draft trees ({reason_of(error)}); expected another target"
        ) from error
    if bool(logits_NV.isnan().any()):
        dtype = str(logits_NV.dtype).removeprefix("torch.")
        raise ConfigError(
            f"model_type={kind!r} gives logits that are NaN in {dtype}: its weights are damaged, or overflow in that "
            "dtype; expected finite logits"
        )
    for node in (1, 3):  # siblings' children: wrong positions and wrong masks both show here
        expected_V = _as_path(model, [*context, *(draft.tokens[step] for step in draft.path(node))])
        gap = float((logits_NV[node + 1] - expected_V).abs().max() / expected_V.float().std().clamp_min(1e-6))
        if not gap < tolerance:
            raise ConfigError(
                f"model_type={kind!r} reads a draft tree otherwise than its paths (logits differ by {gap:.2g} standard "
                "deviations): its positions or masks cannot be set from outside; expected another target"
            )
    _PASSED[model] = True


def _question(model: nn.Module) -> tuple[list[int], Draft]:
    """Some tokens and two branches of two tokens behind them."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocabulary, (10,), generator=torch.Generator().manual_seed(0)).tolist()
    return ids[:6], Draft(tuple(ids[6:]), (-1, 0, -1, 2))


def _as_tree(model: nn.Module, context: list[int], draft: Draft) -> Tensor:
    reader = Reader(model, 1, [context])
    reader.append([context[:-1]])
    return reader.branch([RootedTree.of(context[-1], draft)], [list(range(len(draft) + 1))])[0]


def _as_path(model: nn.Module, tokens: list[int]) -> Tensor:
    """Logits [V] behind `tokens`, by a plain forward pass."""
    ids = torch.tensor([tokens], device=next(model.parameters()).device)
    if model.config.is_encoder_decoder:
        return model(input_ids=ids[:, :6], decoder_input_ids=ids).logits[0, -1]
    return model(input_ids=ids, use_cache=False).logits[0, -1]
