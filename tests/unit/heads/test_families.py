"""Properties of every drafter: training matches decoding, saving is exact, chains and trees are drafted."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_llama, make_t5, mostly_slow
from half_precision import require_greedy
from recording import Planned, decoded_logits, planned_rounds
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith import SpeculativeDecoder, load_drafter
from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import Batch, OnlineTeacher
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS
from draftsmith.heads.base import TrainableDrafter
from draftsmith.heads.block_network import Visibility
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.heads.retrieval import Hybrid, SuffixRetrieval
from draftsmith.hub.export import export_drafter

EVEN = list(range(0, 64, 2))
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "draft_model": ("draft_model", {}),
    "draft_model pruned": ("draft_model", {"init": "target_layers", "keep": [0, 3]}),
    "draft_model of another kind": ("draft_model", {"config": {"model_type": "gpt2", "n_embd": 16, "n_head": 2}}),
    "draft_model with lora": ("draft_model", {"init": "target_layers", "num_hidden_layers": 2, "lora_rank": 2}),
    "medusa": ("medusa", {}),
    "medusa, 32 tokens": ("medusa", {"draft_vocabulary": EVEN, "shared_lm_head": True, "num_layers": 2}),
    "eagle": ("eagle", {"train_steps": 3}),
    "eagle, 32 tokens": ("eagle", {"train_steps": 3, "draft_vocabulary": EVEN}),
    "hass": ("hass", {"num_hidden_layers": 2}),
    "eagle3": ("eagle3", {}),
    "eagle3, 32 tokens": ("eagle3", {"draft_vocabulary": EVEN, "num_hidden_layers": 2}),
    "eagle3.1": ("eagle3", {"fc_norm": True, "norm_output": True, "layers": [1, 4], "qk_norm": True}),
    "eagle3 in windows": ("eagle3", {"num_hidden_layers": 2, "windows": ["sliding_attention", "full_attention"]}),
    "eagle3 in a window": ("eagle3", {"window": 3}),
    "mtp": ("mtp", {}),
    "mtp, 32 tokens": ("mtp", {"draft_vocabulary": EVEN}),
    "mtp of 3 modules": ("mtp", {"num_modules": 3, "draft_vocabulary": EVEN}),
    "peagle": ("peagle", {"num_tokens": 3, "draft_vocabulary": EVEN}),
    "peagle in a window": ("peagle", {"num_tokens": 3, "window": 3}),
    "dflash": ("dflash", {"block_size": 4}),
    "dflash in one window": ("dflash", {"block_size": 4, "window": 3}),
    "dflash from the anchor": ("dflash", {"block_size": 3, "sample_from_anchor": True}),
    "dflash, 32 tokens": ("dflash", {"block_size": 4, "draft_vocabulary": EVEN}),
    "dflash in windows": ("dflash", {"block_size": 4, "blocks": ((3, None), True)}),
    "dflash in a window, not causal": ("dflash", {"block_size": 4, "blocks": ((3, 2), False)}),
    "dflash in windows of positions": ("dflash", {"block_size": 4, "blocks": ((5, None), True, False, False)}),
    "dflash in short windows, not causal": ("dflash", {"block_size": 4, "blocks": ((5, 2), False, False, False)}),
    "dflash with sinks": ("dflash", {"block_size": 4, "blocks": ((5, None), True), "attention_sinks": True}),
    "dflash, all layers causal": ("dflash", {"block_size": 4, "blocks": ((None, 6), True, True, False)}),
    "dspark": ("dflash", {"block_size": 4, "markov_rank": 3, "confidence_head": True}),
    "dspark, gated": ("dflash", {"block_size": 4, "markov_rank": 3, "markov_type": "gated", "confidence_head": True}),
    "dspark, recurrent": ("dflash", {"block_size": 4, "markov_rank": 3, "markov_type": "rnn", "confidence_head": True}),
    "dspark from the anchor, 32 tokens": (
        "dflash",
        {
            "block_size": 3,
            "sample_from_anchor": True,
            "draft_vocabulary": EVEN,
            "markov_rank": 3,
            "confidence_head": True,
        },
    ),
}
SECOND = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 3, "selector_top_k": 6}
LATTICE = {"lilicorr_candidate_topk": 4, "lilicorr_hidden_size": 16, "lilicorr_num_heads": 2, "lilicorr_factor_dim": 8}
FAMILIES |= {
    "dflash2": ("dflash", {"block_size": 4, **SECOND}),
    "dflash2 from the anchor, 32 tokens": (
        "dflash",
        {"block_size": 4, "sample_from_anchor": True, "draft_vocabulary": EVEN, "confidence_head": True, **SECOND},
    ),
    "lilicorr": ("dflash", {"block_size": 4, "conv_kernel_size": 2, "conv_group_size": 8, **LATTICE}),
    "lilicorr, 32 tokens": ("dflash", {"block_size": 4, "draft_vocabulary": EVEN, **LATTICE}),
}
ONE_OF_EACH = (
    *("draft_model pruned", "medusa, 32 tokens", "eagle", "eagle3 in windows", "mtp of 3 modules", "peagle"),
    *("dspark, recurrent", "dflash2", "lilicorr"),
)
"""They stand for all families where whole texts are decoded, in `make test`."""
PROMPTS = [[5, 9, 33, 2, 5, 9], [7], [40, 3]]


def target_model() -> LlamaForCausalLM:
    return make_llama(num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2).requires_grad_(False)


@cache
def alone(prompt: tuple[int, ...], count: int, dtype: torch.dtype = torch.float32) -> list[int]:
    """Return the tokens of the target alone after a prompt."""
    target = target_model().to(dtype)
    return SpeculativeDecoder(target).generate(list(prompt), max_new_tokens=count, eos_token_id=None).tokens


def make(name: str, target: LlamaForCausalLM, noise: float = 0.1) -> TrainableDrafter:
    """Off its initial weights, so that nothing is right by accident."""
    kind, options = FAMILIES[name]
    torch.manual_seed(3)
    options = {**options}
    windows, blocks = options.pop("windows", None), options.pop("blocks", None)
    drafter = HEADS[kind].from_target(target, **options).eval()
    if windows is not None:
        drafter.body.config.layer_types, drafter.body.config.sliding_window = windows, 3
    if blocks is not None:
        drafter.body.sees = Visibility(*blocks)
    for parameter in drafter.parameters():
        parameter.data += noise * torch.randn_like(parameter)
    return drafter


def unrolled_logits(
    drafter: TrainableDrafter, target: LlamaForCausalLM, tokens: list[int], anchor: int
) -> list[Tensor]:
    """Return for each draft position the logits [V] of training after `tokens[: anchor + 1]`."""
    ids_1T = torch.tensor([tokens])
    mask_1T = torch.zeros_like(ids_1T, dtype=torch.bool)
    mask_1T[0, anchor:] = True
    signals = OnlineTeacher(target, drafter.needs.layers).signals(Batch(ids_1T, torch.ones_like(ids_1T), mask_1T))
    unrolled = drafter.unroll(signals)
    if unrolled[0].every_depth:
        entry = unrolled[0]
        return [entry.head(entry.states_ND[anchor + k]) for k in range(len(tokens) - anchor - 1)]
    logits = []
    for k, entry in enumerate(unrolled[: len(tokens) - anchor - 1]):
        state_D = entry.states_ND[entry.places_N.tolist().index(anchor + k)]
        logits_D = (entry.drafting_head or entry.head)(state_D[None])[0]
        if entry.vocabulary_D is None:
            logits.append(logits_D)
            continue
        # By the entry's own map, which is the one that training compares by.
        logits_V = logits_D.new_full((target.config.vocab_size,), -torch.inf)
        logits_V[entry.vocabulary_D] = logits_D
        logits.append(logits_V)
    return logits


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_training_sees_what_decoding_sees(name: str) -> None:
    """The logits after a prompt and along a draft are those of the unrolled states, at every position."""
    target = target_model()
    drafter = make(name, target)
    prompt, after = [5, 9, 33, 2, 11, 9, 8], [23, 60, 31, 4]
    reach = min(len(after) - 1, drafter.max_draft_length or 99)
    ours = decoded_logits(drafter, target, prompt, after)[:reach]
    # The last token is read by the target only: the drafter predicts nothing after it.
    training = unrolled_logits(drafter, target, prompt + after + [6], anchor=len(prompt))[:reach]
    if name == "eagle":
        assert len(training) == 3
    for k, (a, b) in enumerate(zip(ours, training, strict=True)):
        assert torch.allclose(a, b, atol=2e-5), f"draft position {k}: {float((a - b).abs().nan_to_num(0).max())}"


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash"])
def test_a_window_hides_what_is_before_it(kind: str, tmp_path: Path) -> None:
    """A window as long as the text hides nothing, and an export for vLLM has its size."""
    target, tokens = target_model(), [5, 9, 33, 2, 11, 9, 8, 23, 60, 31, 4, 6]
    drafters = {window: HEADS[kind].from_target(target, window=window).eval() for window in (None, 3, len(tokens) + 8)}
    trained = {name: value + 0.1 * torch.randn_like(value) for name, value in drafters[None].state_dict().items()}
    logits = {}
    for window, drafter in drafters.items():
        drafter.load_state_dict(trained)
        logits[window] = unrolled_logits(drafter, target, tokens, anchor=8)[0]
    torch.testing.assert_close(logits[len(tokens) + 8], logits[None], rtol=0, atol=1e-6)
    assert (logits[3] - logits[None]).abs().max() > 1e-2
    export_drafter(drafters[3], target, "vllm", tmp_path / "export", target_name="org/target")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    layers = config.get("transformer_layer_config", config)  # that of windows of each position in blocks is flat
    assert (layers["sliding_window"], set(layers["layer_types"])) == (3, {"sliding_attention"})


ROUNDS = [[1, 0, 3, 0, 2], [0, 2, 1, 3, 3]]
"""Draft tokens that are right in each round, by text; a drafter that reaches less far drafts as far as it does."""


@torch.no_grad()
@pytest.mark.parametrize("name", mostly_slow(FAMILIES, *ONE_OF_EACH))
def test_training_sees_what_later_rounds_see(name: str) -> None:
    """After partial, full and no acceptance: a single chain, and trees in a ragged batch, compared with training.

    In fp64 up to what transformers computes in fp32 all the same: norms, and the angles of positions.
    """
    target = target_model().double()
    drafter = make(name, target).double()
    depth = min(3, drafter.max_draft_length or 3)
    plans = [[min(right, depth) for right in plan] for plan in ROUNDS]
    prompts = [PROMPTS[0], PROMPTS[2]]
    wholes = [[*prompt, *alone(tuple(prompt), 30, torch.float64)] for prompt in prompts]
    for count, siblings in ((1, False), (2, True)):
        policy = Planned(wholes, plans, depth, siblings=siblings)
        said = planned_rounds(drafter, target, prompts[:count], policy)
        assert len(said) >= count * 5 * depth
        for committed, path, logits_V in said:
            # The last token is read by the target only: the drafter predicts nothing after it.
            training = unrolled_logits(drafter, target, [*committed, *path, 6], anchor=len(committed) - 1)
            torch.testing.assert_close(logits_V, training[len(path)], rtol=0, atol=1e-5)


POLICIES = ("best-first:size=8,depth=3", "chain:draft_length=3", "confidence:threshold=0.2")


@pytest.mark.parametrize("name", mostly_slow(FAMILIES, *ONE_OF_EACH))
def test_the_text_is_the_targets_own(name: str) -> None:
    """Greedy decoding with chains and trees in turn, for a single text and in a ragged batch."""
    target, policy = target_model(), POLICIES[[*FAMILIES].index(name) % len(POLICIES)]
    decoder = SpeculativeDecoder(target, make(name, target, noise=0.02), policy=policy)
    expected = [alone(tuple(prompt), 24) for prompt in PROMPTS]
    assert decoder.generate(PROMPTS[0], max_new_tokens=24, eos_token_id=None).tokens == expected[0]
    batch = decoder.generate_batch(PROMPTS, max_new_tokens=24, eos_token_id=None)
    assert [out.tokens for out in batch] == expected


@torch.no_grad()
@pytest.mark.parametrize(
    "name", mostly_slow(["medusa", "eagle3", "mtp", "peagle", "dflash", "dspark"], "eagle3", "dspark")
)
def test_beside_retrieval(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds in which the drafter is not asked: it catches up on tokens and features, and keeps to its own reach.

    Its logits are those of training, whether the tokens before came from its own drafts or from retrieved ones.
    """
    target = target_model().double()
    asked = make(name, target, noise=0.02).double()
    drafter = Hybrid(asked, SuffixRetrieval(min_match=1), min_match=2)
    prompts = [[5, 9, 33, 2, 5, 9, 33, 2, 5, 9], [7, 7, 8], [40]]
    expected = [alone(tuple(prompt), 60, torch.float64) for prompt in prompts]
    begin, said = asked.begin, dict[tuple[int, ...], Tensor]()

    def noted(rows: list[int]) -> Tensor:
        logits_BV = begin(rows)
        said.update({tuple(asked.context.sequences[row].tokens): logits_BV[row].clone() for row in rows})
        return logits_BV

    monkeypatch.setattr(asked, "begin", noted)
    decoder = SpeculativeDecoder(target, drafter, policy="confidence:threshold=0,draft_length=9")
    outputs = [decoder.generate(prompt, max_new_tokens=60, eos_token_id=None) for prompt in prompts]
    assert [out.tokens for out in outputs] == expected
    assert [out.tokens for out in decoder.generate_batch(prompts, max_new_tokens=60, eos_token_id=None)] == expected
    depths = {record.depth for out in outputs for record in out.rounds}
    most = drafter.max_draft_length
    assert max(depths) > (most or 0), "some drafts are retrieved, and longer than the drafter's"
    for tokens, logits_V in list(said.items())[:20]:
        training = unrolled_logits(asked, target, [*tokens, 6, 6], anchor=len(tokens) - 1)[0]
        torch.testing.assert_close(logits_V, training, rtol=0, atol=1e-5)


def save(drafter: TrainableDrafter, folder: Path, target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Path:
    made_for = describe_target(target, tokenizer, "tiny")
    save_drafter(drafter, folder, target=made_for, recipe=None, draft_length=3, tokenizer=tokenizer)
    return folder


@pytest.mark.parametrize("name", ["draft_model pruned", "eagle3", "dflash"])
def test_rotary_frequencies_are_not_rounded(name: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    drafter, target = make(name, target_model()), target_model().bfloat16()
    again = load_drafter(save(drafter, tmp_path / "d", target, tiny_tokenizer), target, tiny_tokenizer)
    assert next(again.parameters()).dtype == torch.bfloat16
    exact = {name: value for name, value in drafter.named_buffers() if name.endswith("inv_freq")}
    assert exact
    for cast in (again, again.half(), again.float()):
        assert all(torch.equal(cast.get_buffer(name), value) for name, value in exact.items())


@pytest.mark.parametrize("name", mostly_slow(FAMILIES, *ONE_OF_EACH))
def test_round_trip_is_bit_exact(name: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    target = target_model()
    drafter = make(name, target)
    again = load_drafter(save(drafter, tmp_path / "d", target, tiny_tokenizer), target, tiny_tokenizer)
    assert type(again) is type(drafter)
    assert again.needs == drafter.needs
    settings = {"max_new_tokens": 30, "eos_token_id": None}
    ours, theirs = (
        SpeculativeDecoder(target, one, draft_length=2).generate([4, 8, 9], **settings) for one in (drafter, again)
    )
    assert [r.accepted for r in ours.rounds] == [r.accepted for r in theirs.rounds]
    if "lora" in name:  # merged on the way out
        ids = torch.arange(3, 20)[None]
        assert torch.allclose(again.model(ids).logits, drafter.model(ids).logits, atol=1e-5)
        return
    state = again.state_dict()
    assert state.keys() == drafter.state_dict().keys()
    assert all(torch.equal(value, state[key]) for key, value in drafter.state_dict().items())


def test_nothing_of_the_target_is_saved_or_trained(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    target = target_model()
    for name in ("medusa", "eagle, 32 tokens", "eagle3", "mtp", "dflash"):
        drafter = make(name, target)
        assert not {id(p) for p in drafter.parameters()} & {id(p) for p in target.parameters()}
        files = load_file(save(drafter, tmp_path / name, target, tiny_tokenizer) / "model.safetensors")
        assert not any("embed_tokens" in key for key in files)
        assert name == "eagle3" or not any("body.lm_head" in key for key in files)


@pytest.mark.parametrize("name", ["medusa, 32 tokens", "eagle3, 32 tokens", "mtp, 32 tokens"])
def test_a_stale_draft_vocabulary_is_refused(
    name: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    target = target_model()
    folder = save(make(name, target), tmp_path / "d", target, tiny_tokenizer)
    tensors = load_file(folder / "model.safetensors")
    (d2t,) = [key for key in tensors if key.endswith("d2t")]
    (t2d,) = [key for key in tensors if key.endswith("t2d")]
    shifted = {**tensors, d2t: tensors[d2t] + 1}
    save_file(shifted, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="d2t and t2d name different tokens"):
        load_drafter(folder, target)
    save_file({**shifted, t2d: tensors[t2d].roll(1)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="the map is stale"):
        load_drafter(folder, target)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("eagle3", {"layers": [1, 7]}, r"layers=\[1, 7\]; expected 1 to 6"),
        ("dflash", {"layers": [0]}, r"layers=\[0\]; expected 1 to 6"),
        ("medusa", {"num_heads": 128}, r"drafter\.num_heads=128; expected >= 1 and below the target's context of 128"),
        ("medusa", {"num_layers": 0}, r"drafter\.num_layers=0"),
        ("dflash", {"block_size": 1}, r"drafter\.block_size=1"),
        ("peagle", {"mask_token": 64}, r"drafter\.mask_token=64; expected 0 to 63"),
        ("hass", {"train_steps": 0}, r"drafter\.train_steps=0"),
        ("draft_model", {"keep": [3, 9]}, r"drafter\.keep=\[3, 9\]; expected rising layers of the target, 0 to 5"),
        ("draft_model", {"config": {"model_type": "lama"}}, r"drafter\.config\.model_type='lama'"),
        (
            "draft_model",
            {"config": {"model_type": "llama", "rms_norm_eps": "small"}},
            r"drafter\.config=.*rms_norm_eps': 'small'.* a language model's config \(.*: TypeError: .* expected float",
        ),
        ("draft_model", {"lora_rank": 33}, r"drafter\.lora_rank=33; expected at most"),
        ("draft_model", {"model": "/nowhere"}, r"drafter\.model=/nowhere"),
        ("mtp", {"init": "native"}, "own MTP module: the files of '' are not on this machine"),
    ],
)
def test_what_fits_no_target_is_refused(kind: str, options: dict[str, Any], message: str) -> None:
    def make_and_read() -> None:
        target = target_model()
        OnlineTeacher(target, HEADS[kind].from_target(target, **options).needs.layers)

    with pytest.raises(ConfigError, match=message):
        make_and_read()


@pytest.mark.parametrize("name", mostly_slow(FAMILIES, *ONE_OF_EACH))
def test_half_precision(name: str) -> None:
    """A target in bfloat16 trains a drafter in float32, and is decoded with one in bfloat16."""
    target = target_model().bfloat16()
    drafter = make(name, target)
    ids_BT = torch.randint(2, 64, (2, 12))
    mask_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    signals = OnlineTeacher(target, drafter.needs.layers).signals(Batch(ids_BT, torch.ones_like(ids_BT), mask_BT))
    loss = Objective(feature_weight=1.0)(drafter.unroll(signals), signals, target.get_output_embeddings()).loss
    loss.backward()
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in trained)
    assert {parameter.dtype for parameter in trained} == {torch.float32}
    decoder = SpeculativeDecoder(target, drafter.bfloat16(), draft_length=2)
    out = decoder.generate([4, 8, 9], max_new_tokens=16, eos_token_id=None)
    assert len(out.tokens) == 16
    require_greedy(target, [4, 8, 9], out.tokens)


def test_heads_of_an_encoder_decoder_target() -> None:
    """They read the decoder's state; drafters that read features of layers are refused."""
    target = make_t5(4)
    drafter = HEADS["medusa"].from_target(target).eval()
    for prompt in PROMPTS:
        out = SpeculativeDecoder(target, drafter, draft_length=3).generate(prompt, max_new_tokens=20, eos_token_id=None)
        own = SpeculativeDecoder(target).generate(prompt, max_new_tokens=20, eos_token_id=None)
        assert out.tokens == own.tokens
    with pytest.raises(ConfigError, match="expected a decoder-only target"):
        OnlineTeacher(target, HEADS["eagle3"].from_target(target).needs.layers)


def test_a_confidence_head_ends_drafts(tmp_path: Path) -> None:
    """The predicted confidence is that of training, and the policy `confidence` stops below the threshold."""
    target = target_model()
    drafter = make("dspark", target)
    ids_BT = torch.randint(2, 64, (4, 24))
    mask_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    signals = OnlineTeacher(target, drafter.needs.layers).signals(Batch(ids_BT, torch.ones_like(ids_BT), mask_BT))
    objective = Objective(kind="tv", confidence_weight=1.0)
    lm_head, optimizer = target.get_output_embeddings(), torch.optim.Adam(drafter.confidence.parameters(), lr=0.05)
    losses = []
    for _ in range(60):
        loss = objective(drafter.unroll(signals), signals, lm_head).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses[-5:]) < losses[0] - 1
    depths = []
    for bias in (-20.0, 20.0):
        drafter.confidence.bias.data.fill_(bias)
        drafter.confidence.weight.data.zero_()
        decoder = SpeculativeDecoder(target, drafter, policy="confidence:threshold=0.5")
        depths.append(max(record.depth for record in decoder.generate([4, 8, 9], max_new_tokens=12).rounds))
    assert depths == [1, 3]
