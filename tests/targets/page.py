"""`docs/reference/targets.md`: what the decoder does with every class of the installed transformers, grouped."""

import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import transformers

from .outcome import EXACT, Outcome

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "targets.md"
ENCODER_DECODER = "model_type={!r}; expected a decoder-only target for these features"
"""EAGLE-3 with every encoder-decoder class, which is said once above the table, as are compiled passes."""
NOT_COMPILED = "compile=True with an encoder-decoder target; expected compile=False, or a decoder-only one"
NO_CLASS = "Unrecognized configuration class"
"""In the error of transformers for a text config whose model cannot be built by itself."""
VERSION = f"transformers {transformers.__version__}"
HEAD = """# Targets

A target is an unmodified model of transformers. Before the decoder uses one, it compares the logits of drafts with
those of plain forward passes, and so learns which drafts the model verifies exactly:

- **trees**: every policy applies;
- **chains**: a policy with branches is refused with the reason. The default policy is a chain;
- **none**: the model is refused with the reason.

The check depends on the model at hand: another size or option than in the table may be accepted or refused.

## Models with recurrent layers, and models without a cache that rolls back

[Recurrent layers](decoding.md#recurrent-layers) read one token after the other, so these models verify chains. Where
draft tokens cannot be removed from a cache, *each round copies its own cache and recomputes up to 16 committed tokens*
(RWKV, DeepSeek-V4). A warning says so, since a round may then cost more than the tokens that it saves.

## Every class

The table is the outcome of a test; `architectures` in a model's `config.json` names its class. Each class is built
with random weights and a few layers in float64, and its greedy texts are compared with those of `generate`, with
chains, trees and batches of wrong drafts. All tokens are equal for every class that verifies trees or chains.

- **images**: `yes` where chains after prompts with and without images were compared, with random pixels in the layout
  of the family's processor.
- **refused**: `compiled` are passes with `compile=True`, in float32. A drafter is refused where one training step of
  a new drafter is. The draft model of that step has the target's architecture; `drafter.config` and `drafter.model`
  choose another, for example any Qwen3 for Qwen3-VL.
- Encoder–decoder targets have no compiled passes and no drafters that read hidden states of several layers.
  Sources of a batch are encoded without padding, those of one length together.
"""
COLUMNS = "\n| drafts | images | refused | because | classes |\n|---|---|---|---|---|\n"


class Group(NamedTuple):
    """The cells that classes with the same outcome share."""

    drafts: str
    images: str
    refused: str
    because: str


def group(outcome: Outcome) -> Group:
    """Return the cells of one class."""
    drafts = "none" if outcome.chains != EXACT else "chains" if outcome.trees != EXACT else "trees"
    parts = {"compiled": outcome.compiled, "images": outcome.images, **_trained(outcome)}
    refused = [name for name, cell in parts.items() if cell not in ("", EXACT)] if drafts != "none" else []
    return Group(drafts, "yes" if outcome.images == EXACT else "", ", ".join(refused), _reasons(outcome))


def _trained(outcome: Outcome) -> dict[str, str]:
    return {"draft model": outcome.draft_model, "Medusa": outcome.medusa, "EAGLE-3": outcome.eagle3}


def _reasons(outcome: Outcome) -> str:
    """Return why the class is refused, or only for trees or single drafters, in a cell of the table."""
    text = next((cell for cell in (outcome.chains, outcome.trees) if cell != EXACT), "")
    reasons = [text.split("reads chains only: ")[-1]] if text else []
    compiled = re.sub(r"^compile=True( with model_type='[\w-]+')?: ", "", outcome.compiled)
    images = outcome.images if outcome.chains == EXACT else ""
    for name, cell in {"compiled": compiled, "images": images, **_trained(outcome)}.items():
        if NO_CLASS in cell:
            cell = "its language model has no class of its own"
        known = _general(cell) in map(_general, reasons)
        if not known and cell not in ("", EXACT, outcome.trees, NOT_COMPILED, ENCODER_DECODER.format(outcome.family)):
            reasons.append(f"{name}: {cell}")
    return "; ".join(map(_general, reasons)).replace("|", "/").replace("[", "").replace("]", "")


def _general(reason: str) -> str:
    """Return a reason without what belongs to one class: names, numbers, messages of torch."""
    reason = re.sub(r"model_type='[\w.-]+' |model \w+For\w+ | for \w+For\w+| by [\d.]+ standard deviations", "", reason)
    reason = re.sub(r"of width \d+ and hidden states of width \d+", "and hidden states of different widths", reason)
    reason = re.sub(r"of layers (\d+ and sizes \(.*?\)|\[?[\d, ]+\]?) ", "", reason)
    return re.sub(r" \(.*\)", "", reason.split("; expected")[0]).strip()


def listed(page: str) -> dict[str, Group]:
    """Return the cells of every class in the table of a page."""
    rows = re.findall(r"^\| (trees|chains|none) \|(.*?)\|(.*?)\|(.*?)\| (`.*`) \|$", page, re.MULTILINE)
    return {name: Group(*map(str.strip, cells)) for *cells, names in rows for name in names.strip("`").split("`, `")}


def page(outcomes: list[Outcome]) -> str:
    """Return the whole page; classes that cannot be built or generated with are counted below the table."""
    groups: dict[Group, list[str]] = defaultdict(list)
    for outcome in outcomes:
        if not outcome.broken:
            groups[group(outcome)].append(outcome.name)
    return written(groups, [outcome.name for outcome in outcomes if outcome.broken])


def written(groups: dict[Group, list[str]], broken: list[str]) -> str:
    """Return the page of classes in groups, and of classes without an outcome."""
    exact = sum(len(names) for cells, names in groups.items() if cells.drafts != "none")
    order = sorted(groups.items(), key=lambda item: (["trees", "chains", "none"].index(item[0].drafts), -len(item[1])))
    left_out = "\nNot in the table, because the tiny model cannot be built or `generate` fails with it: {}.\n"
    return "".join([
        HEAD,
        f"\n{exact} of the {sum(map(len, groups.values()))} classes of {VERSION} in this table decode chains exactly. "
        "`python -m tests.targets` writes this page.\n",
        COLUMNS,
        *("| " + " | ".join([*cells, _names(names)]).replace("  ", " ") + " |\n" for cells, names in order),
        left_out.format(_names(broken)) if broken else "",
    ])  # fmt: skip


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
