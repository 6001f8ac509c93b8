"""Compare the chunked objective with the plain one: peak memory and time of forward and backward, by vocabulary.

    python benchmarks/objective.py                       # V = 32,000 and 128,000, KL
    python benchmarks/objective.py --kind lk_lambda --tokens 2048
    python benchmarks/objective.py --vocabularies 49152 --draft-vocab 8192 --hidden 576 --tokens 1400   # stored sums

Each measurement runs in its own process, since peak memory is the process's; both sides alternate, and medians are
printed. Memory is the growth of the peak above inputs and weights. The plain side computes all logits at once.

With --draft-vocab, the chunked objective of EAGLE-3's three positions in bfloat16 is compared with itself where a
cached teacher has stored the log-sum-exp of the logits; processor seconds of both in one process, alternating.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from draftsmith.distill.losses import LOSSES, forward_kl, total_variation
from draftsmith.distill.objective import Objective
from draftsmith.heads.base import DraftStates, TeacherSignals

REPEATS = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 128_000])
    parser.add_argument(
        "--kind",
        choices=LOSSES,
        default="kl",
        help="objective of the chunked side; the plain side is tv for tv, otherwise KL",
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--draft-vocab", type=int, help="compare with stored sums over the other logits")
    parser.add_argument("--measure", choices=("plain", "chunked"), help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(options: argparse.Namespace) -> None:
    """Print seconds and the growth of peak memory, in MiB, of one forward and backward pass."""
    torch.manual_seed(0)
    (vocabulary,) = options.vocabularies
    lm_head = nn.Linear(options.hidden, vocabulary, bias=False).requires_grad_(False)
    head = nn.Linear(options.hidden, vocabulary, bias=False)
    head.weight.grad = torch.zeros_like(head.weight)
    shape = (1, options.tokens, options.hidden)
    state, teacher = torch.randn(shape, requires_grad=True), torch.randn(shape)
    # Allocate what both sides need, with a few tokens, so that only the logits' memory is measured.
    (head(state[:, :2]).sum() + lm_head(teacher[:, :2]).sum()).backward()
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    if options.measure == "plain":
        with torch.no_grad():
            p_log = lm_head(teacher[0]).log_softmax(-1)
        q_log = head(state[0]).log_softmax(-1)
        loss = (total_variation if options.kind == "tv" else forward_kl)(p_log, q_log).sum()
    else:
        mask = torch.ones(shape[:2], dtype=torch.bool)
        signals = TeacherSignals(mask.long(), mask.long(), teacher, mask)
        loss = Objective(options.kind, chunk_tokens=options.chunk)(
            [DraftStates.everywhere(state, head)], signals, lm_head, [0.5]
        ).loss
    loss.backward()
    seconds = time.perf_counter() - started
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(json.dumps({"seconds": seconds, "peak": peak, "loss": loss.item()}))


def compare_stored(options: argparse.Namespace, vocabulary: int) -> str:
    """Return the processor seconds of a forward and backward pass without and with stored sums, and their ratio."""
    torch.manual_seed(0)
    bf16, shape = torch.bfloat16, (1, options.tokens, options.hidden)
    lm_head = nn.Linear(options.hidden, vocabulary, bias=False, dtype=bf16).requires_grad_(False)
    head = nn.Linear(options.hidden, options.draft_vocab, bias=False, dtype=bf16)
    tokens_D = torch.randperm(vocabulary)[: options.draft_vocab].sort().values
    mask_BT, places = torch.ones(shape[:2], dtype=torch.bool), torch.arange(options.tokens)[None]
    plain = TeacherSignals(mask_BT.long(), mask_BT.long(), torch.randn(shape, dtype=bf16), mask_BT)
    with torch.no_grad():
        logits_BTV = lm_head(plain.hidden_BTH).float()
        stored = replace(plain, log_sum_BT=logits_BTV.logsumexp(-1).double(), argmax_BT=logits_BTV.argmax(-1))
    states = [torch.randn(shape, dtype=bf16, requires_grad=True) for _ in range(3)]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(1 + REPEATS):
        for is_stored, signals in ((False, plain), (True, stored)):
            started = time.process_time()
            unrolled = [
                DraftStates.in_rows(state, places + k + 1, options.tokens, head, vocabulary_D=tokens_D)
                for k, state in enumerate(states)
            ]
            Objective(options.kind, chunk_tokens=options.chunk)(unrolled, signals, lm_head, [0.5] * 3).loss.backward()
            seconds[is_stored].append(time.process_time() - started)
    whole, ours = (statistics.median(found[1:]) for found in seconds.values())
    return f"V = {vocabulary:,}: {whole:.2f} s, with stored sums {ours:.2f} s, ratio {ours / whole:.2f}"


def run(side: str, vocabulary: int, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", side, "--vocabularies", str(vocabulary), "--kind", options.kind]
    command += ["--tokens", str(options.tokens), "--hidden", str(options.hidden), "--chunk", str(options.chunk)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    options = arguments()
    if options.measure:
        measure(options)
        return
    if options.draft_vocab is not None:
        for vocabulary in options.vocabularies:
            print(compare_stored(options, vocabulary))
        return
    table = Table(title=f"{options.kind}, {options.tokens} tokens of width {options.hidden}, chunks of {options.chunk}")
    for column in ("V", "plain MiB", "chunked MiB", "ratio", "plain s", "chunked s", "ratio"):
        table.add_column(column, justify="right")
    for vocabulary in options.vocabularies:
        sides: dict[str, list[dict[str, float]]] = {"plain": [], "chunked": []}
        for _ in range(REPEATS):
            for side, found in sides.items():
                found.append(run(side, vocabulary, options))
        (peak, peak_ours), (seconds, ours) = (
            [statistics.median(entry[key] for entry in found) for found in sides.values()]
            for key in ("peak", "seconds")
        )
        cells = (f"{peak:.0f}", f"{peak_ours:.0f}", f"1/{peak / max(peak_ours, 1):.1f}")
        table.add_row(f"{vocabulary:,}", *cells, f"{seconds:.2f}", f"{ours:.2f}", f"{ours / seconds:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
