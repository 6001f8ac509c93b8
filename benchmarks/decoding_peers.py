"""Compare the decoder with other packages that decode speculatively, on the same target, drafter and prompts.

    pip install --no-deps flashspec==0.3.1 dflash==0.1.0 economize==0.3.2
    python benchmarks/decoding_peers.py --drafter DRAFT_MODEL                  # transformers' and flashspec's loops
    python benchmarks/decoding_peers.py --drafter DFLASH                       # the loop of DFlash's authors
    python benchmarks/decoding_peers.py --drafter EAGLE3                       # economize's loop
    python benchmarks/decoding_peers.py --drafter DRAFT_MODEL --temperature 1
    python benchmarks/decoding_peers.py --drafter DRAFT_MODEL --target SMOLLM2 --dtype bfloat16

All sides decode each prompt after one another, in an order that changes, on one thread. Processor seconds: they depend
less than others on what else runs. The first prompt is a warm-up. A ratio is the median over prompts and repeats of the
peer's seconds / ours, with a 95 % interval that resamples them. Greedy texts are compared: in float32 they must be the
target's own; in bfloat16 near ties are rounded differently.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config

from draftsmith import SpeculativeDecoder, load_drafter
from draftsmith.decode.profiling import measure_costs
from draftsmith.distill.load_target import load_target
from draftsmith.eval.prompts import load_prompts
from draftsmith.heads import DFlash, DraftModel, Eagle3
from draftsmith.heads.base import Drafter, TrainableDrafter
from draftsmith.heads.retrieval import Hybrid
from draftsmith.hub.export import export_drafter
from draftsmith.provenance import environment

Decode = Callable[[list[int], int], list[int]]
"""Maps a prompt and a seed to the new tokens."""
LEARNED = 4
"""Prompts that an adaptive policy is calibrated with."""


@dataclass
class Side:
    """A way of decoding with its measurements, one per prompt and repeat."""

    decode: Decode
    peer_of: str | None = None
    """The side of ours that it is compared with; None for our own."""
    seconds: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", required=True, help="a draft model, DFlash or EAGLE-3: a local folder or a Hub id")
    parser.add_argument("--target", default="embedded", help="'embedded', a local folder or a Hub id")
    parser.add_argument("--dtype", default="float32", help="of the target")
    parser.add_argument("--prompt-set", default="embedded", help="'embedded' or a JSONL file")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--gamma", type=int, default=4, help="draft length; DFlash drafts its whole block")
    parser.add_argument("--temperature", type=float, default=0.0)
    return parser.parse_args()


def ours(
    options: argparse.Namespace, target: PreTrainedModel, drafter: Drafter, learn: Sequence[list[int]] = (), **plan: Any
) -> Decode:
    """Return our decoder with this plan, after it has learnt from some prompts."""
    decoder = SpeculativeDecoder(target, drafter, **plan)
    settings = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature}
    if learn:
        decoder.calibrate(learn, **settings)

    def decode(prompt: list[int], seed: int) -> list[int]:
        return decoder.generate(prompt, eos_token_id=None, seed=seed, **settings).tokens

    return decode


def sides_of_draft_model(
    options: argparse.Namespace, target: PreTrainedModel, drafter: DraftModel, learn: list[list[int]]
) -> dict[str, Side]:
    from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import HuggingFaceDrafter, TargetModel

    gamma, count, temperature = options.gamma, options.max_new_tokens, options.temperature

    def assisted(prompt: list[int], _: int) -> list[int]:
        config = drafter.model.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = gamma, "constant"
        config.assistant_confidence_threshold = 0.0
        ids = torch.tensor([prompt])
        sample = {"do_sample": True, "top_k": 0, "temperature": temperature} if temperature else {"do_sample": False}
        settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": count, "eos_token_id": None}
        return target.generate(ids, assistant_model=drafter.model, **settings, **sample)[0, len(prompt) :].tolist()

    def flashspec(**strategy: Any) -> Decode:
        device = torch.device("cpu")
        own = HuggingFaceDrafter("drafter", device, drafter.model.dtype, model=drafter.model)
        own.set_temperature(temperature)
        sampling = SamplingConfig(temperature=temperature, gamma=gamma)
        config = FlashSpecConfig(device="cpu", sampling=sampling, **strategy)
        engine = SpeculativeEngine(config, [own], TargetModel("target", device, target.dtype, model=target))

        def decode(prompt: list[int], _: int) -> list[int]:
            made = engine.generate(torch.tensor([prompt]), max_new_tokens=count)
            return made.output_ids[0, : made.n_tokens_generated].tolist()

        return decode

    fixed, hybrid = f"gamma {gamma}", "hybrid, adaptive"
    adaptive = {"policy": "adaptive", "costs": measure_costs(target, drafter)}
    return {
        fixed: Side(ours(options, target, drafter, draft_length=gamma)),
        hybrid: Side(ours(options, target, Hybrid(drafter), learn, **adaptive)),
        "transformers, assisted": Side(assisted, fixed),
        "flashspec": Side(flashspec(drafter_strategy="bandit", bandit=BanditConfig(n_arms=1)), fixed),
        "flashspec, its default": Side(flashspec(), hybrid),
    }


def sides_of_dflash(options: argparse.Namespace, target: PreTrainedModel, drafter: DFlash) -> dict[str, Side]:
    from dflash import model as package

    if drafter.transitions is not None or drafter.body.vocabulary is not None:
        raise SystemExit("--drafter: expected DFlash with the target's lm_head and without transitions")
    body = drafter.body.config
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "rope_parameters")
    config = Qwen3Config(**{name: getattr(body, name) for name in names})
    config.num_target_layers = target.config.num_hidden_layers
    layers = [layer - 1 for layer in drafter.needs.layers]
    embeddings_VH, mask_token = target.get_input_embeddings().weight.detach(), drafter.mask_token
    if mask_token is None:  # a trained mask is a token of its own
        mask_token = len(embeddings_VH)
        table_VH = torch.cat([embeddings_VH, drafter.body.mask_embedding.detach()[None]])
        package._raw_input_embeddings = lambda _, ids, scale=1.0: torch.nn.functional.embedding(ids, table_VH) * scale
    block = {"block_size": drafter.block_size, "mask_token_id": mask_token}
    config.dflash_config = {"target_layer_ids": layers, **block}
    peer = package.DFlashDraftModel(config).to(drafter.body.dtype).eval()
    own = {name: value for name, value in drafter.body.state_dict().items() if name in peer.state_dict()}
    peer.load_state_dict(own)

    def authors(prompt: list[int], _: int) -> list[int]:
        settings = {"max_new_tokens": options.max_new_tokens, "stop_token_ids": None}
        made = package.dflash_generate(
            peer, target, torch.tensor([prompt]), temperature=options.temperature, **settings
        )
        return made[0, len(prompt) :].tolist()

    length = drafter.block_size - 1
    return {
        "DFlash": Side(ours(options, target, drafter, draft_length=length)),
        "the dflash package": Side(authors, "DFlash"),
    }


def sides_of_eagle3(options: argparse.Namespace, target: PreTrainedModel, drafter: Eagle3) -> dict[str, Side]:
    from economize import DecodeConfig
    from economize.core.serialization import attach, read_checkpoint
    from economize.decoding import TopPSampler

    with tempfile.TemporaryDirectory() as folder:
        export_drafter(drafter, target, "vllm", Path(folder) / "exported", target_name=options.target)
        checkpoint = read_checkpoint(Path(folder) / "exported")
    (config,) = checkpoint.configs
    checkpoint = replace(checkpoint, configs=[replace(config, param_dtype="model")])  # as ours, not in float32
    model = attach(target, checkpoint, check_teacher=False)
    verifier = "rejection" if options.temperature else "greedy"
    decoding = DecodeConfig(cycle_length=options.gamma + 1, verifier=verifier)

    def economize(prompt: list[int], seed: int) -> list[int]:
        selector = TopPSampler(temperature=options.temperature, top_p=1.0, seed=seed) if options.temperature else None
        settings = {"decoding": decoding, "selector": selector}
        return list(model.decode(torch.tensor(prompt), options.max_new_tokens, **settings).tokens)

    return {
        "EAGLE-3": Side(ours(options, target, drafter, draft_length=options.gamma)),
        "economize": Side(economize, "EAGLE-3"),
    }


def sides_of(
    options: argparse.Namespace, target: PreTrainedModel, drafter: TrainableDrafter, learn: list[list[int]]
) -> dict[str, Side]:
    if isinstance(drafter, DraftModel):
        return sides_of_draft_model(options, target, drafter, learn)
    if isinstance(drafter, DFlash):
        return sides_of_dflash(options, target, drafter)
    if isinstance(drafter, Eagle3):
        return sides_of_eagle3(options, target, drafter)
    raise SystemExit(f"--drafter is of type {drafter.type}; expected draft_model, dflash or eagle3")


def measure(sides: dict[str, Side], prompts: list[list[int]], repeats: int) -> None:
    """Decode all prompts with all sides; the first prompt is not counted."""
    names = list(sides)
    for number, prompt in enumerate(prompts + prompts[1:] * (repeats - 1)):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            torch.manual_seed(number)
            started = time.process_time()
            tokens = sides[name].decode(prompt, number)
            seconds = time.process_time() - started
            if number > 0:
                sides[name].seconds.append(seconds / len(tokens))
                sides[name].texts.append(tokens)


def report(sides: dict[str, Side], *, greedy: bool) -> int:
    """Print the ratios and return the number of greedy texts that differ."""
    differ, draw = 0, random.Random(0)
    for name, side in sides.items():
        print(f"{name:24s} {1000 * statistics.median(side.seconds):8.2f} ms of processor time a token")
    for name, side in sides.items():
        if side.peer_of is None:
            continue
        own = sides[side.peer_of]
        ratios = [theirs / ours for theirs, ours in zip(side.seconds, own.seconds, strict=True)]
        again = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
        same = sum(a == b for a, b in zip(side.texts, own.texts, strict=True))
        differ += len(ratios) - same
        equal = f"; {same} of {len(ratios)} texts are the same" if greedy else ""
        interval = f"[{again[50]:.2f}, {again[1949]:.2f}]"
        print(f"{side.peer_of} / {name}: {statistics.median(ratios):.3f} {interval}{equal}")
    return differ if greedy else 0


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    loaded = load_target(options.target, dtype=options.dtype)
    drafter = load_drafter(options.drafter, loaded.model, loaded.tokenizer)
    rows = load_prompts(options.prompt_set, loaded.tokenizer, count=options.prompts + 1 + LEARNED)
    prompts = [row.input_ids for row in rows]
    sides = sides_of(options, loaded.model, drafter, prompts[:LEARNED])
    measure(sides, prompts[LEARNED:], options.repeats)
    print(f"{environment()['cpu']}, one thread, T={options.temperature:g}, {options.target} in {options.dtype}")
    if report(sides, greedy=options.temperature == 0) and options.dtype == "float32":
        raise SystemExit("greedy texts differ")


if __name__ == "__main__":
    main()
