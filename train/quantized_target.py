"""The memory that quantizing a run's target saves, and how far its p' is from the p of the target itself.

    |alpha(p, q) - alpha(p', q)| <= TV(p, p') = 1 - sum_v min(p_v, p'_v)

since alpha = 1 - TV, and the total variation is a metric. So the overlap of the two bounds what any drafter's alpha
changes when it is measured on the one instead of the other.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from datasets import Dataset

from draftsmith.distill.load_target import LoadedTarget
from draftsmith.distill.quantization import saved_bytes
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.heads.model_config import start_token
from draftsmith.train.accelerator import autocast
from draftsmith.train.batch import Batch, collate
from draftsmith.train.context import RunContext
from draftsmith.train.progress import in_units

ROWS = 8
"""The first rows of the data, on which the two targets are compared."""
TOGETHER = 256
"""Positions whose logits are in memory at a time."""

# Shapes: N positions, n positions of a chunk, H hidden size, V vocabulary.


class Agreement(NamedTuple):
    """How well a quantized target agrees with the target itself."""

    overlap: float
    """Mean of sum_v min(p_v, p'_v), at temperature 1."""
    same_argmax: float
    """Share of positions with the same most likely token, which is what the overlap is for greedy decoding."""
    positions: int


@torch.no_grad()
def agreement(quantized: OnlineTeacher, target: OnlineTeacher, batches: Iterable[Batch]) -> Agreement:
    """Compare the two targets' p at the trained positions of batches; both have the same lm_head."""
    overlap = same = positions = 0.0
    for batch in batches:
        hidden = [teacher.signals(**vars(batch)).hidden_BTH[batch.mask_BT] for teacher in (quantized, target)]
        for states in zip(*(states_NH.split(TOGETHER) for states_NH in hidden), strict=True):
            logits = [target.lm_head(states_nH).float() for states_nH in states]
            p, other = (logits_nV.softmax(-1) for logits_nV in logits)
            overlap += float(torch.minimum(p, other).sum())
            same += float((p.argmax(-1) == other.argmax(-1)).sum())
        positions += len(hidden[0])
    return Agreement(overlap / positions, same / positions, int(positions))


def quantization_effect(
    context: RunContext, target: LoadedTarget, rows: Dataset, load: Callable[[], LoadedTarget]
) -> dict[str, float] | None:
    """Print and return the bytes that quantizing `target` saves, and its agreement with the target itself.

    The main process loads the latter with `load`, and copies its layers to the device one by one. Other processes wait,
    and return None.
    """
    kind, accelerator, model = context.recipe.target.quantization, context.accelerator, target.model
    assert kind is not None, "the target is quantized"
    start = start_token(model) if model.config.is_encoder_decoder else None
    with accelerator.main_process_first():
        if not accelerator.is_main_process:
            return None
        context.console.say(f"target: comparing it with {target.name} as it was before it was quantized")
        whole = load().model
        saved, total = saved_bytes(whole, kind), sum(w.numel() * w.element_size() for w in whole.parameters())
        context.placement.offload(whole)
        batches = (collate(rows, [row], accelerator.device, start) for row in range(min(ROWS, len(rows))))
        with autocast(context.recipe, accelerator.device):
            found = agreement(OnlineTeacher(model), OnlineTeacher(whole), batches)
    context.console.say(
        f"target: {kind} saves {in_units(saved)} of {in_units(total)}; at {found.positions:,} trained positions sum "
        f"min(p, p') is {found.overlap:.4f} on average, so that alpha differs by at most {1 - found.overlap:.4f}, and "
        f"the most likely token is the same at {found.same_argmax:.1%}"
    )
    return {"saved_bytes": saved, **found._asdict()}
