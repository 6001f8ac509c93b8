"""Measure what a round costs on targets with recurrent layers, beside a target with attention only.

    python benchmarks/recurrent.py                           # random targets of one width and depth, one thread

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

from draftsmith.decode.passes.capability import capability_of
from draftsmith.decode.passes.plan import Plan
from draftsmith.decode.passes.recurrent import MOST_RECOMPUTED, is_recurrent
from draftsmith.decode.passes.runner import ModelRunner

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
    parser.add_argument("--compile", action="store_true", help="compiled passes, too")
    return parser.parse_args()


def built(values: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SIZES, **values})).eval()


class Passes:
    """Passes of one width over a context, timed.

    Args:
        again: tokens that recurrent layers read again in each pass; 0 for a target that decodes without drafts.
    """

    def __init__(self, model: PreTrainedModel, width: int, again: int, *, compile: bool = False) -> None:
        self.runner = ModelRunner(model, 1, Plan(longest=CONTEXT + 8 * MOST_RECOMPUTED, compile=compile, width=width))
        self.runner.append([[1] * CONTEXT])
        self.ids = torch.ones(1, width, dtype=torch.int64)
        self.drafts = again > 0 or width > 1
        if again:
            self.runner.line(torch.ones(1, again + 1, dtype=torch.int64))
            self.runner.commit([[*range(again)]])
        self.times: list[float] = []

    def run(self) -> None:
        """Read a draft that is then discarded, or one more token."""
        started = time.thread_time()
        if self.drafts:
            self.runner.line(self.ids)
        else:
            self.runner.tree(self.ids, [()])
        self.times.append(time.thread_time() - started)
        self.runner.commit([[]] if self.drafts else [[0]])

    @property
    def seconds(self) -> float:
        """The median, without the first pass, which allocates or compiles."""
        return median(self.times[1:])


@torch.inference_mode()
def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    passes: dict[tuple[str, bool], list[Passes]] = {}
    for name, values in TARGETS.items():
        model = built(values)
        again = MOST_RECOMPUTED // 2 if is_recurrent(model) else 0
        for compile in (False, True) if options.compile else (False,):
            if compile and (reason := capability_of(model).not_compiled):
                print(f"{name}: not compiled, {reason}")
                continue
            alone = Passes(model, 1, 0, compile=compile)
            drafts = [Passes(model, width, again, compile=compile) for width in options.widths]
            passes[name, compile] = [alone, *drafts]
    for _ in range(options.repeats + 1):
        for row in passes.values():
            for timed in row:
                timed.run()
    table = Table("target", "one token", *(f"{width} tokens" for width in options.widths), title="Cost of a round")
    for (name, compile), (alone, *drafts) in passes.items():
        ratios = [f"{timed.seconds / alone.seconds:.2f}" for timed in drafts]
        table.add_row(name + ", compiled" * compile, f"{1000 * alone.seconds:.1f} ms", *ratios)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
