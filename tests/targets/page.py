"""`docs/reference/targets.md`: what the decoder does with every class of the installed transformers, one row each."""

import re
from pathlib import Path

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

The decoder takes unmodified transformers models. Before it uses one, it compares logits of drafts with those of plain
forward passes, and so learns which drafts it can verify exactly:

* **chains and trees**: every policy applies;
* **chains**: a policy with branches is refused with the reason, and the default policy is a chain. Positions or masks
  that follow indices in the cache are right for a chain and wrong for the siblings of a tree; recurrent layers read one
  token after the other;
* **nothing**: the model is refused with the reason.

Texts of a batch share forward passes where the model accepts rows after different numbers of tokens; otherwise they are
decoded one after another, with the same texts.

Some models have no cache from which draft tokens can be removed. Their chains are verified in one of two ways, with a
warning that names it, since a round may then cost more than the tokens that it saves:

* *each round copies its own cache and reads up to 16 committed tokens again*: the model continues a copy of its
  cache, which costs a copy of its memory in each round (RWKV, DeepSeek-V4);
* *each round reads the whole text again*: models without a cache, whose `generate` does so for every token (OpenAI
  GPT), and those that continue their cache by one token at a time only (MiniMax-Text, RecurrentGemma). With the latter,
  a prompt of a thousand tokens is read in every round: expect less than the speed of `generate`.

A round of a model with recurrent layers costs more than one of a model with attention only, since these layers read up
to 16 committed tokens again ([how](decoding.md#targets)). Processor time of a pass over a draft of 4 tokens, relative
to a pass of the same target over one token without drafts, and the same where both are compiled: attention only 1.64
and 1.58, short convolutions (LFM2) 1.62 and 1.71, gated delta rule (Qwen3.5) 1.93 and 1.89, Mamba-2 1.79 and 1.59,
Mamba-1 4.27 (not compiled). Compiling makes these passes 1.20, 1.22, 1.37 and 1.34 times as fast (`python
benchmarks/recurrent.py --compile --widths 5 --repeats 21`: random models of 8 layers of width 512, transformers' paths
in PyTorch, one core of a virtual AMD EPYC, other processes beside it). `eval` and `forecast` time such passes on your
machine, with 8 tokens that are read again.

A model whose logits after a token depend on later tokens cannot verify several draft tokens in one pass; it is refused.

The table is the outcome of a test: each class is built with random weights and a few layers in float64, and its greedy
texts are compared with those of `generate`, for chains, trees and a batch of prompts of different lengths, with drafts
that are wrong at random positions. `exact` means that all tokens are equal. `images`: chains after prompts with an
image and without, alone and in a batch, with random pixels in the layout of the family's processor; empty for models of
text, and where the test knows no such layout. `trains` means that one training step of a new drafter in float32 has
finite gradients. The draft model of that step has the target's architecture; `drafter.config` and `drafter.model`
choose another, as targets need whose language model has no class of its own (Qwen3-VL: any Qwen3). EAGLE-3 reads
decoder-only targets. `compiled`: with `compile=True`, whose passes torch traces and runs as they are, the texts are the
same as without: trees of the batch, chains where recurrent layers read no trees, in float32, with transformers' default
function for experts. Targets that read chains for another reason, and encoder-decoders, are not compiled.

A model is measured again before it is used, so other sizes and options than those of the table may be accepted or
refused. Attention that an indexer limits to the tokens with the best scores (DeepSeek-V3.2) has no unique outcome where
scores are equal; released models have enough heads that this does not occur.
"""
TABLE = """
| family | class | chains | trees | batch | compiled | images | draft model | Medusa | EAGLE-3 | reason |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def row(outcome: Outcome) -> str:
    """Return the table row of one class."""
    cells = [outcome.chains, outcome.trees, outcome.batch]
    shown = [cell if cell == EXACT else "refused" for cell in cells]
    shown += [cell if cell in ("", EXACT) else "refused" for cell in (outcome.compiled, outcome.images)]
    shown += ["trains" if cell == EXACT else "refused" if cell else "" for cell in _trained(outcome).values()]
    return " | ".join([f"| `{outcome.family}`", f"`{outcome.name}`", *shown, f"{_reasons(outcome)} |"])


def _trained(outcome: Outcome) -> dict[str, str]:
    return {"draft model": outcome.draft_model, "Medusa": outcome.medusa, "EAGLE-3": outcome.eagle3}


def _reasons(outcome: Outcome) -> str:
    """Return why the class is refused, or only for trees or single drafters, in a cell of the table."""
    text = next((cell for cell in (outcome.chains, outcome.trees) if cell != EXACT), "")
    reasons = [text.split("reads chains only: ")[-1]] if text else []
    compiled = re.sub(r"^compile=True( with model_type='\w+')?: ", "", outcome.compiled)
    images = outcome.images if outcome.chains == EXACT else ""
    for name, cell in {"compiled": compiled, "images": images, **_trained(outcome)}.items():
        if NO_CLASS in cell:
            cell = "its language model has no class of its own"
        if cell not in ("", EXACT, outcome.trees, NOT_COMPILED, ENCODER_DECODER.format(outcome.family)):
            reasons.append(f"{name}: {cell}")
    plain = [text.replace(f"model_type='{outcome.family}' ", "").split("; expected")[0] for text in reasons]
    return "; ".join(plain).replace("|", "/").replace("[", "").replace("]", "")


def page(outcomes: list[Outcome]) -> str:
    """Return the whole page; classes that cannot be built or generated with are counted below the table."""
    usable = [outcome for outcome in outcomes if not outcome.broken]
    broken = [outcome for outcome in outcomes if outcome.broken]
    exact = sum(outcome.chains == EXACT for outcome in usable)
    names = ", ".join(f"`{outcome.name}`" for outcome in broken)
    left_out = f"\nNot in the table, because the tiny model cannot be built or `generate` fails with it: {names}.\n"
    return "".join([
        HEAD,
        f"\n{exact} of the {len(usable)} classes of {VERSION} in this table decode chains exactly. "
        "`python -m tests.targets` writes this page.\n",
        TABLE,
        *(row(outcome) + "\n" for outcome in usable),
        left_out if broken else "",
    ])  # fmt: skip
