"""The outcome of one class: what the decoder does with a tiny model of it, compared with transformers' `generate`."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.passes import graphs
from draftsmith.decode.passes.capability import RECURRENT
from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_model import EarlyExit
from draftsmith.heads.draft_tree import Draft
from draftsmith.heads.model_config import start_token
from draftsmith.train.step import AgreementStep, Last, collate

from .tiny import VOCAB, build, tiny_config
from .vision import image_prompt, vision_classes, vision_config

PROMPTS = [[7, 8, 9, 20], [5, 4, 3, 6, 22, 21, 25, 24, 23, 26, 30], [11, 12, 50, 31, 40, 41, 42]]
NEW_TOKENS = 14
EXACT, WRONG = "exact", "wrong"


class NoisyReference(Drafter):
    """Drafts the known continuation of each text with some tokens replaced, so that rounds end at every depth."""

    type: ClassVar[str] = "noisy-reference"
    only_retrieves = True

    def __init__(self, texts: dict[tuple[int, ...], list[int]], *, branches: bool) -> None:
        super().__init__()
        self.texts, self.branches = texts, branches

    def retrieve(self, row: int, room: int) -> Draft:
        text = self.context.sequences[row]
        prompt, own = next((p, t) for p, t in self.texts.items() if self._belongs(text.source, text.tokens, p))
        done = len(text.tokens) - (1 if text.source else len(prompt))
        rng = random.Random(100 * len(prompt) + done)
        tokens: list[int] = []
        parents: list[int] = []
        last = -1
        for token in own[done : done + min(room, 4)]:
            other = rng.randrange(3, VOCAB)
            wrong = rng.random() < 0.2
            level = [other if wrong else token]
            if self.branches:  # the right one before or after its sibling, which has a child of its own
                level = rng.sample([token, other], 2)
            first = len(tokens)
            tokens += level
            parents += [last] * len(level)
            last = first + (level.index(token) if token in level else 0)
            if self.branches:
                tokens.append(rng.randrange(3, VOCAB))
                parents.append(first + 1 - (last - first))
            elif wrong:
                break
        return Draft(tuple(tokens), tuple(parents))

    @staticmethod
    def _belongs(source: list[int], tokens: list[int], prompt: tuple[int, ...]) -> bool:
        return tuple(source or tokens[: len(prompt)]) == prompt


@dataclass(frozen=True)
class Outcome:
    """The outcome of one class: "exact", "wrong", or the reason why it is refused."""

    family: str
    name: str
    broken: str = ""
    """Why the class cannot be built, or why `generate` itself fails."""
    chains: str = ""
    trees: str = ""
    batch: str = ""
    early_exit: str = ""
    draft_model: str = ""
    """One training step of a draft model of the target's architecture; empty where the target is refused."""
    medusa: str = ""
    eagle3: str = ""
    compiled: str = ""
    """A batch in compiled passes, compared with other passes; empty where the target is refused."""
    images: str = ""
    """Chains after prompts with an image, alone and in a batch; empty for text models, or without known tensors."""


def outcome_of(kind: type[PreTrainedModel]) -> Outcome:
    """Build a tiny model of this class and return what the decoder does with it."""
    assert kind.config_class is not None
    family = kind.config_class.model_type
    empty = Outcome(family, kind.__name__)
    try:
        vision = kind.__name__ in vision_classes()
        model = build(kind, vision_config(kind) if vision else tiny_config(kind))
        texts = {tuple(prompt): _generated(model, prompt) for prompt in PROMPTS}
    except Exception as error:  # whatever transformers raises
        return replace(empty, broken=_line(error))
    expected = [*texts.values()]
    chains, trees = (NoisyReference(texts, branches=branches) for branches in (False, True))
    outcome = replace(
        empty,
        chains=_tried(lambda: _alone(SpeculativeDecoder(model, chains)) == expected),
        trees=_tried(lambda: _alone(SpeculativeDecoder(model, trees)) == expected),
        batch=_tried(lambda: _together(SpeculativeDecoder(model, chains)) == expected),
        early_exit=_tried(lambda: _alone(SpeculativeDecoder(model, EarlyExit(model), draft_length=3)) == expected),
        images=_images(model) if vision else "",
    )
    if outcome.chains != EXACT:
        return outcome
    model.float()  # eager masks of float64 are infinite where a row of padding sees nothing
    return replace(
        outcome,
        draft_model=_tried(lambda: trains(model, "draft_model")),
        medusa=_tried(lambda: trains(model, "medusa")),
        eagle3=_tried(lambda: trains(model, "eagle3", layers=[1])),
        compiled=_tried(lambda: _compiles(model, chains if RECURRENT in outcome.trees else trees)),
    )


def _compiles(model: PreTrainedModel, drafter: Drafter) -> bool:
    """Return whether texts are the same with and without compiled passes, with the default function for experts.

    torch traces each pass once and runs the graph as it is, which takes seconds instead of minutes. Recurrent layers
    move committed tokens into their states every 4 instead of 16, or these texts would end before.
    """
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part._can_set_experts_implementation():
            part.set_experts_implementation("grouped_mm")
    eager = {"cpu": {"backend": "eager"}}
    try:
        with patch.dict(graphs.OPTIONS, eager), torch._dynamo.config.patch(error_on_recompile=True):
            plain, fast = (_together(SpeculativeDecoder(model, drafter, compile=on)) for on in (False, True))
    finally:
        torch._dynamo.reset()
    return plain == fast


def _images(model: PreTrainedModel) -> str:
    """Return the outcome of chains after two prompts with an image and one of text."""
    try:
        asked = [image_prompt(model, 0, [7, 8, 9], [20]), image_prompt(model, 1, [5], [22, 23]), (PROMPTS[0], {})]
        expected = [_generated(model, ids, inputs) for ids, inputs in asked]
    except Exception:  # whatever transformers raises
        return ""
    texts = {tuple(ids): text for (ids, _), text in zip(asked, expected, strict=True)}
    rows, inputs = [ids for ids, _ in asked], [inputs or None for _, inputs in asked]
    options = {"max_new_tokens": NEW_TOKENS}

    def same() -> bool:
        decoder = SpeculativeDecoder(model, NoisyReference(texts, branches=False))
        alone = [decoder.generate(ids, inputs=given, **options).tokens for ids, given in asked]
        together = [output.tokens for output in decoder.generate_batch(rows, inputs=inputs, **options)]
        return alone == together == expected

    return _tried(same)


def trains(target: PreTrainedModel, kind: str, **options: Any) -> bool:
    """Return whether one step of a new drafter in float32 has a loss and gradients that are finite."""
    target.requires_grad_(False)
    drafter = HEADS[kind].from_target(target, **options)
    step = AgreementStep(drafter, Objective(), OnlineTeacher(target, drafter.needs.layers))
    start = start_token(target) if target.config.is_encoder_decoder else None
    rows = Dataset.from_list([{"input_ids": [*text, *text], "spans": [[len(text), 2 * len(text)]]} for text in PROMPTS])
    loss = step(collate(rows, [*range(len(PROMPTS))], torch.device("cpu"), start), 0.0, Last())[0]
    loss.backward()
    gradients = [weight.grad for weight in drafter.parameters() if weight.grad is not None]
    return bool(gradients) and all(value.isfinite().all() for value in [loss, *gradients])


def _generated(model: PreTrainedModel, prompt: list[int], inputs: Mapping[str, Tensor] | None = None) -> list[int]:
    """Return the text of `generate` after one prompt, with the tensors of its image."""
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), **(inputs or {}), "max_new_tokens": NEW_TOKENS}
    with torch.inference_mode():
        text = model.generate(ids, **options, do_sample=False)  # pyright: ignore
    return text[0, 1 if model.config.is_encoder_decoder else len(prompt) :].tolist()


def _alone(decoder: SpeculativeDecoder) -> list[list[int]]:
    return [decoder.generate(prompt, max_new_tokens=NEW_TOKENS).tokens for prompt in PROMPTS]


def _together(decoder: SpeculativeDecoder) -> list[list[int]]:
    return [output.tokens for output in decoder.generate_batch(PROMPTS, max_new_tokens=NEW_TOKENS)]


def _tried(same: Callable[[], bool]) -> str:
    """Return "exact" or "wrong", or the reason of the refusal; other errors are marked as such."""
    try:
        return EXACT if same() else WRONG
    except ConfigError as error:
        return str(error)
    except Exception as error:
        return f"CRASH {_line(error)}"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
