"""The periodic evaluation: decode held-out prompts with the drafter as it is now."""

from collections.abc import Callable
from typing import Any

from torch import nn

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.output import DecodeOutput, acceptance_at
from draftsmith.heads.drafter import Drafter
from draftsmith.train.sections import EvaluationSection


def evaluate_drafter(
    target: nn.Module,
    drafter: Drafter,
    prompts: list[list[int]],
    settings: EvaluationSection,
    draft_length: int,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Any], list[DecodeOutput]] | None:
    """Measured `alpha`, `tau` and `acceptance_at` over all prompts, decoded one by one; and the decoded texts.

    None when `stop`, which is asked before each prompt, says so: an evaluation may take longer than a machine that is
    about to go away leaves.
    """
    was_training = drafter.training
    drafter.eval()
    decoder = SpeculativeDecoder(target, drafter, draft_length=draft_length)
    outputs: list[DecodeOutput] = []
    for number, prompt in enumerate(prompts):
        if stop():
            drafter.train(was_training)
            return None
        limits = {"max_new_tokens": settings.max_new_tokens, "temperature": settings.temperature}
        outputs.append(decoder.generate(prompt, **limits, seed=number))
    drafter.train(was_training)
    rounds = [record for output in outputs for record in output.rounds]
    overlaps = [value for record in rounds for value in record.overlap]
    result = {
        "alpha": sum(overlaps) / max(1, len(overlaps)),
        "tau": sum(output.decode_tokens for output in outputs) / max(1, len(rounds)),
        "acceptance_at": acceptance_at(rounds),
    }
    return result, outputs
