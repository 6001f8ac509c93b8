"""Learning while decoding: greedy texts stay the target's, updates are reproducible, and only better ones are used."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_llama, mostly_slow
from torch import Tensor
from transformers import LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from draftsmith import OnlineLearning, SpeculativeDecoder, load_drafter
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS, DraftModel, Medusa
from draftsmith.heads.base import Drafter, TrainableDrafter
from draftsmith.heads.checkpoint import describe_target, drafter_named
from draftsmith.heads.lora import add_lora
from draftsmith.heads.ngram import Hybrid
from draftsmith.heads.recall import Recall
from draftsmith.train.learning_rates import TRAINED, scaled_rate
from draftsmith.train.online.buffer import Row
from draftsmith.train.online.candidate import Candidate
from draftsmith.train.online.judge import Verdict, judged, scores
from draftsmith.train.online.learner import LEAST_BLOCKS, LEAST_ROWS
from draftsmith.train.online.steps import WARMUP, blank_row

PROMPTS = [[int(x) for x in torch.randint(2, 64, (5,), generator=torch.Generator().manual_seed(i))] for i in range(64)]
FAMILIES: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in HEADS},
    "hydra, prefix": {"prefix_layer": True},
    "eagle3": {"draft_vocabulary": list(range(0, 64, 2)), "train_steps": 3},
    "peagle": {"num_tokens": 3},
    "dflash": {"block_size": 4, "markov_rank": 3, "confidence_head": True},
}


def target_model() -> LlamaForCausalLM:
    return make_llama(num_hidden_layers=6).requires_grad_(False)


def make(kind: str, target: LlamaForCausalLM) -> TrainableDrafter:
    """Return a drafter off its initial weights."""
    torch.manual_seed(3)
    drafter = HEADS[kind.partition(",")[0]].from_target(target, **FAMILIES[kind]).eval().requires_grad_(False)
    for weight in drafter.parameters():
        weight.add_(0.02 * torch.randn_like(weight))
    return drafter


def texts_of(decoder: SpeculativeDecoder, count: int, temperature: float = 0.0, tokens: int = 20) -> list[list[int]]:
    """Decode `count` prompts, eight at a time."""
    outputs = []
    for start in range(0, count, 8):
        rows = PROMPTS[start : min(start + 8, count)]
        settings = {"max_new_tokens": tokens, "temperature": temperature, "eos_token_id": None, "seeds": start}
        outputs += decoder.generate_batch(rows, **settings)
    return [output.tokens for output in outputs]


def weights(drafter: Drafter) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in drafter.state_dict().items()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return any(not torch.equal(before[name], after[name]) for name in before)


def noisy(target: LlamaForCausalLM, noise: float = 0.25) -> DraftModel:
    """A draft model that has the target's weights and some noise, which is quickly unlearned."""
    drafter = DraftModel.from_target(target, init="target_layers", num_hidden_layers=2).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for name, weight in drafter.named_parameters():
        if "mlp" in name:
            weight.add_(noise * torch.randn(weight.shape, generator=generator))
    return drafter


def quick(**options: object) -> OnlineLearning:
    return OnlineLearning(**{"every": 8, "judge_every": 8, "batch_rows": 4, "learning_rate": 3e-3, **options})


@cache
def greedy_texts() -> list[list[int]]:
    """Return the texts of the target alone after 44 prompts."""
    return texts_of(SpeculativeDecoder(target_model()), 44)


@pytest.mark.parametrize("name", mostly_slow(FAMILIES, "draft_model", "medusa", "eagle3", "mtp", "dflash"))
def test_every_family_learns_and_stays_lossless(name: str) -> None:
    target = target_model()
    drafter = make(name, target)
    learn = quick(judge_every=2)
    assert texts_of(SpeculativeDecoder(target, drafter, learn=learn), 44) == greedy_texts()
    assert learn.steps >= 2
    assert {type(drafter)} == {type(learn._candidate.drafter)}
    assert changed(weights(drafter), weights(learn._candidate.drafter)) or learn.adopted or learn.refused


def test_texts_are_held_back_whole() -> None:
    target = target_model()
    learn = OnlineLearning(every=10**6)
    texts_of(SpeculativeDecoder(target, make("mtp", target), learn=learn), 8, tokens=130)

    def texts(rows: list[Row]) -> set[int]:
        """Return which texts begin in these rows."""
        return {PROMPTS.index(row.text.tokens[:5]) for row in rows if row.text.prompt_length == 5}

    held, trained = list(learn._held), list(learn._rows)
    assert texts(held) == {3, 7}
    assert len(held) == 4, "both rows of the fourth and of the eighth text"
    assert texts(trained) == {0, 1, 2, 4, 5, 6}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_is_measured_before_anything_is_decoded_and_changes_nothing(name: str) -> None:
    target = target_model()
    drafter = make(name, target)
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    learn = OnlineLearning(batch_rows=3)
    SpeculativeDecoder(target, drafter, learn=learn)
    assert min(learn._budget._steps) > 0
    assert learn.seconds == learn.steps == 0
    for own in (learn._candidate.trained, learn._candidate.drafter):
        assert not changed(weights(drafter), weights(own))
    assert not any(optimizer.state for optimizer in learn._steps._optimizers)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_rate_rises_within_the_warm_up_and_again_after_a_refusal() -> None:
    target, drafter = _pair()
    learn = quick(learning_rate=None)
    SpeculativeDecoder(target, drafter, learn=learn)
    row = blank_row(drafter, target, learn._lm_head, 0)
    peak, rates = scaled_rate(TRAINED, "muon", 32), []
    for number in range(2 * WARMUP + 4):
        if number == WARMUP + 2:
            learn._refuse(None, "a test")
        learn._steps([row])
        rates.append(learn._steps._optimizers[0].param_groups[0]["lr"] / peak)
    rise = [step / WARMUP for step in range(1, WARMUP + 1)]
    assert rates == pytest.approx([*rise, 1, 1, *rise, 1, 1])


def test_a_better_candidate_is_adopted_and_accepts_more() -> None:
    target = make_llama().requires_grad_(False)
    drafter, frozen = noisy(target), noisy(target)
    learn = quick()
    decoder = SpeculativeDecoder(target, drafter, draft_length=3, learn=learn)
    for _ in range(2):
        texts_of(decoder, 64)
    adopted = [update for update in learn.updates if update.kind == "adopted"]
    assert len(adopted) == learn.adopted > 0
    assert learn.seconds > 0
    assert all(update.verdict.interval[0] > 0 for update in adopted)
    assert changed(weights(frozen), weights(drafter))
    known = learn._served_scores
    found = scores(drafter, list(known), learn._lm_head, learn._draft_length)
    np.testing.assert_allclose(np.stack(list(known.values())), found)
    taus = []
    for one in (frozen, drafter):
        outputs = SpeculativeDecoder(target, one, draft_length=3).generate_batch(PROMPTS, max_new_tokens=20)
        rounds = [record for output in outputs for record in output.rounds]
        taus.append(sum(record.committed for record in rounds) / len(rounds))
    assert taus[1] > 1.1 * taus[0]


@pytest.mark.parametrize("temperature", mostly_slow([0.0, 1.0], 1.0))
def test_the_same_requests_give_the_same_updates_and_texts(temperature: float) -> None:
    target, runs = make_llama().requires_grad_(False), []
    for _ in range(2):
        drafter, learn = noisy(target), quick(seed=3)
        texts = texts_of(SpeculativeDecoder(target, drafter, learn=learn), 64, temperature)
        runs.append((texts, learn.updates, weights(drafter), learn.provenance))
        torch.rand(1)  # the global generator plays no part
    assert runs[0][0] == runs[1][0]
    assert runs[0][1] == runs[1][1]
    assert not changed(runs[0][2], runs[1][2])
    assert runs[0][3] == runs[1][3]
    assert runs[0][3]["steps"] > 0


def test_the_global_random_state_is_left_alone() -> None:
    target = target_model()
    drafter = make("dflash", target)  # its training draws anchors
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    learn = quick()
    texts_of(SpeculativeDecoder(target, drafter, learn=learn), 48)
    assert learn.steps > 0
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("rate", [30.0, 1e30], ids=["worse", "not finite"])
def test_a_candidate_that_is_not_better_is_rolled_back_and_learning_pauses(rate: float) -> None:
    target = make_llama().requires_grad_(False)
    drafter = noisy(target, 0.02)
    before, said = weights(drafter), []
    learn = quick(learning_rate=rate, optimizer="adamw", on_update=said.append)
    texts_of(SpeculativeDecoder(target, drafter, learn=learn), 64)
    assert learn.refused > 0
    assert learn.adopted == 0
    assert not changed(before, weights(drafter))
    assert said == learn.updates
    assert [update.kind for update in learn.updates[:2]] == ["refused", "paused"]
    if learn.tokens < learn._asleep_until:
        assert not changed(before, weights(learn._candidate.drafter))


def test_a_pause_ends_after_its_tokens_and_doubles() -> None:
    target = make_llama().requires_grad_(False)
    learn = quick(learning_rate=30.0, optimizer="adamw", judge_every=1)
    decoder = SpeculativeDecoder(target, noisy(target, 0.02), learn=learn)
    for _ in range(2):
        texts_of(decoder, 64)
    pauses = [int(update.reason.split()[-2]) for update in learn.updates if update.kind == "paused"]
    kinds = [update.kind for update in learn.updates]
    assert kinds[:5] == ["refused", "paused", "resumed", "refused", "paused"]
    ended = [update.tokens for update in learn.updates if update.kind == "resumed"]
    began = [update.tokens for update in learn.updates if update.kind == "paused"]
    assert all(start + length <= end for start, length, end in zip(began, pauses, ended, strict=False))
    spans = [end - start for start, end in zip([0, *ended], began, strict=False)]
    assert pauses[1] == 2 * spans[1]


def test_learning_continues_early_when_acceptance_falls() -> None:
    target = make_llama().requires_grad_(False)
    drafter = noisy(target, 0.02)
    learn = quick(every=10_000, recall=False)  # its memory knows the texts the second time
    decoder = SpeculativeDecoder(target, drafter, draft_length=3, learn=learn)
    texts_of(decoder, 64)
    learn._pause("a test")
    learn._asleep_until = 10**6
    texts_of(decoder, 64)
    assert [update.kind for update in learn.updates] == ["paused"]
    for weight in drafter.model.parameters():
        weight.mul_(-1)
    texts_of(decoder, 64)
    assert [update.kind for update in learn.updates] == ["paused", "resumed"]
    assert "fallen" in learn.updates[-1].reason


def test_a_text_counts_with_the_tokens_and_rounds_of_its_decoding() -> None:
    target, drafter = _pair()
    learn = quick()
    decoder = SpeculativeDecoder(target, drafter, draft_length=3, learn=learn)
    outputs = [decoder.generate(prompt, max_new_tokens=24, eos_token_id=None) for prompt in PROMPTS[:4]]
    learn._close(all_of_them=True)
    assert list(learn._watch._recent) == [(output.decode_tokens, len(output.rounds)) for output in outputs]


def _pair() -> tuple[LlamaForCausalLM, DraftModel]:
    target = make_llama().requires_grad_(False)
    return target, noisy(target)


def test_only_adapters_are_trained_and_their_product_is_adopted() -> None:
    target, drafter = _pair()
    before = weights(drafter)
    learn = quick(lora_rank=4, learning_rate=1e-2)
    decoder = SpeculativeDecoder(target, drafter, learn=learn)
    trained = [name for name, weight in learn._candidate.drafter.named_parameters() if weight.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    for _ in range(2):
        texts_of(decoder, 64)
    assert learn.adopted > 0
    after = weights(drafter)
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert not any("embed" in name or "norm" in name or "lm_head" in name for name in moved)
    learn._candidate.roll_back()
    ids_1T = torch.tensor([PROMPTS[0]])
    adapted, merged = (one.model(input_ids=ids_1T).logits for one in (learn._candidate.drafter.eval(), drafter))
    torch.testing.assert_close(adapted, merged)


def test_half_precision_keeps_small_steps() -> None:
    """Steps of a thousandth are lost when they are added to bf16 weights one by one."""
    target = make_llama().requires_grad_(False).bfloat16()
    drafter = noisy(make_llama().requires_grad_(False)).bfloat16()
    learn = quick()
    texts = texts_of(SpeculativeDecoder(target, drafter, learn=learn), 64)
    assert len(texts) == 64
    assert learn.steps > 0
    assert {weight.dtype for weight in learn._candidate.drafter.parameters()} == {torch.float32}
    assert {weight.dtype for weight in drafter.parameters()} == {torch.bfloat16}
    assert {row.hidden_nH.dtype for row in learn._rows} == {torch.bfloat16}


def test_a_hybrids_trained_drafter_learns() -> None:
    target, drafter = _pair()
    learn = quick()
    texts_of(SpeculativeDecoder(target, Hybrid(drafter), learn=learn), 64)
    assert learn._candidate.served is drafter
    assert learn.steps > 0


@pytest.mark.parametrize("name", ["suffix", "prompt-lookup", "early-exit:layers=1"])
def test_drafters_without_weights_are_refused_by_name(name: str) -> None:
    target = make_llama()
    drafter = drafter_named(name, target, lambda _: pytest.fail("no checkpoint is read"))
    with pytest.raises(ConfigError, match=f"drafter of type '{name.split(':')[0]}'.*expected a trained drafter"):
        SpeculativeDecoder(target, drafter, learn=OnlineLearning())


def test_what_cannot_learn_is_refused() -> None:
    target, drafter = _pair()
    with pytest.raises(ConfigError, match="learn without a drafter"):
        SpeculativeDecoder(target, learn=OnlineLearning())
    with pytest.raises(ConfigError, match="lora_rank=2 with a medusa drafter; expected a draft model"):
        SpeculativeDecoder(target, Medusa.from_target(target), learn=OnlineLearning(lora_rank=2))
    learn = OnlineLearning()
    SpeculativeDecoder(target, drafter, learn=learn)
    with pytest.raises(ConfigError, match="another decoder"):
        SpeculativeDecoder(target, drafter, learn=learn)
    add_lora(drafter.model, rank=2, alpha=4)
    with pytest.raises(ConfigError, match="adapters; expected them merged"):
        SpeculativeDecoder(target, drafter, learn=OnlineLearning())
    other, _ = _pair()
    padded = noisy(other)
    padded.shared_vocabulary = padded.vocab_size = 60
    with pytest.raises(ConfigError, match="of 60 tokens, whose padding is not the target's; expected the target's 64"):
        SpeculativeDecoder(target, padded, learn=OnlineLearning())


def test_an_encoder_decoder_draft_model_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_decoder_layers": 1}
    config = T5Config(**sizes, num_heads=2, decoder_start_token_id=0, initializer_factor=20.0)
    torch.manual_seed(0)
    target = T5ForConditionalGeneration(config).eval().requires_grad_(False)
    drafter, copied = (DraftModel.from_target(target, init="target_layers").eval() for _ in range(2))
    for weight in drafter.requires_grad_(False).parameters():
        weight.add_(0.3 * weight.std() * torch.randn_like(weight))
    before, learn, roll_back = weights(drafter), quick(), Candidate.roll_back
    refused: list[bool] = []  # on some CPUs, rounding leads to a candidate that is refused

    def recorded(candidate: Candidate) -> None:
        refused.append(changed(before, weights(candidate.drafter)))
        roll_back(candidate)

    monkeypatch.setattr(Candidate, "roll_back", recorded)
    texts = texts_of(SpeculativeDecoder(target, drafter, learn=learn), 64)
    assert texts == texts_of(SpeculativeDecoder(target), 64)
    assert learn.steps > 0
    assert changed(before, weights(learn._candidate.drafter)) or any(refused)
    # Stored rows have the encoder's tokens: the target's own layers predict its texts from them.
    best, own = (scores(one, list(learn._held), learn._lm_head, 4) for one in (copied, drafter))
    assert (best >= own).all()
    assert best[:, 0].sum() > own[:, 0].sum()


def test_a_model_of_another_project_with_the_targets_vocabulary_learns() -> None:
    """Its number of shared tokens is known from its tokenizer; see `load_drafter`."""
    target, drafter = _pair()
    drafter.shared_vocabulary = 64
    learn = quick()
    texts_of(SpeculativeDecoder(target, drafter, learn=learn), 64)
    assert learn.steps > 0
    assert learn.adopted > 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("share", 0.0), ("share", 1.0), ("optimizer", "sgd"), ("learning_rate", 0.0)),
        *((key, 0) for key in ("every", "buffer_bytes", "lora_rank", "batch_rows", "judge_every", "patience")),
    ],
)
def test_settings_out_of_range_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        OnlineLearning(**{key: value})


def test_a_saved_drafter_counts_on_and_holds_no_text(tmp_path: Path) -> None:
    target, drafter = _pair()
    learn = quick()
    texts_of(SpeculativeDecoder(target, drafter, learn=learn), 64)
    description = describe_target(target, None, "tiny")
    learn.save(tmp_path / "saved", description, recipe={"name": "x"})
    assert {file.name for file in (tmp_path / "saved").iterdir()} <= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    section = json.loads((tmp_path / "saved" / "config.json").read_text())["draftsmith"]
    assert section["online"] == learn.provenance
    assert section["online"]["tokens"] == learn.tokens > 0
    assert section["recipe"] == {"name": "x"}
    loaded = load_drafter(tmp_path / "saved", target)
    assert not changed(weights(drafter), weights(loaded))
    again = quick()
    decoder = SpeculativeDecoder(target, loaded, learn=again)
    assert again.provenance == learn.provenance
    texts_of(decoder, 4)
    assert again.tokens == learn.tokens + 4 * 20


def test_a_drafter_is_saved_as_it_is_in_use(tmp_path: Path) -> None:
    """Not as the candidate, which nothing has shown to be better."""
    target, drafter = _pair()
    before = weights(drafter)
    learn = quick(judge_every=1000)
    texts_of(SpeculativeDecoder(target, drafter, learn=learn), 64)
    assert learn.steps > 0
    learn.save(tmp_path / "saved", describe_target(target, None, "tiny"))
    assert not changed(before, weights(load_drafter(tmp_path / "saved", target)))


def test_scores_are_the_acceptance_of_decoding() -> None:
    """At temperature 0 the expected tau over all anchors of a text is what rounds from each anchor would commit."""
    target, drafter = _pair()
    learn = quick(judge_every=1000)
    texts_of(SpeculativeDecoder(target, drafter, learn=learn), 64)
    rows = list(learn._held)
    found = scores(drafter, rows, learn._lm_head, 3)
    for row, (committed, rounds) in zip(rows, found.tolist(), strict=True):
        tokens, first = row.text.tokens, row.text.prompt_length
        assert rounds == len(tokens) - 1 - first
        expected = 0
        for anchor in range(first, len(tokens) - 1):
            text, accepted = tokens[: anchor + 1], 0
            while accepted < 3 and anchor + 1 + accepted < len(tokens):
                logits_V = drafter.model(input_ids=torch.tensor([text])).logits[0, -1]
                if int(logits_V.argmax()) != tokens[anchor + 1 + accepted]:
                    break
                text, accepted = [*text, tokens[anchor + 1 + accepted]], accepted + 1
            expected += 1 + accepted
        assert committed == expected


def test_an_interval_is_paired() -> None:
    """Rows that differ widely hide no gain that all of them share."""
    generator = torch.Generator().manual_seed(0)
    served = torch.stack([torch.rand(32, generator=generator) * 40 + 20, torch.full((32,), 20.0)], -1).double().numpy()
    better = served.copy()
    better[:, 0] *= 1.02
    verdict = judged(served, better, range(32), seed=1)
    assert verdict.gain == pytest.approx(0.02)
    assert verdict.interval == pytest.approx((0.02, 0.02))
    same = judged(served, served, range(32), seed=1)
    assert same.interval == (0, 0)
    assert same.served == pytest.approx(served[:, 0].sum() / served[:, 1].sum())


def test_an_interval_is_over_blocks() -> None:
    """Rows of one text agree about a candidate; that they are many makes no difference."""
    generator = torch.Generator().manual_seed(1)
    gains_G = 1 + 0.05 * torch.randn(8, generator=generator, dtype=torch.float64).numpy()
    blocks = [(number, 0) for number in range(8) for _ in range(8)]
    served = np.full((64, 2), [40.0, 20.0])
    candidate = served * [[gains_G[number], 1] for number, _ in blocks]
    own = served[::8] * 8
    one_each = judged(own, own * np.stack([gains_G, np.ones(8)], 1), blocks[::8], seed=1)
    many = judged(served, candidate, blocks, seed=1)
    assert many.gain == pytest.approx(one_each.gain)
    assert many.interval == pytest.approx(one_each.interval)
    as_rows = judged(served, candidate, range(64), seed=1)
    width, narrow = (verdict.interval[1] - verdict.interval[0] for verdict in (many, as_rows))
    assert width > 2 * narrow


def test_a_decision_needs_several_texts() -> None:
    """Rows of one long text are many, but no evidence of their own."""
    target, drafter = _pair()
    learn = quick(judge_every=1)
    SpeculativeDecoder(target, drafter, learn=learn)
    row = blank_row(drafter, target, learn._lm_head, 0)
    for number in range(2 * LEAST_ROWS):
        learn.learn_from(replace(row, block=(number % (LEAST_BLOCKS - 1), 0)), held=True)
        learn.learn_from(replace(row), held=False)
    assert learn.steps == 0
    learn.learn_from(replace(row, block=(LEAST_BLOCKS, 0)), held=True)
    learn.learn_from(replace(row), held=False)
    assert learn.steps > 0


def test_a_text_that_ends_inside_a_draft_is_learned_from() -> None:
    target, drafter = _pair()
    learn = quick()
    decoder = SpeculativeDecoder(target, drafter, draft_length=4, learn=learn)
    outputs = [decoder.generate(prompt, max_new_tokens=24, eos_token_id=list(range(2, 12))) for prompt in PROMPTS[:32]]
    learn._close(all_of_them=True)
    kept = sorted(len(row.text.tokens) - row.text.prompt_length for row in [*learn._rows, *learn._held])
    assert kept == sorted(len(output.tokens) for output in outputs if len(output.tokens) >= 4)
    assert all(len(row.hidden_nH) == len(row.text.tokens) - row.text.prompt_length for row in learn._rows)


@pytest.mark.slow
def test_five_hundred_greedy_texts_are_the_targets() -> None:
    target, drafter = _pair()
    learn = quick(learning_rate=1e-3)
    decoder, alone = SpeculativeDecoder(target, drafter, learn=learn), SpeculativeDecoder(target)
    for number in range(500):
        prompt = [int(x) for x in torch.randint(2, 64, (5,), generator=torch.Generator().manual_seed(1000 + number))]
        settings = {"max_new_tokens": 20, "eos_token_id": None}
        assert decoder.generate(prompt, **settings).tokens == alone.generate(prompt, **settings).tokens
    assert learn.adopted > 0


def test_drafts_also_come_from_earlier_texts_unless_they_shall_not() -> None:
    target, drafter = _pair()
    learn, hybrid = quick(every=10**6), Hybrid(drafter, min_match=7)
    decoder = SpeculativeDecoder(target, hybrid, draft_length=3, learn=learn)
    assert isinstance(decoder.drafter, Recall)
    assert (decoder.drafter.drafter, decoder.drafter.min_match) == (drafter, 7)
    expected = texts_of(SpeculativeDecoder(target), 16)
    for _ in range(4):
        assert texts_of(decoder, 16) == expected
    assert learn.recalled == decoder.drafter.recalled > 20
    assert f"; {learn.recalled} of {decoder.drafter.rounds} drafts from memory" in learn.summary()
    without = quick(recall=False)
    assert SpeculativeDecoder(target, drafter, learn=without).drafter is drafter
    assert without.recalled == 0
    assert "memory" not in without.summary()


def test_an_update_counts_for_the_rounds_that_the_drafter_drafts() -> None:
    verdict = Verdict(2.0, 3.0, 0.5, (0.4, 0.6))
    assert verdict.diluted(0.5) == Verdict(2.0, 3.0, 0.25, (0.2, 0.3))
    kinds = []
    for drafted in (0, 100):
        target, drafter = _pair()
        learn = quick(share=0.1)
        decoder = SpeculativeDecoder(target, drafter, learn=learn)
        assert isinstance(decoder.drafter, Recall)
        decoder.drafter.rounds, decoder.drafter.drafted = 100, drafted
        learn.tokens = 1000
        learn._adopt(verdict)
        kinds.append([update.kind for update in learn.updates])
        assert learn._budget.gained == pytest.approx(1 + 0.4 * drafted / 100, abs=0.01)
    assert kinds == [["adopted", "paused"], ["adopted"]]


def test_a_rule_that_does_not_verify_retrieved_drafts_is_refused() -> None:
    target, drafter = _pair()
    with pytest.raises(ConfigError, match="rule='token' needs a chain drawn from q; a recall drafter also retrieves"):
        SpeculativeDecoder(target, drafter, rule="token", learn=quick())
    SpeculativeDecoder(target, drafter, rule="token", learn=quick(recall=False))
