"""The periodic evaluation: decode held-out prompts with the drafter as it is now."""

from torch import nn

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.output import acceptance_at
from draftsmith.heads.drafter import Drafter
from draftsmith.train.recipe import Recipe


def evaluate_drafter(target: nn.Module, drafter: Drafter, prompts: list[list[int]], recipe: Recipe) -> dict:
    """Measured `alpha`, `tau` and `acceptance_at` over all prompts, decoded one by one."""
    was_training = drafter.training
    drafter.eval()
    length = min(recipe.train.draft_length, drafter.max_draft_length or recipe.train.draft_length)
    decoder = SpeculativeDecoder(target, drafter, draft_length=length)
    settings = recipe.evaluation
    rounds, committed = [], 0
    for number, prompt in enumerate(prompts):
        out = decoder.generate(
            prompt, max_new_tokens=settings.max_new_tokens, temperature=settings.temperature, seed=number
        )
        rounds += out.rounds
        committed += out.decode_tokens
    drafter.train(was_training)
    overlaps = [value for record in rounds for value in record.overlap]
    return {
        "alpha": sum(overlaps) / max(1, len(overlaps)),
        "tau": committed / max(1, len(rounds)),
        "acceptance_at": acceptance_at(rounds),
    }
