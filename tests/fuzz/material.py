"""Inputs of the cases: a tiny target and drafters trained for it; made once a session."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from conftest import LETTERS, make_llama, make_tokenizer

from fuzz.running import Case, run

KINDS = {"draft_model": {}, "medusa": {}, "eagle3": {"layers": [1, 1, 2]}, "dflash": {"layers": [1, 2]}}
"""Drafters that are trained, and their options."""
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"


@dataclass(frozen=True)
class Material:
    """Everything by its path; nothing below `root` is ever written by a case."""

    root: Path
    target: str
    recipe: dict[str, Any]
    """Of a run of two steps."""

    def run(self, kind: str = "draft_model") -> Path:
        return self.root / "runs" / kind

    def drafter(self, kind: str = "draft_model") -> str:
        return str(self.run(kind) / "drafter")

    def files(self, folder: Path, under: str) -> dict[str, bytes]:
        """The files of a folder, as those of a case."""
        return {
            f"{under}/{file.relative_to(folder)}": file.read_bytes() for file in folder.rglob("*") if file.is_file()
        }


def make(root: Path, main: Callable[[list[str]], object]) -> Material:
    """Build everything below `root`."""
    target = root / "target"
    make_llama().save_pretrained(target)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(target)
    prompts = root / "prompts.jsonl"
    texts = [LETTERS[i % 26 :][:4] + LETTERS[3 * i % 26] for i in range(12)]
    prompts.write_text("".join(json.dumps({"prompt": text, "response": text[::-1]}) + "\n" for text in texts))
    recipe = {
        "name": "tiny",
        "output": "out",
        "target": {"model": str(target)},
        "drafter": {"type": "draft_model"},
        "data": {"prompts": str(prompts), "count": 12, "prompt_tokens": 16, "response_tokens": 8, "batch_size": 4},
        "train": {"steps": 2, "batch_size": 2, "mixed_precision": "no", "evaluate_every": 2, "checkpoint_every": 1},
        "evaluation": {"count": 2, "max_new_tokens": 6},
    }
    material = Material(root, str(target), recipe)
    for kind, options in KINDS.items():
        file, drafter = root / f"{kind}.yaml", {"type": kind, **options}
        file.write_text(yaml.safe_dump({**recipe, "output": str(material.run(kind)), "drafter": drafter}))
        _require(Case("train", ["train", str(file)]), root, main, material.run(kind) / "drafter" / "config.json")
    return material


def _require(case: Case, root: Path, main: Callable[[list[str]], object], made: Path) -> None:
    problem = run(case, root / "made", main)
    assert problem is None, f"{problem.why}\n{problem.detail}"
    assert made.is_file(), (root / "made" / "stderr").read_text(encoding="utf-8")
