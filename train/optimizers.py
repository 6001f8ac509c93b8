"""The optimizers of a run: Muon for the matrices inside the layers and AdamW for the rest, or AdamW alone."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.heads.start import InputSizes
from draftsmith.train.engine import Optimizers

Sizes = dict[Tensor, InputSizes]
"""The sizes of what some weights of a drafter read."""
BETAS = (0.9, 0.95)
"""AdamW's."""
MEASURED_TOTAL = 64.0
"""Sum of the absolute inputs of an lm_head on the targets for which Muon's rates were measured: 54 to 100."""
OUTSIDE_LAYERS = ("lm_head", "embed", "markov", "confidence")
"""Parts of the names of matrices that Muon does not optimize, whatever module they belong to."""


def optimizers(
    drafter: nn.Module,
    kind: str,
    weight_decay: float,
    adapters: nn.ParameterList | None = None,
    ratio: float = 1.0,
    dtype: torch.dtype = torch.float32,
    adamw_ratio: float = 1.0,
    sizes: Sizes | None = None,
) -> Optimizers:
    """Return optimizers with a learning rate of 0, which every step sets.

    Muon optimizes the matrices inside the layers and AdamW the rest, as Muon's authors recommend. The fused AdamW needs
    no memory beside the moments; an accelerator's default, which updates lists of tensors, needs that of the weights.

    Args:
        kind: the recipe's `train.optimizer`.
        adapters: on the target, for AdamW at `ratio` times the drafter's rate; the group stores it as `ratio`.
        dtype: of Muon's matrix products.
        adamw_ratio: AdamW's rate for the drafter's other weights relative to the drafter's rate.
        sizes: the sizes of the inputs of some weights, for which the rates hold as for inputs of ordinary sizes.
    """
    sizes = sizes or {}
    trained, outside = [weight for weight in drafter.parameters() if weight.requires_grad], _outside_layers(drafter)
    matrices = [weight for weight in trained if kind == "muon" and weight.ndim == 2 and id(weight) not in outside]
    taken = {id(weight) for weight in matrices}
    rest = [weight for weight in trained if id(weight) not in taken]
    made: Optimizers = []
    if matrices:
        from draftsmith.distill.muon import Muon

        plain = [weight for weight in matrices if weight not in sizes]
        groups: list[dict[str, Any]] = [{"params": plain}] if plain else []
        groups += [{"params": [w], "columns": sizes[w].columns_F} for w in matrices if w in sizes]
        made.append(Muon(groups, lr=0.0, weight_decay=weight_decay, dtype=dtype))
    if adapters is not None:
        group = {"params": list(adapters), "ratio": ratio}
        made.append(torch.optim.AdamW([group], lr=0.0, betas=BETAS, weight_decay=0.0, fused=True))
    if rest:
        plain = [weight for weight in rest if weight not in sizes]
        groups = [{"params": plain, "ratio": adamw_ratio}] if plain else []
        groups += [{"params": [w], "ratio": adamw_ratio * _share(sizes[w], kind)} for w in rest if w in sizes]
        made.append(torch.optim.AdamW(groups, lr=0.0, betas=BETAS, weight_decay=weight_decay, fused=True))
    return made


def _share(sizes: InputSizes, kind: str) -> float:
    """Return the factor on AdamW's rate for a weight with such inputs.

    A step of AdamW moves each value of a weight by up to the rate, hence an output by up to the rate times `total`.
    """
    ordinary = MEASURED_TOTAL if kind == "muon" else len(sizes.columns_F)  # alone its rates fall with the width
    return min(1.0, ordinary / max(sizes.total, 1e-9))


def _outside_layers(drafter: nn.Module) -> set[int]:
    """Return the ids of the weights that are no matrices of a layer: embeddings, lm_heads and those named so."""
    modules = [module for module in drafter.modules() if isinstance(module, nn.Embedding)]
    modules += [model.get_output_embeddings() for model in drafter.modules() if isinstance(model, PreTrainedModel)]
    weights = [weight for module in modules if module is not None for weight in module.parameters()]
    weights += [weight for name, weight in drafter.named_parameters() if any(part in name for part in OUTSIDE_LAYERS)]
    return {id(weight) for weight in weights}
