"""A few texts with where each token came from: what acceptance looks like."""

from typing import Any

from draftsmith.distill.detokenize import IncrementalText
from draftsmith.eval.cells import ACCEPTED, BONUS, CORRECTION, OWN, Cell
from draftsmith.eval.harness import Run
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.settings import BASELINE

PROMPTS, TOKENS = 3, 160
"""Texts an arm and temperature, and tokens shown of each."""
KINDS = {ACCEPTED: "accepted", CORRECTION: "corrected", BONUS: "bonus", OWN: "target"}
Piece = tuple[str, str]
"""The text of one token and its kind."""


def samples(run: Run, tokenizer: Any) -> list[dict[str, Any]]:
    """The first prompts of as many categories, each as every arm wrote it in the first repeat."""
    chosen = {prompt.id: prompt for prompt in _chosen(run.prompts)}
    size = run.settings.batch_sizes[0]
    found = []
    for prompt in chosen.values():
        for temperature in run.settings.temperatures:
            for arm in run.arms:
                if arm == BASELINE:
                    continue
                for cell in run.cells(arm, temperature, size):
                    if cell.repeat == cell.turn == 0:
                        found += [_sample(cell, place, prompt, tokenizer) for place in _places(cell, prompt)]
    return found


def _chosen(prompts: list[Prompt]) -> list[Prompt]:
    first = list({prompt.category: prompt for prompt in reversed(prompts)}.values())[::-1]
    return (first + [prompt for prompt in prompts if prompt not in first])[:PROMPTS]


def _places(cell: Cell, prompt: Prompt) -> list[int]:
    return [place for place, text in enumerate(cell.texts) if text.prompt == prompt.id]


def _sample(cell: Cell, place: int, prompt: Prompt, tokenizer: Any) -> dict[str, Any]:
    text = cell.texts[place]
    pieces = token_texts(text.tokens[:TOKENS], tokenizer, prompt.input_ids)
    rounds, start = [], 0
    for kinds in text.rounds:
        ours = list(zip(pieces[start : start + len(kinds)], (KINDS[kind] for kind in kinds), strict=False))
        if ours:
            rounds.append(ours)
        start += len(kinds)
    return {
        "prompt": prompt.id,
        "category": prompt.category,
        "question": tokenizer.decode(prompt.input_ids),
        "drafter": cell.drafter,
        "policy": cell.policy,
        "temperature": cell.temperature,
        "tau": text.decode_tokens / text.decode_rounds if text.decode_rounds else 0.0,
        "rounds": rounds,
        "cut": len(text.tokens) > TOKENS,
    }


def token_texts(tokens: list[int], tokenizer: Any, prompt: list[int]) -> list[str]:
    """The text that each token adds after `prompt`; an unfinished character is shown with the token that ends it."""
    text = IncrementalText(tokenizer, prompt, skip_special_tokens=False)
    texts = [text.add(token) for token in tokens]
    return [*texts[:-1], *(last + text.rest() for last in texts[-1:])]
