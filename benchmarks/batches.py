"""Compare batches with transformers: the target alone and speculative decoding beside `generate`, by batch size.

    python benchmarks/batches.py --drafter DRAFT_MODEL         # the embedded target and a draft model for it
    python benchmarks/batches.py --pair tiny                   # random weights, 0.94 million parameters

The drafter is used as a chain of `--gamma` tokens and as `as_custom_generate` does by default. Every cell is a batch
size, a temperature, logits processors and a kind of prompts: of equal length, or of different lengths, padded on the
left. The sides decode the same batch, interleaved in one process; the first run is a warm-up and is not counted;
medians of tokens per second are printed, prefill included. `outside` is 1 - (seconds inside the models' forward passes)
/ (all seconds). With `--cpu-time`, seconds are those of the processor, which on one thread depend less on other
processes of the machine.

The last lines compare on-policy sampling, i.e. the target alone at temperature 1 in the largest batch, with training of
the draft model on the sampled texts: KL over the whole vocabulary, AdamW. Training reads the prompts' tokens too. With
`--continuous`, the same prompts are also decoded greedily by transformers' continuous batching (`generate_batch`),
interleaved with the target alone.
"""

import argparse
import itertools
import os
import statistics
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache

import torch
from datasets import Dataset
from decoder import PAIRS, clock_of, load, timed_forwards
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from draftsmith import SpeculativeDecoder
from draftsmith.decode.fastest import fastest_decoder
from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.heads import DraftModel
from draftsmith.provenance import environment
from draftsmith.train.step import AgreementStep, Last, collate

TOP_P, PENALTY = 0.9, 1.2
PROCESSED = ("plain", "top-p", "penalty")
SHAPES = ("equal", "padded")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=("trained", *PAIRS), default="trained")
    parser.add_argument("--target", default="embedded", help="'embedded', a local folder or a Hub id")
    parser.add_argument("--drafter", help="a draft model: a local folder or a Hub id")
    parser.add_argument("--prompt-set", default="embedded", help="'embedded' or a JSONL file")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--processors", nargs="+", choices=PROCESSED, default=list(PROCESSED))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5, help="counted runs of every side in a cell")
    parser.add_argument("--cpu-time", action="store_true", help="processor seconds instead of wall-clock seconds")
    parser.add_argument("--continuous", action="store_true", help="also transformers' continuous batching")
    return parser.parse_args()


@dataclass(frozen=True)
class Cell:
    """One comparison: a batch and its settings."""

    batch: int
    temperature: float
    processed: str
    shape: str

    def __str__(self) -> str:
        return f"{self.batch:5d}  T={self.temperature:<4g} {self.processed:8s} {self.shape:7s}"


@dataclass
class Side:
    """A way of decoding: returns the number of new tokens of a batch. Measurements of the last cell, one per run."""

    run: Callable[[Tensor, Tensor, Cell], int]
    speeds: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)


def make_sides(options: argparse.Namespace, target: PreTrainedModel, drafter: DraftModel) -> dict[str, Side]:
    count = options.max_new_tokens

    def theirs(ids: Tensor, mask: Tensor, cell: Cell) -> int:
        sampling = {"do_sample": True, "top_k": 0, "temperature": cell.temperature} if cell.temperature else {}
        extra = {"top-p": {"top_p": TOP_P}, "penalty": {"repetition_penalty": PENALTY}, "plain": {}}[cell.processed]
        settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None} | sampling | extra
        out = target.generate(ids, attention_mask=mask, max_new_tokens=count, **settings)
        return (out.shape[1] - ids.shape[1]) * len(ids)

    def ours(decoder_of: Callable[[int], SpeculativeDecoder]) -> Callable[[Tensor, Tensor, Cell], int]:
        def run(ids: Tensor, mask: Tensor, cell: Cell) -> int:
            extra = {
                "top-p": {"top_p": TOP_P},
                "penalty": {"logits_processor": [RepetitionPenaltyLogitsProcessor(PENALTY)]},
                "plain": {},
            }[cell.processed]
            settings = {"temperature": cell.temperature, "eos_token_id": None} | extra
            outputs = decoder_of(len(ids)).generate_batch(ids, attention_mask=mask, max_new_tokens=count, **settings)
            return sum(len(output.tokens) for output in outputs)

        return run

    alone, chain = SpeculativeDecoder(target), SpeculativeDecoder(target, drafter, draft_length=options.gamma)
    fastest = cache(lambda texts: fastest_decoder(target, drafter, batch_size=texts))
    decoders = {"alone": lambda _: alone, "chain": lambda _: chain, "default": fastest}
    return {"generate": Side(theirs)} | {name: Side(ours(decoder_of)) for name, decoder_of in decoders.items()}


def batch_of(prompts: list[list[int]], cell: Cell) -> tuple[Tensor, Tensor]:
    """Return ids and mask [B, T]; padded prompts keep between half and all of their tokens, the first one all."""
    rows = prompts[: cell.batch]
    width = min(map(len, rows))
    cut = [0 if cell.shape == "equal" else number * 7 % (width // 2 + 1) for number in range(cell.batch)]
    ids = torch.tensor([[0] * less + row[: width - less] for row, less in zip(rows, cut, strict=True)])
    mask = torch.tensor([[0] * less + [1] * (width - less) for less in cut])
    return ids, mask


def compare(options: argparse.Namespace, target: PreTrainedModel, drafter: DraftModel, prompts: list) -> None:
    """Print a row for each cell."""
    sides = make_sides(options, target, drafter)
    names = list(sides)
    cells = [
        Cell(*values)
        for values in itertools.product(options.batches, options.temperatures, options.processors, options.shapes)
    ]
    print("tokens/s of each side; then those of all but `generate` relative to it; then seconds outside the forwards")
    print("batch  T      logits   prompts ", *(f"{name:>8s}" for name in [*names, *names[1:], *names]))
    clock = clock_of(options)
    with timed_forwards(target, drafter.model, clock=clock) as forwards:
        for cell in cells:
            if (cell.temperature, cell.processed) == (0, "top-p") or (cell.batch, cell.shape) == (1, "padded"):
                continue  # without effect
            for side in sides.values():
                side.speeds, side.outside = [], []
            for number in range(options.repeats + 1):
                first = number % len(names)
                for name in names[first:] + names[:first]:
                    measure(sides[name], cell, prompts, number, forwards, clock)
            report(cell, sides)


def measure(
    side: Side,
    cell: Cell,
    prompts: list[list[int]],
    number: int,
    forwards: list[float],
    clock: Callable[[], float],
) -> None:
    """Decode a batch, and store its measurement unless it is the warm-up (`number` 0)."""
    ids, mask = batch_of(prompts, cell)
    torch.manual_seed(number)
    forwards.clear()
    started = clock()
    tokens = side.run(ids, mask, cell)
    seconds = clock() - started
    if number > 0:
        side.speeds.append(tokens / seconds)
        side.outside.append(1 - sum(forwards) / seconds)


def report(cell: Cell, sides: dict[str, Side]) -> None:
    theirs = sides["generate"].speeds
    speeds = [f"{statistics.median(side.speeds):8.0f}" for side in sides.values()]
    ratios = [
        f"{statistics.median(a / b for a, b in zip(side.speeds, theirs, strict=True)):8.2f}"
        for name, side in sides.items()
        if name != "generate"
    ]
    outside = [f"{statistics.median(side.outside):8.1%}" for side in sides.values()]
    print(cell, *speeds, *ratios, *outside, flush=True)


def sampling_beside_training(
    options: argparse.Namespace, target: PreTrainedModel, drafter: DraftModel, prompts: list[list[int]]
) -> None:
    """Print tokens per second of on-policy sampling and of training steps on the sampled texts, interleaved."""
    rows, clock = prompts[: max(options.batches)], clock_of(options)
    decoder = SpeculativeDecoder(target)
    trainee = DraftModel(deepcopy(drafter.model)).train().requires_grad_(True)  # it shares no layers with the target
    step = AgreementStep(trainee, Objective(), OnlineTeacher(target))
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-4)
    sampled, trained, shares = [], [], []
    for number in range(options.repeats + 1):
        started = clock()
        outputs = decoder.generate_batch(
            rows, max_new_tokens=options.max_new_tokens, temperature=1.0, eos_token_id=None, seeds=1000 * number
        )
        seconds = clock() - started
        sampled.append(sum(len(output.tokens) for output in outputs) / seconds)
        texts = [output.prompt_tokens + output.tokens for output in outputs]
        spans = [[[len(output.prompt_tokens), len(text)]] for output, text in zip(outputs, texts, strict=True)]
        batch = collate(Dataset.from_dict({"input_ids": texts, "spans": spans}), [*range(len(rows))], target.device)
        started = clock()
        step(batch, 0.5, Last()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained.append(sum(map(len, texts)) / (clock() - started))
        shares.append(sum(map(len, texts)) / seconds / trained[-1])
    on_policy, training = statistics.median(sampled[1:]), statistics.median(trained[1:])
    print(
        f"\nbatch {len(rows)}: on-policy sampling {on_policy:.0f} tokens/s, training {training:.0f} tokens/s,", end=" "
    )
    print(f"sampling / training {on_policy / training:.2f}", end=" ")
    print(f"({statistics.median(shares[1:]):.2f} with the prompts' tokens counted on both sides)")


def continuous_batching(options: argparse.Namespace, target: PreTrainedModel, prompts: list[list[int]]) -> None:
    """Print tokens per second of the target alone and of transformers' continuous batching in the largest batch."""
    rows, clock, count = prompts[: max(options.batches)], clock_of(options), options.max_new_tokens
    decoder = SpeculativeDecoder(target)
    config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def alone() -> int:
        outputs = decoder.generate_batch(rows, max_new_tokens=count, temperature=0.0, eos_token_id=None)
        return sum(len(output.tokens) for output in outputs)

    def continuous() -> int:
        outputs = target.generate_batch(inputs=rows, generation_config=config, progress_bar=False)
        return sum(len(output.generated_tokens) for output in outputs.values())

    speeds: dict[str, list[float]] = {"alone": [], "continuous": []}
    for _ in range(options.repeats + 1):
        for name, run in (("alone", alone), ("continuous", continuous)):
            started = clock()
            speeds[name].append(run() / (clock() - started))
    medians = {name: statistics.median(of[1:]) for name, of in speeds.items()}
    print(f"batch {len(rows)}: target alone {medians['alone']:.0f} tokens/s, continuous batching", end=" ")
    print(f"{medians['continuous']:.0f} tokens/s, ratio {medians['continuous'] / medians['alone']:.3f}")


def main() -> None:
    options = arguments()
    options.prompts = max(options.batches)
    loaded = load(options)
    target, drafter, prompts = loaded.target, loaded.drafter, loaded.prompts
    where = environment()
    load_before = os.getloadavg()[0]
    compare(options, target, drafter, prompts)
    sampling_beside_training(options, target, drafter, prompts)
    if options.continuous:
        continuous_batching(options, target, prompts)
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in (target, drafter.model)]
    print(f"{sizes[0]:,} and {sizes[1]:,} parameters, prompts of {len(prompts[0])} tokens, gamma {options.gamma}")
    print(f"{where['cpu']}, {where['torch_threads']} threads, accelerator: {where['accelerator']}")
    print(f"load average before and after: {load_before:.1f}, {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
