"""Compare the decoder with transformers: the target alone, speculative decoding, prompt lookup, long contexts.

    python benchmarks/decoder.py --drafter DRAFT_MODEL                # the embedded target and a draft model for it
    python benchmarks/decoder.py --pair 134m                          # random weights in the shapes of SmolLM2-135M
    python benchmarks/decoder.py --pair tiny                          # random weights, 0.94 million parameters
    python benchmarks/decoder.py --drafter DRAFT_MODEL --compile       # compiled passes of both sides, too
    python benchmarks/decoder.py --drafter DRAFT_MODEL --heads MTP     # a drafter that transformers does not run, too
    python benchmarks/decoder.py --pair 134m --contexts 128 512 2048  # milliseconds a token by context length

All variants decode the same prompts, interleaved in one process; medians over prompts are printed with their ratios.
The first prompt is a warm-up and is not counted. `overhead` is 1 - (seconds inside the models' forward passes) / (all
seconds); it is not measured with `--compile`. With `--cpu-time`, seconds are those of the processor, which on one
thread depend less on other processes of the machine.
"""

import argparse
import copy
import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

from draftsmith import SpeculativeDecoder, load_drafter
from draftsmith.decode.profiling import measure_costs
from draftsmith.distill.load_target import load_target
from draftsmith.eval.prompts import load_prompts
from draftsmith.heads import DraftModel
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_model import first_layers
from draftsmith.heads.retrieval import Hybrid, PromptLookup
from draftsmith.provenance import environment

COMPILED = "compiled"
LOOKUP_TOKENS = 10
SMOL = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOL |= {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 4096}
SMOL |= {"tie_word_embeddings": True, "initializer_range": 0.05}
TINY = {"vocab_size": 65, "hidden_size": 128, "intermediate_size": 432, "num_hidden_layers": 4}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512, "initializer_range": 0.2}


@dataclass(frozen=True)
class RandomPair:
    """A target with random weights, of which the draft model is the first layers."""

    sizes: dict[str, object]
    layers: int
    """Layers of the draft model."""
    later_layers: float
    """Scale of the layers that the draft model lacks, so that the first ones agree with the target as after training:
    tau at gamma 4 is about 3 for `134m`, and 3.4 at temperature 1 for `tiny`."""

    def models(self) -> tuple[LlamaForCausalLM, DraftModel]:
        """Return the target and its draft model."""
        torch.manual_seed(0)
        target = LlamaForCausalLM(LlamaConfig(**self.sizes, bos_token_id=None, eos_token_id=None)).eval()
        with torch.no_grad():
            for layer in target.model.layers[self.layers :]:
                layer.self_attn.o_proj.weight *= self.later_layers
                layer.mlp.down_proj.weight *= self.later_layers
        return target, DraftModel(first_layers(target, self.layers))


PAIRS = {"134m": RandomPair(SMOL, 3, 0.05), "tiny": RandomPair(TINY, 1, 0.2)}


@dataclass
class Variant:
    """A way of decoding with its measurements, one per prompt."""

    run: Callable[[list[int]], int]
    speeds: list[float] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pair", choices=("trained", *PAIRS), default="trained", help="all but trained: random weights, built here"
    )
    parser.add_argument("--target", default="embedded", help="'embedded', a local folder or a Hub id")
    parser.add_argument("--dtype", default="float32", help="of the target")
    parser.add_argument("--drafter", help="a draft model: a local folder or a Hub id")
    parser.add_argument("--heads", help="also a drafter of another type for the same target, with draftsmith alone")
    parser.add_argument("--prompt-set", default="embedded", help="'embedded' or a JSONL file")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--gamma", type=int, default=4, help="draft length of the comparison with assisted generation")
    parser.add_argument(
        "--gammas",
        type=int,
        nargs="*",
        default=[3, 6, 10],
        help="further draft lengths, of which the fastest is reported",
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--contexts", type=int, nargs="*", help="measure milliseconds a token at these lengths instead")
    parser.add_argument("--compile", action="store_true", help="measure both sides with compiled passes, too")
    parser.add_argument("--cpu-time", action="store_true", help="processor seconds instead of wall-clock seconds")
    return parser.parse_args()


def clock_of(options: argparse.Namespace) -> Callable[[], float]:
    """Return the clock that the options ask for."""
    return time.process_time if options.cpu_time else time.perf_counter


@dataclass
class Loaded:
    """The models and prompts of a comparison."""

    target: nn.Module
    drafter: DraftModel
    heads: Drafter | None
    """A drafter that only draftsmith runs."""
    prompts: list[list[int]]
    learn: list[list[int]]
    """Prompts to calibrate policies with."""


def load(options: argparse.Namespace) -> Loaded:
    """Build or load the models and prompts that the options name."""
    if options.pair in PAIRS:
        target, drafter = PAIRS[options.pair].models()
        most = min(4000, target.config.vocab_size)
        ids = torch.randint(most // 40, most, (options.prompts + 3, 64)).tolist()
        return Loaded(target, drafter, None, ids[2:], ids[:2])
    if options.drafter is None:
        raise SystemExit(
            "--drafter is missing; expected a draft model's folder or Hub id (or --pair 134m, --pair tiny)"
        )
    loaded = load_target(options.target, dtype=options.dtype)
    drafter = load_drafter(options.drafter, loaded.model, loaded.tokenizer)
    if not isinstance(drafter, DraftModel):
        raise SystemExit(f"--drafter {options.drafter} is of type {drafter.type}; expected a draft model")
    rows = load_prompts(options.prompt_set, loaded.tokenizer, count=options.prompts + 5)
    ids = [row.input_ids for row in rows]
    heads = None if options.heads is None else load_drafter(options.heads, loaded.model, loaded.tokenizer)
    return Loaded(loaded.model, drafter, heads, ids[: options.prompts + 1], ids[options.prompts + 1 :])


def make_variants(options: argparse.Namespace, loaded: Loaded) -> dict[str, Variant]:
    sampling, target, drafter = {"temperature": options.temperature}, loaded.target, loaded.drafter
    count = options.max_new_tokens
    modes = (False, True) if options.compile else (False,)
    drafters = {"": drafter} if loaded.heads is None else {"": drafter, f"{loaded.heads.type}, ": loaded.heads}
    costs = {(name, mode): measure_costs(target, one, compile=mode) for name, one in drafters.items() for mode in modes}

    def ours(drafter: object = None, compile: bool = False, name: str = "", **plan: object) -> Variant:
        paid = None if drafter is None else costs[name, compile]
        decoder = SpeculativeDecoder(target, drafter, costs=paid, compile=compile, **plan)
        if plan.get("policy"):
            decoder.calibrate(loaded.learn, max_new_tokens=count, **sampling)
        return Variant(
            lambda ids: len(decoder.generate(ids, max_new_tokens=count, eos_token_id=None, **sampling).tokens)
        )

    def theirs(gamma: int | None = None, model: nn.Module = target, **settings: object) -> Variant:
        def run(prompt: list[int]) -> int:
            if gamma is not None:
                config = settings["assistant_model"].generation_config
                config.num_assistant_tokens = gamma
                config.num_assistant_tokens_schedule = "constant"
                config.assistant_confidence_threshold = 0.0
            ids = torch.tensor([prompt], device=target.device)
            sample = {"do_sample": True, "top_k": 0} | sampling if options.temperature else {"do_sample": False}
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, eos_token_id=None, **sample, **settings
            )
            return out.shape[1] - len(prompt)

        return Variant(run)

    gammas = sorted({options.gamma, *options.gammas})
    variants = {}
    for compile in modes:
        end = f", {COMPILED}" if compile else ""
        model, assistant = (compiled(m) if compile else m for m in (target, drafter.model))
        static = {"cache_implementation": "static", "compile_config": compile_config()} if compile else {}
        variants[f"transformers: generate{end}"] = theirs(**static)
        for gamma in gammas:
            variants[f"transformers: assisted, gamma {gamma}{end}"] = theirs(gamma, model, assistant_model=assistant)
        variants[f"transformers: prompt lookup{end}"] = theirs(model=model, prompt_lookup_num_tokens=LOOKUP_TOKENS)
        variants[f"draftsmith: target alone{end}"] = ours(compile=compile)
        for name, one in drafters.items():
            for gamma in gammas:
                variants[f"draftsmith: {name}gamma {gamma}{end}"] = ours(one, compile, name, draft_length=gamma)
            for policy in ("adaptive",):
                variants[f"draftsmith: {name}{policy}{end}"] = ours(one, compile, name, policy=policy)
            hybrid = ours(Hybrid(one), compile, name, policy="adaptive")
            variants[f"draftsmith: {name}hybrid, adaptive{end}"] = hybrid
        variants[f"draftsmith: prompt lookup{end}"] = ours(PromptLookup(draft_length=LOOKUP_TOKENS), compile)
    return variants


def compiled(model: nn.Module) -> nn.Module:
    """Return a copy whose forward pass is compiled for inputs of any length, which transformers leaves to its users."""
    torch._dynamo.config.recompile_limit = 256  # all variants together, rather than uncompiled passes after eight
    copied = copy.deepcopy(model)
    copied.forward = torch.compile(copied.forward, dynamic=True)
    return copied


def compile_config() -> CompileConfig:
    """Return transformers' settings of compiled generation, for which it needs a static cache; by default not on a CPU.

    Assisted generation and prompt lookup refuse a static cache.
    """
    config = CompileConfig(mode="reduce-overhead" if torch.cuda.is_available() else "default")
    config._compile_all_devices = True
    return config


@contextmanager
def timed_forwards(*models: nn.Module, clock: Callable[[], float] = time.perf_counter) -> Iterator[list[float]]:
    """Yield a list to which the seconds of every forward pass of `models` are appended."""
    seconds: list[float] = []
    originals = [model.forward for model in models]

    def timed(original: Callable) -> Callable:
        def forward(*args: object, **kwargs: object) -> object:
            started = clock()
            output = original(*args, **kwargs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(clock() - started)
            return output

        # transformers and this decoder read the signature to learn which arguments a model accepts.
        forward.__signature__ = inspect.signature(original)
        return forward

    for model, original in zip(models, originals, strict=True):
        model.forward = timed(original)
    try:
        yield seconds
    finally:
        for model in models:
            del model.forward


def compare(options: argparse.Namespace) -> None:
    loaded = load(options)
    variants, prompts = make_variants(options, loaded), loaded.prompts
    names, clock = list(variants), clock_of(options)
    for name in names:
        if name.endswith(COMPILED):
            for prompt in prompts:  # graphs are built for each size of the cache
                variants[name].run(prompt)
    # A graph of a timed pass would hold the clock.
    body = getattr(loaded.heads, "body", None)  # the model of MTP modules and EAGLE heads; others count as overhead
    models = [loaded.target, loaded.drafter.model, *([] if body is None else [body])]
    timing = nullcontext([]) if options.compile else timed_forwards(*models, clock=clock)
    with timing as forwards:
        for number, prompt in enumerate(prompts):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                forwards.clear()
                torch.manual_seed(number)
                started = clock()
                tokens = variants[name].run(prompt)
                seconds = clock() - started
                if number > 0:
                    variants[name].speeds.append(tokens / seconds)
                    if not options.compile:
                        variants[name].overheads.append(1 - sum(forwards) / seconds)
    report(variants, options.gamma)


def report(variants: dict[str, Variant], gamma: int) -> None:
    base = variants["transformers: generate"].speed
    print(f"{'':34s} tokens/s  x generate  overhead   (prefill included)")
    for name, variant in variants.items():
        overhead = f"{statistics.median(variant.overheads):.1%}" if variant.overheads else "-"
        print(f"{name:34s} {variant.speed:8.1f} {variant.speed / base:10.2f} {overhead:>9s}")

    def ratio(ours: str, theirs: str) -> float:
        """Return the median over prompts of the ratio of speeds on the same prompt."""
        return statistics.median(a / b for a, b in zip(variants[ours].speeds, variants[theirs].speeds, strict=True))

    best = {
        side: max((n for n in variants if n.startswith(side)), key=lambda n: variants[n].speed)
        for side in ("draftsmith", "transformers")
    }
    end = f", {COMPILED}"
    assisted = f"transformers: assisted, gamma {gamma}"
    pairs = {
        "target alone": ("draftsmith: target alone", "transformers: generate"),
        f"gamma {gamma}": (f"draftsmith: gamma {gamma}", assisted),
        "prompt lookup": ("draftsmith: prompt lookup", "transformers: prompt lookup"),
        "compiled, alone": (f"draftsmith: target alone{end}", f"transformers: generate{end}"),
        f"compiled, gamma {gamma}": (f"draftsmith: gamma {gamma}{end}", assisted + end),
        f"compiled / not, {gamma}": (f"draftsmith: gamma {gamma}{end}", assisted),
        "best against best": (best["draftsmith"], best["transformers"]),
    }
    pairs = {label: pair for label, pair in pairs.items() if {*pair} <= variants.keys()}
    print("\ndraftsmith / transformers, median over prompts")
    for label, (ours, theirs) in pairs.items():
        print(f"{label:20s} {ratio(ours, theirs):5.2f}   ({ours} / {theirs})")


def contexts(options: argparse.Namespace) -> None:
    """Print milliseconds a token of the target alone after contexts of several lengths, and of attention by itself."""
    target = load(options).target
    decoder, config = SpeculativeDecoder(target), target.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    print("context  draftsmith ms/token  generate ms/token  attention alone ms  draftsmith without attention")
    for length in options.contexts:
        prompt = torch.randint(100, 1000, (length,)).tolist()
        ours, theirs, attention = [], [], []
        q = torch.randn(1, config.num_attention_heads, 1, head)
        k = torch.randn(1, config.num_attention_heads, length, head)
        for _ in range(5):
            out = decoder.generate(prompt, max_new_tokens=24, eos_token_id=None)
            ours.append(out.decode_seconds / out.decode_tokens)
            theirs.append(_generate_seconds(target, prompt, 24))
            started = time.perf_counter()
            for _ in range(config.num_hidden_layers):
                scaled_dot_product_attention(q, k, k)
            attention.append(time.perf_counter() - started)
        a, b, c = (1e3 * statistics.median(values) for values in (ours, theirs, attention))
        print(f"{length:7d} {a:20.2f} {b:18.2f} {c:19.2f} {a - c:29.2f}")


def _generate_seconds(target: nn.Module, prompt: list[int], count: int) -> float:
    """Return seconds a token of `generate` without its prefill: the difference of a long and a short call."""
    seconds = []
    for tokens in (count, 1):
        ids = torch.tensor([prompt], device=target.device)
        started = time.perf_counter()
        target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=None
        )
        seconds.append(time.perf_counter() - started)
    return (seconds[0] - seconds[1]) / (count - 1)


def main() -> None:
    options = arguments()
    contexts(options) if options.contexts else compare(options)
    where = environment()
    print(f"{where['cpu']}, {where['torch_threads']} threads, accelerator: {where['accelerator']}")


if __name__ == "__main__":
    main()
