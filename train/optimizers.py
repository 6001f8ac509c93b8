"""The optimizers of a run: AdamW for everything, or Muon for the matrices and AdamW for the rest."""

import torch
from torch import nn

from draftsmith.distill.muon import Muon

BETAS = (0.9, 0.95)


def optimizers(
    drafter: nn.Module,
    kind: str,
    weight_decay: float,
    adapters: nn.ParameterList | None = None,
    ratio: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> list[torch.optim.Optimizer]:
    """With a rate of 0 until the first step sets it; `kind` is the recipe's `train.optimizer`.

    `adapters` on the target are AdamW's, at `ratio` times the drafter's rate: the group says so as `ratio`. `dtype` is
    that of Muon's matrix products.

    Muon takes the matrices inside the layers; the rest stays AdamW's, as its authors advise.
    """
    trained = {name: weight for name, weight in drafter.named_parameters() if weight.requires_grad}
    matrices = [weight for name, weight in trained.items() if kind == "muon" and weight.ndim == 2 and _inside(name)]
    taken = {id(weight) for weight in matrices}
    rest = [weight for weight in trained.values() if id(weight) not in taken]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(Muon(matrices, lr=0.0, weight_decay=weight_decay, dtype=dtype))
    if adapters is not None:
        group = {"params": list(adapters), "ratio": ratio}
        made.append(torch.optim.AdamW([group], lr=0.0, betas=BETAS, weight_decay=0.0))
    if rest:
        made.append(torch.optim.AdamW(rest, lr=0.0, betas=BETAS, weight_decay=weight_decay))
    return made


def _inside(name: str) -> bool:
    return not any(part in name for part in ("lm_head", "embed", "wte", "wpe", "markov", "confidence"))
