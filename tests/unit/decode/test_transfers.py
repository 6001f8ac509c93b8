"""Reads of the device by the host and uploads to it in each decoding round, and the counter of both."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import make_llama, mostly_slow
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transfers import Reads, counted_reads
from transformers import LlamaForCausalLM, RepetitionPenaltyLogitsProcessor

from draftsmith import SpeculativeDecoder
from draftsmith.decode.costs import Costs
from draftsmith.decode.policies import policy_named
from draftsmith.heads import HEADS, DraftModel
from draftsmith.heads.base import Drafter
from draftsmith.heads.retrieval import Hybrid, SuffixRetrieval
from draftsmith.heads.rows import constant

IDS = torch.tensor([[5, 9, 33, 2]])

READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "if": lambda x: 1 if x.any() else 0,
    "tolist": lambda x: x.tolist(),
    "to cpu": lambda x: x.to("cpu").sum().item(),
    "equal": lambda x: torch.equal(x, x + 1),
    "mask": lambda x: x[x > 0],
    "assignment of a tensor by mask": lambda x: x.clone().__setitem__(x > 0, x[:1]),
    "repeat_interleave": lambda x: x.repeat_interleave(x.abs().long()),
    "copy to the host": lambda x: torch.zeros(4).copy_(x),
    "what was uploaded": lambda x: torch.tensor([3, 4], device=x.device).cumsum(0).tolist(),
}
NO_READS: dict[str, Callable[[Tensor], object]] = {
    "upload": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
    "host arithmetic": lambda x: torch.tensor([1, 2]).cumsum(0).tolist(),
    "assignment of a number by mask": lambda x: x.clone().__setitem__(x > 0, 0.0),
    "where with values": lambda x: torch.where(x > 0, x, 0.0),
    "shape": lambda x: len(x) + x.shape[0] + x.numel(),
}


UPLOADS: dict[str, Callable[[Tensor], object]] = {
    "list": lambda x: torch.tensor([1, 2], device=x.device),
    "to": lambda x: torch.tensor([1, 2]).to(x.device),
    "index by a list": lambda x: x[[0, 2]],
    "assignment by a list": lambda x: x.clone().__setitem__([0, 2], 0.0),
}
NO_UPLOADS: dict[str, Callable[[Tensor], object]] = {
    "made on the device": lambda x: torch.arange(4, device=x.device) + torch.full((4,), 2, device=x.device),
    "index by numbers": lambda x: (x[2], x[1:3], x.reshape(2, 2)[:, 0]),
    "host": lambda x: torch.tensor([1, 2])[[1, 0]],
}


def read_by(operation: Callable[[Tensor], object]) -> Reads:
    model = make_llama()
    with torch.inference_mode(), counted_reads(model) as reads:
        operation(model(IDS).logits[0, -1, :4])
    return reads


@pytest.mark.parametrize("name", READS)
def test_each_kind_of_read_counts_once(name: str) -> None:
    reads = read_by(READS[name])
    assert len(reads) == 1, str(reads)
    assert "test_transfers.py:" in reads[0].place


@pytest.mark.parametrize("name", NO_READS)
def test_uploads_and_operations_of_known_size_are_no_reads(name: str) -> None:
    reads = read_by(NO_READS[name])
    assert not reads, str(reads)


@pytest.mark.parametrize("name", [*UPLOADS, *NO_UPLOADS])
def test_each_kind_of_upload_counts_once(name: str) -> None:
    reads = read_by({**UPLOADS, **NO_UPLOADS}[name])
    assert len(reads.uploads) == (name in UPLOADS), str(reads)


def test_reads_inside_forward_passes_do_not_count() -> None:
    model = make_llama()
    read = model.lm_head.register_forward_hook(lambda module, inputs, output: print(output.sum().item()))
    with counted_reads(model) as reads:
        logits = model(IDS).logits
        assert not reads
        logits.sum().item()
    assert len(reads) == 1
    read.remove()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_read_names_the_line_of_draftsmith() -> None:
    model = make_llama()
    decoder = SpeculativeDecoder(model)
    expected = decoder.generate(IDS, max_new_tokens=6).tokens
    with counted_reads(model) as reads:
        assert decoder.generate(IDS, max_new_tokens=6).tokens == expected
    assert reads
    assert all(read.place.startswith(("decode/", "heads/")) for read in reads)
    assert f"{reads.count(reads[0]):5d} {reads[0].operation}" in str(reads)


# Reads of a round.

COSTS = Costs({1: 1.0, 8: 1.4, 32: 2.0}, {1: 0.1, 8: 0.12})
HEAD_OPTIONS: dict[str, dict[str, Any]] = {"medusa": {"num_heads": 4}, "eagle": {}}
HEAD_OPTIONS |= {"dflash": {"block_size": 5, "markov_rank": 3, "markov_type": "rnn"}}


def drafter_for(name: str | None, target: LlamaForCausalLM) -> Drafter | None:
    if name is None:
        return None
    if name == "retrieval":
        return SuffixRetrieval(draft_length=6, min_match=1, factor=6.0)
    if name == "hybrid":
        drafter = drafter_for("draft_model", target)
        return Hybrid(drafter, min_match=1)
    if name == "draft_model":
        drafter = DraftModel(make_llama())  # the target with noise: some of its tokens are accepted
    else:
        drafter = HEADS[name].from_target(target, **HEAD_OPTIONS[name]).eval()
    torch.manual_seed(1)
    for parameter in drafter.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return drafter


def reads_per_round(
    drafter: str | None, policy: str | None, batch: int, rule: str | None, **settings: Any
) -> tuple[int, int, Reads]:
    """Return the number of rounds of a batch, of the drafter's passes in them, and their reads."""
    target = make_llama()
    made = drafter_for(drafter, target)
    chosen = None if policy is None else policy_named(policy, COSTS)
    decoder = SpeculativeDecoder(target, made, policy=chosen, rule=rule)
    network = made.drafter if isinstance(made, Hybrid) else made
    own = [getattr(network, name, None) for name in ("model", "body")]
    models = [target, *(model for model in own if model is not None)]
    prompts = [[5 + row, 9, 33, *[2] * (row % 3)] for row in range(batch)]
    prefilled = uploaded = passes = 0

    def note(text: int, tokens: list[int], record: object) -> None:
        nonlocal prefilled, uploaded
        if record is None:
            prefilled, uploaded = len(reads), len(reads.uploads)

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    if isinstance(made, DraftModel):
        made.model.register_forward_hook(count)

    with counted_reads(*models) as reads:
        outputs = decoder.generate_batch(
            prompts, max_new_tokens=12, eos_token_id=None, seeds=3, on_tokens=note, **settings
        )
    rounds = max(len(output.rounds) for output in outputs)
    assert rounds > 2
    of_rounds = Reads(reads[prefilled:], reads.uploads[uploaded:])
    drafted = sum(record.drafted for output in outputs for record in output.rounds)
    assert made is None or drafted >= rounds / 2
    return rounds, passes, of_rounds


CHAIN = "chain:draft_length=4"
TREE = "best-first:size=9,depth=3"
SAMPLED: dict[str, Any] = {"temperature": 1.0}
PENALTY: dict[str, Any] = {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.3)]}
CASES: dict[str, tuple[str | None, str | None, str | None, dict[str, Any]]] = {
    "target alone, greedy": (None, None, None, {}),
    "target alone, sampled": (None, None, None, SAMPLED),
    "target alone, greedy, penalty": (None, None, None, PENALTY),
    "chain, greedy": ("draft_model", CHAIN, None, {}),
    "chain, token": ("draft_model", CHAIN, "token", SAMPLED),
    "chain, block": ("draft_model", CHAIN, "block", SAMPLED),
    "chain, point-mass": ("draft_model", CHAIN, "point-mass", SAMPLED),
    "chain, typical": ("draft_model", CHAIN, "typical", SAMPLED),
    "chain, top-p": ("draft_model", CHAIN, None, SAMPLED | {"top_p": 0.9}),
    "chain, greedy, penalty": ("draft_model", CHAIN, None, PENALTY),
    "chain, sampled, penalty": ("draft_model", CHAIN, None, SAMPLED | PENALTY),
    "medusa, greedy": ("medusa", CHAIN, None, {}),
    "medusa, sampled": ("medusa", CHAIN, None, SAMPLED),
    "eagle, greedy": ("eagle", CHAIN, None, {}),
    "eagle, sampled": ("eagle", CHAIN, None, SAMPLED),
    "block with a recurrent bias, sampled": ("dflash", CHAIN, None, SAMPLED),
    "retrieved, greedy": ("retrieval", None, None, {}),
    "retrieved, sampled": ("retrieval", None, None, SAMPLED),
}
"""By name: drafter, policy, rule, settings of `generate_batch`."""


MOST_UPLOADS = 2
"""Of a round: its outcome with the numbers for the next one, and the tokens that the drafter has not read."""


@pytest.mark.parametrize("batch", mostly_slow([1, 8], 8))
@pytest.mark.parametrize("name", CASES)
def test_reads_and_uploads_of_a_round(name: str, batch: int) -> None:
    """One read for chains of one length and retrieved drafts, whatever the number of texts.

    As few uploads for texts of different lengths, which leave the batch at different times, as for one.
    """
    drafter, policy, rule, settings = CASES[name]
    constant.cache_clear()  # or its tensors would count as the host's
    rounds, _, reads = reads_per_round(drafter, policy, batch, rule, **settings)
    assert len(reads) == rounds, f"{len(reads) / rounds:.1f} reads a round:\n{reads}"
    of_shapes = constant.cache_info().misses
    most = MOST_UPLOADS * rounds + of_shapes
    assert len(reads.uploads) <= most, f"{len(reads.uploads) / rounds:.1f} uploads a round:\n{reads}"
    assert of_shapes <= 8, "the same tables in every round"


def test_chains_beside_retrieved_drafts_are_read_once() -> None:
    """In one of these rounds some texts have a retrieved draft: one read more, not one for each token of a chain."""
    rounds, _, reads = reads_per_round("hybrid", CHAIN, 8, None)
    assert len(reads) == rounds + 1, str(reads)


READS_OF_A_LEVEL: dict[str, tuple[int, int]] = {"adaptive": (1, 2), "confidence": (1, 2), "best-first": (1, 1)}
READS_OF_A_LEVEL |= {"sampled-tree": (1, 1)}
"""Reads of a level of the drafts of all texts, greedy and sampled: what policies decide by, and what they drew."""


@pytest.mark.parametrize("batch", mostly_slow([1, 8], 8))
@pytest.mark.parametrize("policy", READS_OF_A_LEVEL)
@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_policies_that_look_at_q_read_each_level_once(policy: str, settings: dict[str, Any], batch: int) -> None:
    """The number of texts changes nothing, and the outcome is one more read of a round."""
    rounds, levels, reads = reads_per_round("draft_model", policy, batch, None, **settings)
    least = rounds / 2 if policy == "adaptive" else rounds  # some of its rounds have no draft
    assert levels >= least, "a pass of the drafter for each level; that over the prompts is the first round's"
    most = rounds + levels * READS_OF_A_LEVEL[policy][bool(settings)]
    assert len(reads) <= most, f"{rounds} rounds, {levels} levels:\n{reads}"


class Uploads(TorchFunctionMode):
    """Collects the number of values of each tensor that is made from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor):
            self.sizes.append(out.numel())
        return out


@pytest.mark.parametrize("policy", [None, CHAIN, TREE])
@pytest.mark.parametrize("settings", [PENALTY, SAMPLED | PENALTY], ids=["greedy", "sampled"])
def test_rounds_do_not_convert_the_text_for_processors_that_read_it(
    policy: str | None, settings: dict[str, Any]
) -> None:
    target = make_llama()
    drafter = drafter_for(None if policy is None else "draft_model", target)
    decoder = SpeculativeDecoder(target, drafter, policy=None if policy is None else policy_named(policy, COSTS))
    of_the_prompt = 0

    def note(tokens: list[int], record: object) -> None:
        nonlocal of_the_prompt
        of_the_prompt = of_the_prompt or len(uploads.sizes)

    with Uploads() as uploads:
        decoder.generate([5, 9] * 40, max_new_tokens=16, eos_token_id=None, on_tokens=note, **settings)
    assert max(uploads.sizes) >= 80, "the prompt is converted"
    assert 0 < of_the_prompt < len(uploads.sizes)
    assert max(uploads.sizes[of_the_prompt:]) < 80
