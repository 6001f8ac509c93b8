"""Measure what a round costs on targets with recurrent layers, beside a target with attention only.

    python benchmarks/recurrent.py                 # random targets of one width and depth, one thread

A round verifies a draft: one pass over its tokens and the last committed one. Recurrent layers read up to 16 tokens
again in it, 8 on average, which is what is timed. The table gives the processor time of such a pass relative to a pass
of the same target over one token after fully accepted rounds, where nothing is read again: the cost of decoding
without drafts. Targets and widths take turns.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftsmith.decode.model_runner import ModelRunner
from draftsmith.decode.recurrent_state import MOST_AGAIN, is_recurrent

SIZES: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8, "head_dim": 64,
    "num_key_value_heads": 2, "vocab_size": 8192,
}  # fmt: skip
HYBRID = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2
TARGETS: dict[str, dict[str, Any]] = {
    "attention only (Qwen3)": {"model_type": "qwen3"},
    "short convolutions (LFM2)": {"model_type": "lfm2", "full_attn_idxs": [3, 7]},
    "gated delta rule (Qwen3.5)": {"model_type": "qwen3_5_text", "layer_types": HYBRID, "linear_num_key_heads": 4,
                                   "linear_num_value_heads": 8, "linear_key_head_dim": 64,
                                   "linear_value_head_dim": 64},
    "Mamba-2": {"model_type": "mamba2", "num_heads": 16, "head_dim": 64, "n_groups": 1},
    "Mamba-1": {"model_type": "mamba"},
}  # fmt: skip
CONTEXT = 128


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 3, 5, 8], help="tokens of a pass")
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_args()


def built(values: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SIZES, **values})).eval()


def prepared(model: PreTrainedModel, again: int) -> ModelRunner:
    """Return a runner after a context, whose recurrent layers read `again` tokens again in each pass."""
    runner = ModelRunner(model, 1, longest=CONTEXT + 2 * MOST_AGAIN)
    runner.append([[1] * CONTEXT])
    if again:
        runner.line(torch.ones(1, again + 1, dtype=torch.int64))
        runner.commit([[*range(again)]])
    return runner


def seconds(runner: ModelRunner, width: int) -> float:
    """Return the processor time of a pass whose tokens are then discarded."""
    started = time.thread_time()
    runner.line(torch.ones(1, width, dtype=torch.int64))
    elapsed = time.thread_time() - started
    runner.commit([[]])
    return elapsed


@torch.inference_mode()
def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    passes: dict[tuple[str, int], tuple[ModelRunner, int]] = {}
    for name, values in TARGETS.items():
        model = built(values)
        passes[name, 0] = (prepared(model, 0), 1)  # without drafts
        runner = prepared(model, MOST_AGAIN // 2 if is_recurrent(model) else 0)
        passes |= {(name, width): (runner, width) for width in options.widths}
    times: dict[tuple[str, int], list[float]] = {key: [] for key in passes}
    for repeat in range(options.repeats + 1):
        for key, (runner, width) in passes.items():
            elapsed = seconds(runner, width)
            if repeat:  # the first allocates
                times[key].append(elapsed)
    table = Table("target", "one token", *(f"{width} tokens" for width in options.widths), title="Cost of a round")
    for name in TARGETS:
        alone = median(times[name, 0])
        ratios = [f"{median(times[name, width]) / alone:.2f}" for width in options.widths]
        table.add_row(name, f"{1000 * alone:.1f} ms", *ratios)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
