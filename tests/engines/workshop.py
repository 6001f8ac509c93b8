"""Targets, drafters and local measurements that the tests of all engines share, made once in a run.

The drafters learn for 20 steps from the embedded target in a GGUF file. `$DRAFTSMITH_REAL`: the output folder of
`benchmarks/real.py`, whose drafters for a real model are tested, too.
"""

import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from draftsmith import SpeculativeDecoder
from draftsmith.cli import main
from draftsmith.distill.embedded import embedded_target
from draftsmith.distill.load_target import LoadedTarget, load_target
from draftsmith.hub.export import Exported, export_to

DRAFTERS: dict[str, dict[str, Any]] = {
    "draft_model": {"type": "draft_model", "num_hidden_layers": 2, "init": "target_layers"},
    "eagle3": {"type": "eagle3", "train_steps": 3},
    "dflash": {"type": "dflash", "block_size": 5, "num_hidden_layers": 2, "mask_token": 0},
}
STEPS = 20
LENGTH, COUNT, TOKENS = 4, 8, 48
"""Draft length, prompts, and tokens of an answer."""
TIE = 0.05
"""Nats by which a token may be less likely than the most likely one: engines round otherwise than float32."""


def draftsmith(*arguments: Any) -> None:
    """Run a command in this process; it must succeed."""
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    assert not left.value.code, arguments


@dataclass(frozen=True)
class Pair:
    """A target and the folder of a drafter for it, as commands take them, and held-out prompts."""

    target: str
    drafter: str
    prompts: str
    place: Path
    """Folder for what is made of them."""

    def exported(self, format: str, dtype: str | None = None, target: str | None = None) -> Exported:
        """Return the drafter in an engine's format; `target`: another name of the target."""
        return self._exported(self.drafter, format, dtype, target or self.target)

    def target_file(self, dtype: str | None = None) -> Path:
        """Return the target in a GGUF file: its own, or one that the note of an export says how to make."""
        if self.target.endswith(".gguf"):
            return Path(self.target)
        return self._exported(self.target, "gguf", dtype, self.target).folder / "drafter.gguf"

    def _exported(self, drafter: str, format: str, dtype: str | None, target: str) -> Exported:
        out = self.place / f"export-{len(list(self.place.glob('export-*')))}"
        return export_to(drafter, target, format, out, dtype=dtype)

    @cached_property
    def length(self) -> int:
        """The draft length for which the drafter was trained, which exports take over."""
        return json.loads((Path(self.drafter) / "config.json").read_text())["draftsmith"]["draft_length"]

    @cached_property
    def loaded(self) -> LoadedTarget:
        return load_target(self.target, device="cpu")

    @cached_property
    def local(self) -> dict[str, Any]:
        """The row of `draftsmith eval`: greedy, chains of `length`."""
        out = self.place / "eval"
        chosen = ("--gamma", self.length, "--repeats", 1)
        draftsmith("eval", "--target", self.target, "--drafter", self.drafter, *self.options, *chosen, "--out", out)
        rows = json.loads((out / "eval.json").read_text())["rows"]
        return next(row for row in rows if row["category"] == "all")

    @property
    def options(self) -> tuple[Any, ...]:
        """The prompts and the conditions of a measurement."""
        limits = ("--count", COUNT, "--max-new-tokens", TOKENS, "--temperature", 0)
        return "--prompts", self.prompts, *limits

    @torch.no_grad()
    def require_greedy(self, prompt: list[int], answer: list[int]) -> None:
        """Assert that each token of `answer` is the target's most likely one, or as likely up to `TIE`.

        An answer whose tokens the engine does not tell is tokenised again: then its text is the target's.
        """
        own = SpeculativeDecoder(self.loaded.model).generate(prompt, max_new_tokens=len(answer) + 4).tokens
        decode = self.loaded.tokenizer.decode
        if str(decode(own)).startswith(str(decode(answer))):
            return
        logits = self.loaded.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        lacking = logits.max(-1).values - logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
        assert lacking.max() <= TIE, f"token {lacking.argmax()} of {answer}"


@dataclass
class Workshop:
    place: Path
    made: dict[str, Pair] = field(default_factory=dict)

    def pair(self, name: str) -> Pair:
        """Return a pair: a key of `DRAFTERS`, or `real NAME` for a drafter of `$DRAFTSMITH_REAL`."""
        if name not in self.made:
            self.made[name] = self._real(name) if name.startswith("real ") else self._trained(name)
        return self.made[name]

    @cached_property
    def target(self) -> Path:
        """The embedded target as a GGUF file."""
        pytest.importorskip("gguf")
        folder = str(embedded_target())
        return export_to(folder, folder, "gguf", self.place / "target", dtype="float16").folder / "drafter.gguf"

    def _trained(self, name: str) -> Pair:
        output = self.place / name
        data = {"prompts": "embedded", "count": 64, "prompt_tokens": 32, "response_tokens": 64}
        train = {"steps": STEPS, "batch_size": 16, "draft_length": LENGTH, "evaluate_every": STEPS}
        recipe = {"name": name, "output": str(output), "target": {"model": str(self.target)}, "drafter": DRAFTERS[name]}
        recipe |= {"data": data, "train": train, "evaluation": {"count": 2, "max_new_tokens": 16}}
        file = self.place / f"{name}.yaml"
        file.write_text(yaml.safe_dump(recipe))
        draftsmith("train", file)
        return Pair(str(self.target), str(output / "drafter"), "embedded", output)

    def _real(self, name: str) -> Pair:
        runs = os.environ.get("DRAFTSMITH_REAL")
        if runs is None:
            pytest.skip("DRAFTSMITH_REAL is not set; expected the output folder of benchmarks/real.py")
        drafter = Path(runs) / name.removeprefix("real ") / "drafter"
        if not drafter.is_dir():
            pytest.skip(f"{drafter} does not exist")
        place = self.place / name
        place.mkdir()
        target = json.loads((drafter / "config.json").read_text())["draftsmith"]["target"]["name"]
        return Pair(target, str(drafter), str(Path(runs) / "heldout.jsonl"), place)
