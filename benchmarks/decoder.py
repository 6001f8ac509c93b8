"""Our target-only loop beside transformers' `generate`, and our speculative loop beside assisted generation.

    python benchmarks/decoder.py --target TARGET --drafter DRAFT_MODEL [--prompts 8] [--max-new-tokens 96]

All arms decode the same prompts greedily, interleaved in one process; the medians over prompts are printed with
are printed with their ratios. The first prompt warms up and does not count.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from draftsmith import SpeculativeDecoder, load_drafter
from draftsmith.distill.targets import load_target
from draftsmith.eval.prompts import load_prompts
from draftsmith.heads import DraftModel
from draftsmith.provenance import environment


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="embedded", help="'embedded', a local folder or a Hub id")
    parser.add_argument("--drafter", required=True, help="a draft model: a local folder or a Hub id")
    parser.add_argument("--prompt-set", default="embedded", help="'embedded' or a JSONL file")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--gamma", type=int, default=4)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    loaded = load_target(options.target)
    target, count = loaded.model, options.max_new_tokens
    drafter = load_drafter(options.drafter, target, loaded.tokenizer)
    if not isinstance(drafter, DraftModel):
        raise SystemExit(f"--drafter {options.drafter} is of type {drafter.type}; expected a draft model")
    assistant = drafter.model
    assistant.generation_config.num_assistant_tokens = options.gamma
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    alone, speculative = SpeculativeDecoder(target), SpeculativeDecoder(target, drafter, draft_length=options.gamma)

    def ours(decoder: SpeculativeDecoder) -> Callable[[list[int]], int]:
        return lambda prompt: len(decoder.generate(prompt, max_new_tokens=count).tokens)

    def theirs(**settings: object) -> Callable[[list[int]], int]:
        def run(prompt: list[int]) -> int:
            ids = torch.tensor([prompt], device=target.device)
            mask = torch.ones_like(ids)
            out = target.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **settings)
            return out.shape[1] - len(prompt)

        return run

    arms = {
        "target alone, draftsmith": ours(alone),
        "target alone, generate": theirs(),
        "speculative, draftsmith": ours(speculative),
        "speculative, assisted generation": theirs(assistant_model=assistant),
    }
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    for number, prompt in enumerate(load_prompts(options.prompt_set, loaded.tokenizer, count=options.prompts + 1)):
        names = list(arms)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            started = time.perf_counter()
            tokens = arms[name](prompt.input_ids)
            if number > 0:
                speeds[name].append(tokens / (time.perf_counter() - started))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    for name, value in medians.items():
        print(f"{name:34s} {value:8.1f} tokens/s, prefill included")
    for kind in ("target alone", "speculative"):
        ours_name, theirs_name = [name for name in arms if name.startswith(kind)]
        print(f"{kind}: draftsmith / transformers = {medians[ours_name] / medians[theirs_name]:.2f}")
    where = environment()
    print(f"{where['cpu']}, {where['torch_threads']} threads, accelerator: {where['accelerator']}")


if __name__ == "__main__":
    main()
