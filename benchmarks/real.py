"""Train drafters for a published model with equal processor time, and measure them beside transformers.

    python benchmarks/real.py --target MODEL --prompts FOLDER --out runs/real              # 45 minutes of a core each
    python benchmarks/real.py --target MODEL --prompts FOLDER --minutes 5 --answers 200    # a small trial
    python benchmarks/real.py --target MODEL --prompts FOLDER --families eagle3 mtp        # some of them

MODEL is a chat model: a folder, a GGUF file or a Hub id. FOLDER holds mt_bench.jsonl, HumanEval.jsonl.gz and
gsm8k_test.jsonl, of which the first rows are held out, and gsm8k_train_questions.jsonl. A chat model is trained on a
mixture: such questions, code that the target asks for itself, and other prompts that it writes itself; a base model on
questions and the problems of HumanEval that are not held out.

Every stage is a command of draftsmith with a folder in --out. What is finished is not done again, and what was
interrupted continues: prompts, answers and states (`data prepare`), the processor time of a step (`probe`), training,
`forecast` (before the measurement), `eval` at T=0 and T=1, `check`, and transformers beside both (`decoder.py`). The
result is --out/real.md. One thread; nothing else should run during the measurement.
"""

import argparse
import gzip
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from draftsmith.distill.load_target import load_tokenizer
from draftsmith.storage import write_json, write_text

FAMILIES = {
    "draft_model": ["drafter.num_hidden_layers=3"],
    "eagle3": ["drafter.train_steps=3", "drafter.draft_vocab_size=8192", "train.learning_rate=0.006"],
    "mtp": ["drafter.train_steps=3", "drafter.draft_vocab_size=8192"],
    "dflash": [
        "drafter.block_size=8",
        "drafter.num_hidden_layers=3",
        "drafter.draft_vocab_size=8192",
        "drafter.anchors=64",
        "train.draft_length=7",
    ],
}
"""Overrides of the recipe FAMILY/any_prompts. The first drafter is also transformers' assistant."""
HELDOUT = {"mt_bench.jsonl": "mt_bench", "HumanEval.jsonl.gz": "humaneval", "gsm8k_test.jsonl": "gsm8k"}
PROBES = (2, 12)
"""Steps of the two runs whose difference is the processor time of a step."""
PROMPT_TOKENS, RESPONSE_TOKENS, BATCH = 192, 256, 4
CHECKED = ("--count", "6", "--tokens", "1500")
"""Size of `check`: about five minutes for each drafter of a model of 135 million parameters on one core."""
POLICIES = ("chain:draft_length=4", "best-first:size=16,depth=6", "adaptive")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="folder of the prompt sets")
    parser.add_argument("--out", type=Path, default=Path("runs/real"))
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES, metavar="FAMILY")
    parser.add_argument("--minutes", type=float, default=45.0, help="processor time of training, for each family")
    parser.add_argument("--answers", type=int, default=5000, help="answers of the target to train on")
    parser.add_argument("--heldout", type=int, default=12, help="prompts of each held-out set")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    return parser.parse_args()


def command(log: Path, *words: str) -> float:
    """Run a command on one thread with its output in `log`; return its processor seconds, or end the program."""
    log.parent.mkdir(parents=True, exist_ok=True)
    print("$", " ".join(words), flush=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with log.open("a", encoding="utf-8") as file:
        done = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"exit code {done.returncode}; its output is in {log}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def draftsmith(log: Path, *words: str) -> float:
    return command(log, sys.executable, "-m", "draftsmith", *words)


def rows_of(file: Path) -> list[dict[str, Any]]:
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def question_of(row: dict[str, Any]) -> str:
    return (row.get("turns") or [row.get("prompt") or row["question"]])[0]


def asked(text: str, chats: bool, **more: str) -> str:
    """Return a prompt's line: a conversation, or text that a base model continues."""
    prompt = {"messages": [{"role": "user", "content": text}]} if chats else {"prompt": text}
    return json.dumps({**more, **prompt}) + "\n"


def write_prompts(options: argparse.Namespace) -> None:
    """Write heldout.jsonl, and the sources of the mixture that the training reads."""
    if (options.out / "sources.json").exists():
        return
    chats = load_tokenizer(options.target)[0].chat_template is not None
    rows = {name: rows_of(options.prompts / name) for name in HELDOUT}
    held = [
        asked(question_of(row), chats, category=category)
        for name, category in HELDOUT.items()
        for row in rows[name][: options.heldout]
    ]
    write_text(options.out / "heldout.jsonl", "".join(held))
    questions = rows_of(options.prompts / "gsm8k_train_questions.jsonl")
    write_text(options.out / "questions.jsonl", "".join(asked(row["prompt"], chats) for row in questions))
    sources = [{"prompts": str(options.out / "questions.jsonl")}]
    if chats:
        sources += [{"prompts": "self", "kind": "code"}, {"prompts": "self"}]
    else:
        code = rows["HumanEval.jsonl.gz"][options.heldout :]
        write_text(options.out / "code.jsonl", "".join(asked(question_of(row), chats) for row in code))
        sources += [{"prompts": str(options.out / "code.jsonl")}]
    write_json(options.out / "sources.json", sources)


def recipe_of(options: argparse.Namespace, family: str) -> list[str]:
    """Return the recipe's name and overrides, without the number of steps and the folder."""
    overrides = [f"target.model={options.target}", f"target.dtype={options.dtype}"]
    sources = (options.out / "sources.json").read_text(encoding="utf-8")
    overrides += [f"data.prompts={sources}", f"data.count={options.answers}", "data.train_on=all"]
    overrides += [f"data.prompt_tokens={PROMPT_TOKENS}", f"data.response_tokens={RESPONSE_TOKENS}"]
    overrides += ["teacher.kind=cached", f"train.batch_size={BATCH}", "evaluation.count=8"]
    return [f"{family}/any_prompts", *overrides, *FAMILIES[family]]


def trained(options: argparse.Namespace, family: str) -> Path:
    """Train a family for the given processor time, evaluations aside; return its drafter."""
    recipe, log, place = recipe_of(options, family), options.out / "logs" / f"{family}.log", options.out / family
    measured = options.out / f"{family}.seconds.json"
    if not measured.exists():
        draftsmith(log, "data", "prepare", *recipe, f"output={place}")
        rare = ["train.evaluate_every=100000", "train.checkpoint_every=100000", "evaluation.max_new_tokens=2"]
        probe = [f"output={options.out / 'probe' / family}-{{}}", "train.steps={}"]
        seconds = [draftsmith(log, "train", *recipe, *rare, *(word.format(n) for word in probe)) for n in PROBES]
        write_json(measured, {"step": (seconds[1] - seconds[0]) / (PROBES[1] - PROBES[0])})
    step = json.loads(measured.read_text(encoding="utf-8"))["step"]
    steps = max(20, round(60 * options.minutes / step))
    every = max(1, steps // 8)
    turns = [f"train.steps={steps}", f"train.evaluate_every={every}", f"train.checkpoint_every={every}"]
    if not (place / "finished.json").exists():
        draftsmith(log, "train", *recipe, f"output={place}", *turns)
    return place / "drafter"


def measure(options: argparse.Namespace, folders: dict[str, Path]) -> None:
    """Forecast, then measure, check, and run transformers' decoding on the same held-out prompts."""
    out, held = options.out, str(options.out / "heldout.jsonl")
    target = ["--target", options.target, "--dtype", options.dtype]
    named = {family: str(folder) for family, folder in folders.items()}
    best = "eagle3" if "eagle3" in named else next(iter(named))
    named |= {"hybrid": f"hybrid:drafter={folders[best]}", "lookup": "prompt-lookup"}
    drafters = [word for name, place in named.items() for word in ("--drafter", f"{name}={place}")]
    lengths = ["--max-new-tokens", str(options.max_new_tokens)]
    policies = [word for policy in POLICIES for word in ("--policy", policy)]
    logs = out / "logs"
    if not (out / "forecast" / "forecast.json").exists():
        words = ["--prompts", held, *lengths, "--out", str(out / "forecast")]
        draftsmith(logs / "forecast.log", "forecast", *target, *drafters, *words)
    if not (out / "eval" / "eval.json").exists():
        words = ["--prompts", held, *lengths, "--repeats", str(options.repeats), "--out", str(out / "eval")]
        draftsmith(logs / "eval.log", "eval", *target, *drafters, *policies, *words)
    compare_with_transformers(options, folders, held)
    for family, folder in folders.items():
        place = out / "check" / family
        if not (place / "check.json").exists():
            words = ["--drafter", str(folder), "--prompts", held, *CHECKED, "--out", str(place)]
            draftsmith(logs / "check.log", "check", *target, *words)


def compare_with_transformers(options: argparse.Namespace, folders: dict[str, Path], held: str) -> None:
    """Run transformers' decoding, with the draft model as its assistant, on the held-out prompts."""
    out, logs = options.out, options.out / "logs"
    if "draft_model" in folders:
        script = [
            sys.executable,
            str(Path(__file__).with_name("decoder.py")),
            "--target",
            options.target,
            "--dtype",
            options.dtype,
        ]
        words = ["--drafter", str(folders["draft_model"]), "--prompt-set", held, "--cpu-time"]
        words += ["--max-new-tokens", str(options.max_new_tokens)]
        for temperature in ("0", "1"):
            finished, begun = out / f"transformers-{temperature}.txt", logs / f"transformers-{temperature}.log"
            if not finished.exists():
                begun.unlink(missing_ok=True)
                command(begun, *script, *words, "--temperature", temperature)
                begun.rename(finished)


def report(options: argparse.Namespace) -> str:
    """Return the table of all categories together, in Markdown."""
    rows = json.loads((options.out / "eval" / "eval.json").read_text(encoding="utf-8"))["rows"]

    def interval(row: dict[str, Any], key: str) -> str:
        bounds = row[f"{key}_interval"]
        return f"{row[key]:.2f}" + ("" if bounds is None else f" [{bounds[0]:.2f}, {bounds[1]:.2f}]")

    lines = ["| drafter | policy | T | alpha | tau | speedup |", "|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (row["temperature"], -row["speedup"])):
        if row["category"] == "all":
            cells = [row["drafter"], row["policy"], f"{row['temperature']:g}", f"{row['alpha']:.3f}"]
            lines.append("| " + " | ".join([*cells, interval(row, "tau"), interval(row, "speedup") + "×"]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    write_prompts(options)
    folders = {family: trained(options, family) for family in options.families}
    measure(options, folders)
    table = report(options)
    write_text(options.out / "real.md", table)
    print(table)


if __name__ == "__main__":
    main()
