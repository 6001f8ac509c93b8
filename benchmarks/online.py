"""Measure learning while serving: a drafter that learns beside its frozen copy and the target alone, by request.

    python benchmarks/online.py --shift steps          # a drafter of 60 training steps serves its own domain
    python benchmarks/online.py --shift prose          # a drafter that was trained on code serves English docstrings
    python benchmarks/online.py --shift stationary     # the drafter of a whole recipe serves its own domain
    python benchmarks/online.py --target FOLDER --drafter FOLDER       # a pair trained elsewhere, texts of the target
    python benchmarks/online.py --shift steps --hybrid     # frozen drafts from its own text, too, as learning does

Each request is decoded by the three arms in turns, the first of which rotates; the target alone decodes one request in
`--alone-every`. Learning sees the verifications of its own arm only, and its time counts: tokens per second are decoded
tokens by processor time, learning included, without the prefill's token. The goals are those of the project for 300
requests; the table shows windows of requests, with paired 95 % bootstrap intervals over requests.
"""

import argparse
import ast
import random
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console

from draftsmith import OnlineLearning, SpeculativeDecoder, load_drafter
from draftsmith.distill.embedded import embedded_prompts
from draftsmith.distill.load_target import EMBEDDED, LoadedTarget, load_target
from draftsmith.eval.metrics import Series, ratio
from draftsmith.eval.online import Online, gain_text, online_lines, online_result, online_table, plot_online
from draftsmith.eval.prompts import load_prompts
from draftsmith.heads.ngram import Hybrid
from draftsmith.storage import write_json
from draftsmith.train.recipe import load_recipe
from draftsmith.train.trainer import train

SHIFTS = {"steps": 60, "prose": 400, "stationary": 400}
"""Training steps of the drafter of each shift."""
PROMPT_TOKENS = 32
OLD_DOMAIN = 24
"""Requests of the old domain that both drafters decode after the shift to prose."""
TAU_GAIN, AHEAD_FROM, FLOOR = 0.25, 100, 0.97
"""Goals: gain of tau in the last window, request from which tokens/s are ahead, lowest tokens/s relative to frozen."""
FIRST = 10
"""Request from which the lowest tokens/s count: before it, a single request decides."""
# Shapes: U requests; 3 arms: the target alone, frozen, learning.


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shift", choices=SHIFTS, default="steps")
    parser.add_argument("--recipe", default="quickstart/mtp", help="recipe of the drafter")
    parser.add_argument("--target", default=EMBEDDED)
    parser.add_argument("--drafter", help="a drafter's folder, instead of training one")
    parser.add_argument("--prompts", help="a prompt file; with --drafter, default: beginnings that the target samples")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--every", type=int, help="decoded tokens per step, instead of a share of the time")
    parser.add_argument("--hybrid", action="store_true", help="hybrids with a suffix automaton in both arms")
    parser.add_argument("--alone-every", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/online"))
    return parser.parse_args()


def trained(recipe: str, steps: int, out: Path) -> Path:
    """Train the recipe's drafter for a number of steps, or find it in `out`, and return its folder."""
    folder = out / f"{recipe.replace('/', '-')}-{steps}"
    return train(load_recipe(recipe, [f"output={folder}", f"train.steps={steps}", f"train.evaluate_every={steps}"]))


def docstrings(tokenizer: Any, count: int) -> list[list[int]]:
    """Return the beginnings of docstrings of the standard library, in a random order that is always the same."""
    root, prompts = Path(sysconfig.get_path("stdlib")), []
    files = sorted(root.glob("*.py"))
    random.Random(0).shuffle(files)
    for file in files:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                ids = tokenizer((ast.get_docstring(node) or "")[:400])["input_ids"][:PROMPT_TOKENS]
                prompts += [ids] if len(ids) == PROMPT_TOKENS else []
        if len(prompts) >= 2 * count:
            break
    random.Random(0).shuffle(prompts)
    return prompts[:count]


def code(tokenizer: Any, count: int) -> list[list[int]]:
    """Return windows of held-out modules."""
    return [row.input_ids for row in embedded_prompts(tokenizer, "heldout", count, PROMPT_TOKENS, seed=3)]


def requests(options: argparse.Namespace, target: LoadedTarget) -> list[list[int]]:
    """Return the prompts in their order of arrival."""
    if options.prompts is not None:
        loaded = load_prompts(options.prompts, target.tokenizer, count=options.requests, context=None)
        return [prompt.input_ids for prompt in loaded]
    if options.drafter is not None:
        start = [[target.tokenizer.bos_token_id]] * options.requests
        settings = {"max_new_tokens": PROMPT_TOKENS, "temperature": 1.0, "eos_token_id": None}
        outputs = SpeculativeDecoder(target.model).generate_batch(start, seeds=0, **settings)
        return [output.prompt_tokens + output.tokens for output in outputs]
    return (docstrings if options.shift == "prose" else code)(target.tokenizer, options.requests)


def serve(options: argparse.Namespace, target: LoadedTarget, folder: Path | str) -> dict[str, Any]:
    """Decode all requests with the three arms; return tokens, rounds and seconds [U, 3], and what was learned."""
    frozen, learning = (load_drafter(folder, target.model, target.tokenizer) for _ in range(2))
    if options.hybrid:
        frozen, learning = Hybrid(frozen), Hybrid(learning)
    learn = OnlineLearning(share=options.share, every=options.every, on_update=lambda update: print(update, flush=True))
    decoders = [
        SpeculativeDecoder(target.model),
        SpeculativeDecoder(target.model, frozen),
        SpeculativeDecoder(target.model, learning, learn=learn),
    ]
    prompts = requests(options, target)
    tokens, rounds, seconds = np.zeros((3, len(prompts), len(decoders)))
    settings = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature, "eos_token_id": None}
    differing = 0
    for number, prompt in enumerate(prompts):
        texts = set()
        for arm in ((number + place) % 3 for place in range(3)):
            if not arm and number % options.alone_every:
                continue
            started = time.process_time()
            output = decoders[arm].generate(prompt, seed=number, **settings)
            seconds[number, arm] = time.process_time() - started
            tokens[number, arm], rounds[number, arm] = output.decode_tokens, len(output.rounds)
            texts.add(tuple(output.tokens))
        differing += options.temperature == 0 and len(texts) > 1
    old = {}
    if options.shift == "prose" and options.drafter is None:
        own = code(target.tokenizer, OLD_DOMAIN)
        for name, drafter in (("frozen", frozen), ("learning", decoders[2].drafter)):
            outputs = SpeculativeDecoder(target.model, drafter).generate_batch(own, seeds=0, **settings)
            old[name] = sum(o.decode_tokens for o in outputs) / sum(len(o.rounds) for o in outputs)
    numbers = {"tokens": tokens.tolist(), "rounds": rounds.tolist(), "seconds": seconds.tolist()}
    updates = [str(update) for update in learn.updates]
    arms = [
        cast(Series, SimpleNamespace(tokens=tokens[:, [a]], rounds=rounds[:, [a]], seconds=seconds[:, [a]]))
        for a in range(3)
    ]
    online = online_result(Path(folder).name, arms, learn)
    return {**numbers, "texts_that_differ": differing, "old_domain": old, "updates": updates, "online": online}


def show(options: argparse.Namespace, result: dict[str, Any], console: Console) -> None:
    """Print the table, and the figures that have goals beside these."""
    online: Online = result["online"]
    console.print(online_table(online))
    for line in online_lines(online):
        console.print(line, highlight=False)
    totals_UA = ratio(np.cumsum(result["tokens"], 0), np.cumsum(result["seconds"], 0))
    relative_U = (totals_UA[:, 2] / totals_UA[:, 1])[FIRST - 1 :]
    end, ahead = online["windows"][-1], np.flatnonzero(relative_U < 1)
    since = FIRST if not len(ahead) else int(ahead[-1]) + FIRST + 1
    goals = [
        ("tau in the last window", gain_text(end["tau_gain"], end["tau_gain_interval"]), f"+{TAU_GAIN:.0%}"),
        ("tokens/s since the first request ahead of frozen from request", f"{since}", f"{AHEAD_FROM}"),
        (f"lowest tokens/s since the first request, from request {FIRST}", f"{relative_U.min():.3f}", f"{FLOOR}"),
    ]
    stationary = options.shift == "stationary" and options.drafter is None
    for name, value, goal in goals:
        console.print(f"{name}: {value}" + ("" if stationary else f" (goal {goal})"), highlight=False)
    if result["old_domain"]:
        console.print(
            "tau on the old domain: frozen {frozen:.2f}, learning {learning:.2f}".format(**result["old_domain"])
        )
    console.print(f"greedy texts that differ: {result['texts_that_differ']}")


def main() -> None:
    options, console = arguments(), Console(width=120)
    torch.set_num_threads(1)
    folder = options.drafter or trained(options.recipe, SHIFTS[options.shift], options.out)
    target = load_target(options.target)
    result = serve(options, target, folder)
    name = options.shift if options.drafter is None else Path(options.drafter).name
    name += "-hybrid" * options.hybrid
    write_json(options.out / f"{name}-{options.temperature:g}.json", {"options": str(vars(options)), **result})
    (options.out / f"{name}-{options.temperature:g}.png").write_bytes(plot_online(result["online"]).png)
    show(options, result, console)


if __name__ == "__main__":
    main()
