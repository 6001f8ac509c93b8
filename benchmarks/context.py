"""Measure how alpha and tau of a trained EAGLE-3 depend on the length of the context, with and without a window.

    python benchmarks/context.py --target MODEL --drafter DRAFTER --prompts FOLDER

The texts are conversations of about 2,000 tokens: questions of GSM8K's test set (gsm8k_test.jsonl in FOLDER) and the
target's own answers at T=1, so that contexts become longer and the task stays the same. At every token of an answer the
drafter drafts a chain of 4, as in decoding, and its acceptance is exact given the text. The windowed drafter has the
same weights; --window is the length of the texts that it was trained on.
"""

import argparse
import json
import shutil
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from draftsmith import SpeculativeDecoder, load_drafter
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.distill.load_target import LoadedTarget, load_target
from draftsmith.eval.teacher_forced import TargetText, acceptance_measure, agreement
from draftsmith.storage import write_json

BINS = (0, 256, 512, 1024, 1536, 2048)
GAMMA = 4


def conversations(
    target: LoadedTarget, questions: list[str], count: int, turns: int, answer_tokens: int
) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Return texts with the spans of their answers; each answer follows all earlier turns."""
    decoder, tokenizer = SpeculativeDecoder(target.model), target.tokenizer
    texts: list[list[int]] = [[] for _ in range(count)]
    spans: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for turn in range(turns):
        asked = questions[turn * count : (turn + 1) * count]
        prompts = [text + _turn(tokenizer, question) for text, question in zip(texts, asked, strict=True)]
        outputs = decoder.generate_batch(prompts, seeds=turn * count, max_new_tokens=answer_tokens, temperature=1.0)
        for row, (prompt, out) in enumerate(zip(prompts, outputs, strict=True)):
            texts[row] = [*prompt, *out.tokens]
            spans[row].append((len(prompt), len(texts[row])))
    return list(zip(texts, spans, strict=True))


def _turn(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Return the tokens of a question and of the header of its answer; a system message before each of them."""
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def with_window(drafter: Path, window: int, copy: Path) -> Path:
    """Copy a drafter with a window in each of its layers; the weights stay."""
    shutil.copytree(drafter, copy)
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    body = config["draftsmith"]["drafter"]["body"]
    body |= {"sliding_window": window, "layer_types": ["sliding_attention"] * body["num_hidden_layers"]}
    write_json(copy / "config.json", config)
    return copy


def by_length(target: LoadedTarget, drafter: Path, texts: list[tuple[list[int], list[tuple[int, int]]]]) -> list[str]:
    """Return the cells `alpha/tau` of each bin of committed tokens, and print the number of positions."""
    loaded = load_drafter(str(drafter), target.model, target.tokenizer)
    given = [TargetText(tokens, spans[0][0], len(tokens) + GAMMA) for tokens, spans in texts]
    found: dict[int, list[NDArray[np.float64]]] = {}
    measure = acceptance_measure(Processors(Sampling(temperature=1.0)))
    for text, (_, spans) in zip(given, texts, strict=True):
        (table,) = agreement(target.model, loaded, [text], GAMMA, measure)
        accepted_AK = np.minimum(1.0, np.exp(np.minimum(0.0, table["log_q"] - table["log_p"])))
        for start, end in spans:
            for last in range(start, end - GAMMA):  # the last committed token of a round
                place = int(np.searchsorted(BINS, last + 1, side="right")) - 1
                found.setdefault(place, []).append(accepted_AK[last - text.prompt_length])
    cells = []
    for place in sorted(found):
        rows_NK = np.array(found[place])
        tau = 1 + rows_NK.cumprod(1).sum(1).mean()
        cells.append(f"{rows_NK[:, 0].mean():.3f}/{tau:.2f}")
    print("positions:", {BINS[place]: len(rows) for place, rows in sorted(found.items())})
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="folder of gsm8k_test.jsonl")
    parser.add_argument("--window", type=int, default=448)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--answer-tokens", type=int, default=160)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    rows = (options.prompts / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in rows[100:]]
    target = load_target(options.target, dtype=options.dtype)
    texts = conversations(target, questions, options.texts, options.turns, options.answer_tokens)
    print("| window | " + " | ".join(f"{a:,}–{b:,}" for a, b in pairwise(BINS)) + " |")
    print("|---" * len(BINS) + "|")
    with TemporaryDirectory() as folder:
        windowed = with_window(options.drafter, options.window, Path(folder) / "drafter")
        for name, drafter in {"none": options.drafter, f"{options.window}": windowed}.items():
            print(f"| {name} | " + " | ".join(by_length(target, drafter, texts)) + " |", flush=True)


if __name__ == "__main__":
    main()
