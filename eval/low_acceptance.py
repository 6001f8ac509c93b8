"""Likely causes where an engine accepts less than the local decoder, ranked by what two measurements show."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.eval.prompts import OVERALL
from draftsmith.eval.results import StoredEvaluation
from draftsmith.eval.settings import Arm
from draftsmith.reading import read_json

ENOUGH = 0.1
"""Difference between two acceptance rates at a position that rounding does not explain."""
EQUAL = 0.05
"""Difference between two acceptance rates at T=0 that counts as agreement."""
RANDOM = 0.02
"""Acceptance at the first position up to which drafts are no better than random tokens."""
LOST = (
    "an lm_head that was quantised, overwritten or never loaded, embeddings shared with the target that were lost, or "
    "another revision of the target or the drafter"
)
"""Usual causes of drafts that are no better than random tokens."""
QUANTISED = re.compile(r"(?i)fp8|w8a8|w4a16|awq|gptq|nvfp4|mxfp4|bnb|[48]-?bit|int[48]|q[2-8]_[k0-9]|gguf")
BLOCKS = ("dflash", "parallel_eagle")
"""Drafters whose positions read each other without a causal mask, or in parallel."""
WITHOUT_STATES = ("draft_model", "prompt-lookup", "suffix")


@dataclass(frozen=True)
class Cause:
    """A cause for which there is evidence, and the test that decides."""

    name: str
    weight: int
    """Higher comes first: 3, only this cause explains it; 2, few others do; 1, it is possible."""
    evidence: str
    test: str

    def __str__(self) -> str:
        return f"{self.name}: {self.evidence}; to decide: {self.test}."


@dataclass(frozen=True)
class Sides:
    """A local and a served measurement of one drafter at one temperature and number of requests.

    Args:
        arms: the names and policies in the local and in the served measurement.
    """

    local: StoredEvaluation
    served: StoredEvaluation
    arms: tuple[Arm, Arm]
    temperature: float
    batch: int

    def rates(self, temperature: float | None = None) -> tuple[list[float], list[float]]:
        """Return acceptance by position of both; empty where it is not counted or not measured."""
        at = self.temperature if temperature is None else temperature
        ours = next((row["acceptance_at"] for row in self.local["rows"] if self._is_local(row, at)), [])
        rows = self.served.get("server", [])
        condition = (at, self.batch)
        return ours, next((r["acceptance_at"] for r in rows if (r["temperature"], r["concurrency"]) == condition), [])

    def _is_local(self, row: Any, temperature: float) -> bool:
        key = (row["drafter"], row["policy"], row["temperature"], row["batch_size"], row["category"])
        return key == (*self.arms[0], temperature, self.batch, OVERALL)

    @property
    def drafter_type(self) -> str:
        return next((row["drafter_type"] for row in self.local["rows"] if row["drafter"] == self.arms[0][0]), "")

    def config(self) -> dict[str, Any]:
        """Return the drafter's `config.json`; empty where its folder is not here."""
        folder = Path(self.local["settings"].get("drafters", {}).get(self.arms[0][0], ""))
        try:
            read = read_json(folder / "config.json")
        except (OSError, ValueError):
            return {}
        return read if isinstance(read, dict) else {}

    def greedy_lengths(self) -> np.ndarray | None:
        """Return served minus local tokens of each batch at T=0, where texts are equal; None unless both have them."""
        tokens = []
        for side, arm in zip((self.local, self.served), self.arms, strict=True):
            for series in side["measurements"]:
                key = (series["drafter"], series["policy"], series["temperature"], series["batch_size"])
                if key == (*arm, 0.0, self.batch):
                    tokens.append(np.array(series["tokens"])[:, 0])
        same = len(tokens) == 2 and tokens[0].shape == tokens[1].shape
        return tokens[1] - tokens[0] if same else None


def explained(sides: Sides, *, lower: bool) -> str:
    """Return acceptance by position of both and the likely causes; `lower`: whether the engine's tau is lower."""
    ours, theirs = sides.rates()
    if not theirs:
        shown = "The engine does not count acceptance by position."
    else:
        rows = [" ".join(f"{rate:.2f}" for rate in rates) for rates in (ours, theirs)]
        shown = f"Acceptance by position: {rows[0]} here, {rows[1]} in the engine."
    causes = likely_causes(sides, lower=lower)
    if not causes:
        return shown
    numbered = " ".join(f"({number}) {cause}" for number, cause in enumerate(causes, 1))
    return f"{shown} Likely causes, the best supported first: {numbered}"


def no_better_than_random(acceptance_at: Sequence[float], tau: float | None) -> str | None:
    """Return a sentence with the causes where drafts are accepted as random tokens are, and None elsewhere."""
    first = acceptance_at[0] if acceptance_at else None if tau is None else tau - 1
    if first is None or first > RANDOM:
        return None
    return (
        f"{first:.1%} of the first draft tokens are accepted, no more than of random ones: {LOST}. `draftsmith eval` "
        "of the served files tells whether they or the engine are at fault."
    )


def likely_causes(sides: Sides, *, lower: bool) -> list[Cause]:
    """Return the causes for which the two measurements hold evidence, the best supported first."""
    found = [*_of_texts(sides), *_of_target(sides)]
    ours, theirs = sides.rates()
    if ours and theirs:
        found += _of_positions(sides, ours, theirs)
    if lower and sides.temperature > 0:
        found += _of_greedy_drafts(sides, ours, theirs)
    return sorted(found, key=lambda cause: -cause.weight)


def _of_texts(sides: Sides) -> Iterator[Cause]:
    more = sides.greedy_lengths()
    if more is None or not more.any():
        return
    count = f"{np.count_nonzero(more)} of {len(more)} batches"
    if (more >= 0).all():
        evidence = f"at T=0 the engine wrote more tokens than the target in {count} and fewer in none"
        yield Cause("tokens after the end are counted", 3, evidence, "ask once with ignore_eos=false and read the end")
    else:
        evidence = f"at T=0 {count} have other lengths, so the texts differ"
        yield Cause("the prompt template, or another target", 2, evidence, "draftsmith check --server, greedy part")


def _of_target(sides: Sides) -> Iterator[Cause]:
    names = [str(sides.local["settings"].get("target", "")), sides.arms[1][0]]
    marked = [name for name in names if QUANTISED.search(Path(name).name)]
    dtype = sides.local["settings"].get("dtype", "float32")
    test = "draftsmith eval with the engine's dtype, or with the target that it serves"
    if len(marked) == 1:
        yield Cause("the target is quantised on one side", 2, f"the name {marked[0]} says so", test)
    ours, theirs = sides.rates()
    shared = list(zip(ours, theirs, strict=False))
    if shared and len(ours) == len(theirs) and all(abs(a - b) <= ENOUGH for a, b in shared):
        yield Cause("dtype, quantisation or kernels", 1, f"no position differs by much; {dtype} here", test)


def _of_positions(sides: Sides, ours: Sequence[float], theirs: Sequence[float]) -> Iterator[Cause]:
    falls = [a - b for a, b in zip(ours, theirs, strict=False)]
    config, kind = sides.config(), sides.drafter_type
    first, later = falls[0] > ENOUGH, any(fall > ENOUGH for fall in falls[1:])
    at_zero = sides.rates(0.0)
    if first and sides.temperature > 0 and all(at_zero) and at_zero[0][0] - at_zero[1][0] <= EQUAL:
        return  # the drafter reads the right inputs
    if theirs[0] <= RANDOM < ours[0]:
        evidence = f"the first position has {theirs[0]:.2f} in the engine, as of random tokens, and {ours[0]:.2f} here"
        test = "draftsmith eval of the served files, and the engine's log for tensors that it did not load"
        yield Cause(f"weights ({LOST})", 3, evidence, test)
    where = f"the first position has {theirs[0]:.2f} in the engine, {ours[0]:.2f} here"
    if first and kind not in WITHOUT_STATES:
        evidence = f"{where}, and {kind or 'the drafter'} reads hidden states"
        yield Cause("layer ids, or states of another position", 2, evidence, "compare the ids in the exported config")
    if first:
        yield Cause("the prompt template", 1, where, "compare the engine's prompt_tokens with draftsmith's")
    if (first or later) and config.get("draftsmith", {}).get("draft_vocabulary"):
        evidence = f"{where}, and the drafter has a draft vocabulary"
        yield Cause("the draft vocabulary (d2t)", 2 if first else 1, evidence, "export without it, or compare d2t")
    if not first and later:
        evidence = "the first position agrees and later ones do not"
        if kind in BLOCKS:
            yield Cause("causality", 2, f"{evidence}, and {kind} drafts a block", "compare the mask with the export's")
        else:
            yield Cause("the norms of the drafter's states", 2, evidence, "draftsmith import, whose self-test compares")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if (first or later) and isinstance(rope, dict) and rope.get("rope_type", rope.get("type", "default")) != "default":
        evidence = f"the drafter has rotary scaling ({rope.get('rope_type', rope.get('type'))})"
        yield Cause("rotary scaling", 1, evidence, "measure short prompts alone")
    if len(ours) != len(theirs):
        evidence = f"the engine drafts {len(theirs)} tokens, the local decoder {len(ours)}"
        yield Cause("the draft length", 3, evidence, f"draftsmith eval --gamma {len(theirs)}")


def _of_greedy_drafts(sides: Sides, ours: Sequence[float], theirs: Sequence[float]) -> Iterator[Cause]:
    at_zero, fall = sides.rates(0.0), ours[0] - theirs[0] if ours and theirs else 0.0
    name = "drafts are the most likely tokens, not drawn"
    test = 'vLLM with "draft_sample_method": "probabilistic" in --speculative-config'
    if not all(at_zero):
        yield Cause(name, 1, f"T={sides.temperature:g}, and T=0 was not measured on both sides", test)
    elif fall > EQUAL and abs(at_zero[0][0] - at_zero[1][0]) <= EQUAL:
        yield Cause(name, 3, f"the first position agrees at T=0 and not at T={sides.temperature:g}", test)
