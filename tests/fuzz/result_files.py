"""Result files and what a run keeps, of another structure than they were written in; and commands that read them."""

import json

import yaml
from hypothesis import strategies as st

from fuzz.damage import JUNK, NESTED, as_json, broken, changed, encoded
from fuzz.material import Material
from fuzz.running import Case, Content, Fifo


@st.composite
def damaged_result(draw: st.DrawFn, content: bytes, name: str) -> Content:
    """A result file with another structure, or broken."""
    kind = draw(st.sampled_from(["changed", "changed", "changed", "broken", "junk", "fifo", "nested"]))
    if kind == "changed" and name.endswith(".jsonl"):
        lines = content.splitlines()
        for _ in range(draw(st.integers(1, 2))):
            place = draw(st.integers(0, len(lines) - 1))
            try:
                lines[place] = as_json(draw(changed(json.loads(lines[place]))))
            except ValueError:
                continue
        return b"\n".join(lines) + b"\n"
    if kind == "changed" and name.endswith((".json", ".yaml")):
        value = yaml.safe_load(content)
        return as_json(draw(changed(value, 3)))
    if kind in ("changed", "broken"):
        return draw(broken(content))
    if kind == "fifo":
        return Fifo()
    return encoded(draw(NESTED)) if kind == "nested" else as_json(draw(JUNK))


Result = tuple[dict[str, bytes], list[str], str]


def _compared(material: Material) -> Result:
    files = material.files(material.root / "measured", "")
    files = {name.lstrip("/"): content for name, content in files.items() if name.endswith("eval.json")}
    return files, ["eval", "compare", "a", "b"], "b/eval.json"


def _alone(material: Material) -> Result:
    files, _, damaged = _compared(material)
    return files, ["eval", "compare", damaged], damaged


def _pushed(material: Material) -> Result:
    files, _, damaged = _compared(material)
    arguments = ["push", material.drafter(), "user/name", "--dry-run", "--out", "out", "--eval", damaged]
    return files, arguments, damaged


def _measured(material: Material) -> Result:
    settings = json.loads((material.root / "measured" / "a" / "eval.json").read_text())["settings"]
    files = {"out/cells.jsonl": (material.root / "measured" / "a" / "cells.jsonl").read_bytes()}
    arguments = ["eval", "--target", settings["target"], "--prompts", settings["prompts"], "--count", "2"]
    arguments += [word for name, path in settings["drafters"].items() for word in ("--drafter", f"{name}={path}")]
    arguments += ["--max-new-tokens", "6", "--repeats", "1", "--temperature", "0", "--out", "out"]
    return files, arguments, "out/cells.jsonl"


def _run(material: Material) -> dict[str, bytes]:
    return material.files(material.run(), "run")


def _resumed(material: Material, damaged: str) -> Result:
    files = _run(material)
    files.pop("run/finished.json", None)
    return files, ["train", str(material.root / "draft_model.yaml"), "output=run"], damaged


def _pushed_run(material: Material) -> Result:
    arguments = ["push", "run/drafter", "user/name", "--dry-run", "--out", "out"]
    return _run(material), arguments, "run/metrics.jsonl"


def _forecast(material: Material) -> Result:
    profile = {"alone": {1: 0.01}, "verify": {1: {1: 0.01, 2: 0.011}}, "drafters": {"*": {"draft": {1: {1: 0.001}}}}}
    arguments = [
        "forecast",
        "--target",
        material.target,
        "--drafter",
        "suffix",
        "--count",
        "1",
        "--max-new-tokens",
        "2",
    ]
    arguments += ["--prompts", str(material.root / "prompts.jsonl"), "--temperature", "0", "--out", "out"]
    return {"p.json": json.dumps(profile).encode()}, [*arguments, "--profile", "p.json"], "p.json"


def _checked(material: Material) -> Result:
    arguments = ["check", "--target", material.target, "--drafter", "suffix", "--count", "1", "--tokens", "500"]
    arguments += ["--prompts", str(material.root / "prompts.jsonl"), "--temperature", "0", "--out", "out"]
    return (
        {"out/check.json": json.dumps({"schema": 1, "settings": {"target": "x"}}).encode()},
        arguments,
        "out/check.json",
    )


def _adapter(material: Material) -> Result:
    files = {"t/adapter_config.json": json.dumps({"base_model_name_or_path": material.target, "r": 2}).encode()}
    return files, ["generate", "ab", "--target", "t", "--max-new-tokens", "2"], "t/adapter_config.json"


RESULTS = {
    "eval.json compared": _compared,
    "eval.json alone": _alone,
    "eval.json pushed": _pushed,
    "cells.jsonl": _measured,
    "metrics.jsonl of a resumed run": lambda material: _resumed(material, "run/metrics.jsonl"),
    "metrics.jsonl pushed": _pushed_run,
    "recipe.yaml of a run": lambda material: _resumed(material, "run/recipe.yaml"),
    "state.json": lambda material: _resumed(material, "run/checkpoints/step-000002/state.json"),
    "model of a checkpoint": lambda material: _resumed(material, "run/checkpoints/step-000002/model.safetensors"),
    "profile": _forecast,
    "check.json": _checked,
    "adapter_config.json": _adapter,
}


@st.composite
def result_cases(draw: st.DrawFn, material: Material) -> Case:
    name = draw(st.sampled_from(sorted(RESULTS)))
    files, arguments, damaged = RESULTS[name](material)
    files = dict(files)
    files[damaged] = draw(damaged_result(files[damaged], damaged))
    return Case("result", arguments, files, writes=("out", "run"))
