"""Time decoding and training of large shapes on one GPU: decoding beside transformers' `generate`, training by part.

    python benchmarks/gpu.py                                    # Qwen3-8B, bf16, one GPU with 80 GB
    python benchmarks/gpu.py --shape llama3.1-8b --batches 1 8 --contexts 1024 --compile
    python benchmarks/gpu.py --shape tiny --batches 1 2 --contexts 16 --max-new-tokens 8   # runs on a CPU

Weights are random and made on the device; no file is read. The residual branches of the target's layers are scaled
down so far that its logits depend on the last token only, while every layer computes what a trained one does. The
drafter is one layer between the target's embeddings and its lm_head. Its logits are a blend of the target's with those
of its own layer, and `--acceptance` chooses the weight of the layer: the mean over random tokens of
sum_v min(p_v, q_v), and under greedy decoding of equal argmax, is the given value. Expected tau of a chain is
(1 - a^(gamma + 1)) / (1 - a); the block rule may exceed it.

Training (gpu_training.py): EAGLE-3 with seven steps of the training-time test on rows of each of `--lengths`, and on
the first of them with a draft vocabulary, DSpark, Medusa with five heads, and a draft model of Qwen3-0.6B's shape; one
row a step, of which an eighth is its prompt, AdamW, bf16 autocast. MFU is of the whole step, and of its own part
(without the target's pass). The machine's peak is that of train/estimate/time.py.

A cell is a temperature, a batch size and a context; small ones come first, and none begins after `--minutes`, nor does
training after half of them. What fails is left out, and `--json` has each figure as soon as it is known. A cell's sides
decode the same random prompts, interleaved; the first run is a warm-up. Times begin after the prefill. `outside` is the
share of time outside the models' forward passes, from one more run in which the device is synchronized after every
pass; not measured for compiled passes. `alone` at T=1 is what sampling training data costs.
"""

import argparse
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import transformers
from decoder import timed_forwards
from gpu_training import failure, table, train_rows
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, StoppingCriteria

from draftsmith import SpeculativeDecoder
from draftsmith.decode.clock import now
from draftsmith.heads import DraftModel
from draftsmith.provenance import environment
from draftsmith.storage import write_json

RESIDUAL = 1e-4
"""Scale of the target's residual branches: below the rounding of bf16 next to embeddings of variance 1."""
SPREAD = 2.5
"""Standard deviation of the target's logits."""
SCALES = (2.0**-10, 2.0**16)
"""Scales of the drafter's layer: from a drafter that is the target to one that is independent of it."""
QWEN3 = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
QWEN3 |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
LLAMA3 = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
LLAMA3 |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072}
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
COMPILED = "compiled"
TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
SHAPES: dict[str, tuple[type[PreTrainedModel], Callable[..., LlamaConfig | Qwen3Config], dict[str, object]]] = {
    "qwen3-8b": (Qwen3ForCausalLM, Qwen3Config, QWEN3),
    "llama3.1-8b": (LlamaForCausalLM, LlamaConfig, LLAMA3),
    "tiny": (LlamaForCausalLM, LlamaConfig, TINY),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--gamma", type=int, default=4, help="draft length")
    parser.add_argument("--acceptance", type=float, default=0.8, help="probability that a draft token is accepted")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--compile", action="store_true", help="also with compiled passes; CUDA graphs on a GPU")
    parser.add_argument(
        "--lengths", type=int, nargs="*", default=[2048, 8192], help="of training rows; none: no training"
    )
    parser.add_argument("--steps", type=int, default=5, help="counted training steps of each drafter")
    parser.add_argument("--json", type=Path, help="also write the figures into this file")
    parser.add_argument("--repeats", type=int, default=3, help="counted runs of every side in a cell")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="after which no cell is begun, and half of it no training"
    )
    options = parser.parse_args()
    if options.shape != "tiny" and not torch.cuda.is_available():
        raise SystemExit(f"--shape {options.shape} needs a GPU, and torch finds none; --shape tiny runs on a CPU")
    if options.max_new_tokens < 2 * (options.gamma + 1):
        raise SystemExit(f"--max-new-tokens {options.max_new_tokens}; expected two rounds of gamma + 1 tokens or more")
    if not 0 < options.acceptance < 1:
        raise SystemExit(f"--acceptance {options.acceptance}; expected a probability between 0 and 1, both excluded")
    return options


# The models.


def random_model(shape: str, device: torch.device, **changes: int) -> PreTrainedModel:
    """Return a model with random weights in bf16, made on the device."""
    kind, config, sizes = SHAPES[shape]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return kind(config(**{**sizes, **changes}, **TOKENS)).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)


@torch.no_grad()
def make_target(shape: str, device: torch.device) -> PreTrainedModel:
    """Return a target whose logits after a text are those after its last token, with deviation `SPREAD`."""
    target = random_model(shape, device)
    for weight in branches(target):
        weight *= RESIDUAL
    target.get_input_embeddings().weight.normal_()
    target.get_output_embeddings().weight.normal_(std=SPREAD / target.config.hidden_size**0.5)
    return target


def make_drafter(shape: str, target: PreTrainedModel) -> DraftModel:
    """Return a draft model of one layer of the target's shape, with the target's embeddings and lm_head."""
    model = random_model(shape, target.device, num_hidden_layers=1)
    model.set_input_embeddings(target.get_input_embeddings())
    model.set_output_embeddings(target.get_output_embeddings())
    return DraftModel(model)


def branches(model: PreTrainedModel) -> list[Tensor]:
    """Return the last weight of each residual branch."""
    return [
        weight for layer in model.model.layers for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight)
    ]


class Blend:
    """Sets the weight of the drafter's own layer: 0 gives the target's logits.

    The drafter's final state is norm(e + s f), where e is the embedding, which alone gives the target's logits, and f
    the output of its layer.
    """

    def __init__(self, target: PreTrainedModel, drafter: DraftModel) -> None:
        self._drafter = drafter.model
        self._originals = [weight.clone() for weight in branches(drafter.model)]
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(target.config.vocab_size, (1, 512), generator=generator).to(target.device)
        self._target_logits = target(self._ids).logits[0].float()

    @torch.no_grad()
    def set(self, acceptance: float, temperature: float) -> float:
        """Find the weight by bisection, and return the acceptance that it gives on random tokens."""
        low, high = SCALES
        for _ in range(20):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self._acceptance(middle, temperature) > acceptance else (low, middle)
        return self._acceptance(low, temperature)

    def _acceptance(self, scale: float, temperature: float) -> float:
        for weight, original in zip(branches(self._drafter), self._originals, strict=True):
            weight.copy_(original * scale)
        logits = self._drafter(self._ids).logits[0].float()
        if temperature == 0:
            return (logits.argmax(-1) == self._target_logits.argmax(-1)).float().mean().item()
        p, q = ((part / temperature).softmax(-1) for part in (self._target_logits, logits))
        return torch.minimum(p, q).sum(-1).mean().item()


# The sides.


@dataclass(frozen=True)
class Cell:
    """One comparison: a batch and its settings."""

    temperature: float
    batch: int
    context: int
    new_tokens: int
    gamma: int


@dataclass
class Run:
    """One decoded batch, without its prefill: the clock starts when `begin` is called."""

    device: torch.device
    forwards: list[float] = field(default_factory=list)
    """Seconds of the models' forward passes, where they are measured."""
    started: float = 0.0

    def begin(self) -> None:
        self.forwards.clear()
        self.started = now(self.device)


@dataclass
class Decoded:
    """Tokens and rounds after the prefill, and tau, the mean over the texts of tokens per round."""

    tokens: int
    rounds: int
    """Rounds until the last text of the batch has ended."""
    tau: float


Side = Callable[[list[list[int]], Cell, Run], Decoded]


def ours(decoder: SpeculativeDecoder) -> Side:
    def decode(prompts: list[list[int]], cell: Cell, run: Run) -> Decoded:
        def on_tokens(number: int, tokens: list[int], record: object) -> None:
            if record is None and number == cell.batch - 1:
                run.begin()

        settings = {"max_new_tokens": cell.new_tokens, "temperature": cell.temperature, "eos_token_id": None}
        outputs = decoder.generate_batch(prompts, on_tokens=on_tokens, **settings)
        tau = statistics.mean(output.acceptance_length for output in outputs)
        rounds = max(len(output.rounds) for output in outputs)
        return Decoded(sum(output.decode_tokens for output in outputs), rounds, tau)

    return decode


class _Steps(StoppingCriteria):
    """Begins a run after the first pass of transformers' `generate` and counts the calls after it: its rounds."""

    def __init__(self, run: Run) -> None:
        self.run, self.calls, self.length = run, -1, 0

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        if self.calls < 0:
            self.run.begin()
            self.length = input_ids.shape[1]  # assisted generation commits several tokens with the prefill
        self.calls += 1
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def theirs(target: PreTrainedModel, assistant: PreTrainedModel | None = None) -> Side:
    def decode(prompts: list[list[int]], cell: Cell, run: Run) -> Decoded:
        ids, steps = torch.tensor(prompts, device=target.device), _Steps(run)
        settings: dict[str, object] = {"do_sample": False}
        if cell.temperature:
            settings = {"do_sample": True, "temperature": cell.temperature, "top_k": 0}
        if assistant is not None:
            config = assistant.generation_config
            config.num_assistant_tokens, config.num_assistant_tokens_schedule = cell.gamma, "constant"
            config.assistant_confidence_threshold = 0.0
            settings["assistant_model"] = assistant
        out = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=cell.new_tokens,
            stopping_criteria=[steps],
            **settings,
        )
        tokens = out.shape[1] - steps.length
        return Decoded(tokens * cell.batch, steps.calls, tokens / steps.calls)

    return decode


def make_sides(options: argparse.Namespace, target: PreTrainedModel, drafter: DraftModel) -> dict[str, Side]:
    """Return all ways of decoding by name."""
    sides = {"generate": theirs(target), "assisted": theirs(target, drafter.model)}
    for compiled in (False, True) if options.compile else (False,):
        how = COMPILED if compiled else "eager"
        sides[f"alone, {how}"] = ours(SpeculativeDecoder(target, compile=compiled))
        plan = {"draft_length": options.gamma, "compile": compiled}
        sides[f"drafter, {how}"] = ours(SpeculativeDecoder(target, drafter, **plan))
    return sides


# Measuring.


@dataclass
class Figures:
    """Measurements of one side in a cell: one entry per counted run, and the share of one more run."""

    round_ms: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    tau: list[float] = field(default_factory=list)
    outside: float = math.nan


def measure(cell: Cell, sides: dict[str, Side], models: list[nn.Module], repeats: int) -> dict[str, Figures]:
    device = next(models[0].parameters()).device
    generator = torch.Generator().manual_seed(0)
    vocabulary = models[0].config.vocab_size
    prompts = torch.randint(vocabulary, (cell.batch, cell.context), generator=generator).tolist()
    figures = {name: Figures() for name in sides}
    names = list(sides)
    for number in range(repeats + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            torch.manual_seed(number)
            run = Run(device)
            decoded = sides[name](prompts, cell, run)
            seconds = now(device) - run.started
            if number > 0:
                figures[name].round_ms.append(1e3 * seconds / decoded.rounds)
                figures[name].speeds.append(decoded.tokens / seconds)
                figures[name].tau.append(decoded.tau)
    with timed_forwards(*models) as forwards:
        for name, side in sides.items():
            if name.endswith(COMPILED):  # a pass that is timed in Python cannot be compiled
                continue
            run = Run(device, forwards)
            side(prompts, cell, run)
            figures[name].outside = 1 - sum(forwards) / (now(device) - run.started)
    return figures


def report(cell: Cell, figures: dict[str, Figures], acceptance: float) -> dict[str, object]:
    """Print the figures of a cell, and return them."""
    expected = (1 - acceptance ** (cell.gamma + 1)) / (1 - acceptance)
    print(
        f"\nT={cell.temperature:g}, batch {cell.batch}, context {cell.context}, {cell.new_tokens} new tokens, "
        f"acceptance {acceptance:.3f} on random tokens, expected tau {expected:.2f}"
    )
    print(f"{'':18s} ms/round    tau  tokens/s  x generate  outside")
    base = figures["generate"]
    for name, side in figures.items():
        ratio = statistics.median(a / b for a, b in zip(side.speeds, base.speeds, strict=True))
        columns = f"{statistics.median(side.round_ms):8.2f} {statistics.mean(side.tau):6.2f}"
        print(
            f"{name:18s} {columns} {statistics.median(side.speeds):9.1f} {ratio:11.2f} {side.outside:8.1%}", flush=True
        )
    sides = {name: asdict(side) for name, side in figures.items()}
    return {**asdict(cell), "acceptance": acceptance, "expected_tau": expected, "sides": sides}


def decode(options: argparse.Namespace, device: torch.device, until: float) -> Iterator[dict[str, object]]:
    """Measure all cells that begin before the time `until`; one that fails yields its error."""
    target = make_target(options.shape, device)
    drafter = make_drafter(options.shape, target)
    blend = Blend(target, drafter)
    sides = make_sides(options, target, drafter)
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in (target, drafter)]
    print(f"{options.shape}: {sizes[0]:,} parameters, drafter {sizes[1]:,} with the target's embeddings and lm_head")
    settings = itertools.product(options.batches, options.contexts, options.temperatures)
    for batch, context, temperature in sorted(settings, key=lambda of_cell: of_cell[0] * of_cell[1]):
        what = f"T={temperature:g}, batch {batch}, context {context}"
        if time.perf_counter() > until:
            print(f"\n{what}: not measured, {options.minutes:g} minutes have passed")
            continue
        cell = Cell(temperature, batch, context, options.max_new_tokens, options.gamma)
        # transformers' assisted generation decodes one text.
        usable = {name: side for name, side in sides.items() if batch == 1 or name != "assisted"}
        try:
            acceptance = blend.set(options.acceptance, temperature)
            figures = measure(cell, usable, [target, drafter.model], options.repeats)
        except Exception as error:  # of any kind: the time on a large GPU is scarce, and other cells may work
            reason = failure(error)
            print(f"\n{what}: {reason}", flush=True)
            yield {**asdict(cell), "error": reason}
        else:
            yield report(cell, figures, acceptance)


def main() -> None:
    options = arguments()
    started = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = environment()
    print(f"{where['accelerator'] or where['cpu']}, torch {torch.__version__}, transformers {transformers.__version__}")
    found: dict[str, list[dict[str, object]]] = {"training": [], "decoding": []}

    def keep(what: str, row: dict[str, object]) -> None:
        """Write each figure when it is known: the run may be ended before its last one."""
        found[what].append(row)
        if options.json is not None:
            write_json(options.json, {"environment": where, **found})

    if options.lengths:
        target = random_model(options.shape, device)
        half = started + 30 * options.minutes
        for row in train_rows(target, options.lengths, compiled=options.compile, steps=options.steps, until=half):
            keep("training", row)
        print(f"\n{table(found['training'])}\n", flush=True)
        del target
        gc.collect()
    for cell in decode(options, device, started + 60 * options.minutes):
        keep("decoding", cell)
    if any("error" in row for rows in found.values() for row in rows):
        raise SystemExit("some figures are missing: see the errors above")


if __name__ == "__main__":
    main()
