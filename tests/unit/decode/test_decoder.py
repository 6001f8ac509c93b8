"""EOS, lengths, seeds, streaming and invalid input of the decoder."""

from itertools import product

import pytest
import torch
from conftest import make_llama, noisy_llama, spread
from transformers import InfNanRemoveLogitsProcessor, LlamaForCausalLM, RepetitionPenaltyLogitsProcessor

from draftsmith.decode.costs import Costs
from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.drafts.builder import fitted
from draftsmith.decode.passes import graphs
from draftsmith.decode.sequence import DecodeOutput, Round
from draftsmith.errors import ConfigError
from draftsmith.eval.forecast.expected_rounds import of_rounds
from draftsmith.eval.journal import TextRecord
from draftsmith.eval.teacher_forced import TargetText
from draftsmith.heads import DraftModel, Medusa
from draftsmith.heads.retrieval import Hybrid, SuffixRetrieval
from draftsmith.metrics import acceptance_at

PROMPT = [5, 9, 33, 2]


@pytest.fixture
def decoder(tiny_target: LlamaForCausalLM) -> SpeculativeDecoder:
    return SpeculativeDecoder(tiny_target, DraftModel(make_llama(1)), draft_length=3)


def test_same_seed_same_text_and_another_seed_another(decoder: SpeculativeDecoder) -> None:
    texts = [decoder.generate(PROMPT, temperature=1.0, seed=seed, eos_token_id=None).tokens for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 17])
def test_exactly_the_wanted_number_of_tokens(decoder: SpeculativeDecoder, count: int) -> None:
    out = decoder.generate(PROMPT, max_new_tokens=count, temperature=1.0, eos_token_id=None)
    assert len(out.tokens) == count
    assert out.stopped_by == "length"
    assert sum(record.committed for record in out.rounds) == count - 1


def test_nothing_follows_an_eos(tiny_target: LlamaForCausalLM) -> None:
    # The drafter is the target, so every draft is accepted and an EOS is often inside a draft.
    decoder = SpeculativeDecoder(tiny_target, DraftModel(make_llama()), draft_length=5)
    inside = 0
    settings = {"temperature": 1.5, "eos_token_id": [1, 7, 8], "max_new_tokens": 100}
    for out in decoder.generate_batch([PROMPT] * 40, seeds=range(40), **settings):
        assert all(token not in (1, 7, 8) for token in out.tokens[:-1])
        if out.stopped_by == "eos":
            assert out.tokens[-1] in (1, 7, 8)
            inside += bool(out.rounds) and out.rounds[-1].committed < out.rounds[-1].accepted + 1
    assert inside > 0, "no EOS fell inside a draft: the test would prove nothing"


def test_numbers_of_a_decoded_text() -> None:
    rounds = [Round(2, 2, 2, 3, (1.0, 0.5), 0.1, 0.3, 0.5), Round(2, 2, 0, 1, (0.25,), 0.1, 0.3, 0.5)]
    out = DecodeOutput([1], [4, 5, 6, 7, 8], rounds, 0.2, "length")
    assert out.acceptance_length == 2.0
    assert out.alpha == pytest.approx(1.75 / 3)
    assert out.acceptance_at == [0.5, 1.0]
    assert out.tokens_per_second == 4.0


def test_a_path_that_ends_above_the_deepest_was_not_tested_there() -> None:
    rounds = [
        Round(3, 2, 1, 2, (1.0,), 0, 0, 0),  # accepted a leaf at depth 1; another path of the tree is 2 deep
        Round(3, 2, 2, 3, (1.0, 1.0), 0, 0, 0),
        Round(3, 2, 1, 2, (1.0, 0.0), 0, 0, 0),
        Round(3, 2, 0, 1, (0.0,), 0, 0, 0),
        Round(0, 0, 0, 1, (), 0, 0, 0),
    ]
    out = DecodeOutput([1], [4] * 10, rounds, 0.2, "length")
    assert out.acceptance_at == [0.75, 0.5]
    of_text = TextRecord.of("a", out)
    assert acceptance_at([(of_text.tested, of_text.accepted)]) == out.acceptance_at
    replayed = of_rounds(TargetText([1, 4, 4], 1, 20), rounds)
    assert (replayed.tested_K.tolist(), replayed.accepted_K.tolist()) == (of_text.tested, of_text.accepted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_ids": [3] * 128}, "prompt=128 tokens; expected fewer than the target's context of 128"),
        ({"input_ids": []}, "prompt=0 tokens"),
        ({"input_ids": torch.tensor([[3, 4], [5, 6]])}, "input_ids batch=2; expected 1 prompt per call"),
        ({"temperature": -1.0}, "temperature=-1.0; expected >= 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_k": 0}, "top_k=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0; expected >= 1"),
        ({"temperature": float("inf")}, "temperature=inf; expected >= 0 .* at most 1e[+]30"),
        ({"seed": 10**23}, f"seed={10**23}; expected >= 0 and at most {2**64 - 1}"),
        ({"seed": -1}, "seed=-1; expected >= 0"),
    ],
)
def test_settings_out_of_range_are_refused(decoder: SpeculativeDecoder, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decoder.generate(**{"input_ids": PROMPT, **options})


def test_draft_lengths_out_of_range_are_refused(tiny_target: LlamaForCausalLM) -> None:
    with pytest.raises(ConfigError, match="draft_length=0; expected >= 1"):
        SpeculativeDecoder(tiny_target, DraftModel(make_llama(1)), draft_length=0)
    with pytest.raises(ConfigError, match="draft_length=4; expected at most 3"):
        SpeculativeDecoder(tiny_target, Medusa.from_target(tiny_target, num_heads=3), draft_length=4)


def test_other_attention_implementations_are_refused_before_they_run() -> None:
    flex, ran = make_llama(), []
    flex.config._attn_implementation = "flex_attention"
    flex.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(ConfigError, match="attn_implementation='flex_attention'; expected sdpa, eager or flash"):
        SpeculativeDecoder(flex)
    assert not ran


def test_a_text_beyond_the_drafters_context_continues_without_drafts(tiny_target: LlamaForCausalLM) -> None:
    short = DraftModel(make_llama(max_position_embeddings=16))
    out = SpeculativeDecoder(tiny_target, short).generate(PROMPT, max_new_tokens=40, eos_token_id=None)
    alone = SpeculativeDecoder(tiny_target).generate(PROMPT, max_new_tokens=40, eos_token_id=None)
    assert out.tokens == alone.tokens
    assert out.rounds[0].accepted == 4, "the drafter is the target itself while it can read the text"
    assert out.rounds[-1].drafted == 0


def test_padded_vocabularies_share_their_common_part(tiny_target: LlamaForCausalLM) -> None:
    for size in (60, 70):
        drafter = DraftModel(make_llama(1, vocab_size=size))
        for policy in (None, "adaptive"):  # the second one measures the drafter first
            with pytest.raises(ConfigError, match=f"drafter vocabulary={size}; expected the target's 64"):
                SpeculativeDecoder(tiny_target, drafter, policy=policy)
        drafter.shared_vocabulary = 58
        assert fitted(torch.zeros(2, size), (58, 64)).tolist() == [[*[0.0] * 58, *[-torch.inf] * 6]] * 2
        for policy in ("chain", "best-first"):
            decoder = SpeculativeDecoder(tiny_target, drafter, policy=policy)
            expected = SpeculativeDecoder(tiny_target).generate(PROMPT, max_new_tokens=30).tokens
            assert decoder.generate(PROMPT, max_new_tokens=30).tokens == expected
            out = decoder.generate(PROMPT, max_new_tokens=30, temperature=1.0, eos_token_id=None)
            assert len(out.tokens) == 30


NOT_FINITE = product([torch.nan, torch.inf], [0.0, 1.0])


@pytest.mark.parametrize(
    ("policy", "setting"),
    spread([None, "chain", "adaptive", "best-first", "sampled-tree", "compiled"], NOT_FINITE),
    ids=str,
)
def test_logits_that_are_not_finite_end_with_an_error(
    tiny_target: LlamaForCausalLM, policy: str | None, setting: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first round on, in one text of a batch; -inf forbids a token."""
    value, temperature = setting
    monkeypatch.setitem(graphs.OPTIONS, "cpu", {"disable": True})
    drafter, compiled = None if policy is None else DraftModel(noisy_llama()), policy == "compiled"
    options = {"costs": Costs({1: 1.0, 16: 1.1}, {1: 0.1}), "policy": None if compiled else policy}
    decoder = SpeculativeDecoder(tiny_target, drafter, compile=compiled, **options)
    settings = {"max_new_tokens": 12, "eos_token_id": None, "temperature": temperature}

    def texts(new: float, row: int) -> list[list[int]]:
        """Decode where the logit of token 3 is `new`, after the prompts and in one row."""

        def change(_: torch.nn.Module, __: object, logits_BQV: torch.Tensor) -> None:
            if len(logits_BQV) > row and len(seen) > 0:
                logits_BQV[row, :, 3] = new
            seen.append(row)

        seen: list[int] = []
        with tiny_target.lm_head.register_forward_hook(change):
            return [text.tokens for text in decoder.generate_batch([PROMPT, [7, 8], [3]], **settings)]

    assert 3 not in texts(-torch.inf, 1)[1][1:]
    with pytest.raises(ConfigError, match="the target returns NaN or infinite logits in float32: the target's weights"):
        texts(value, 1)


def test_invalid_logits_that_a_processor_removes_are_none(tiny_target: LlamaForCausalLM) -> None:
    decoder = SpeculativeDecoder(tiny_target, DraftModel(make_llama(1)))

    def damage(_: torch.nn.Module, __: object, logits_BQV: torch.Tensor) -> None:
        logits_BQV[..., 3] = torch.nan

    tiny_target.lm_head.register_forward_hook(damage)
    for temperature in (0.0, 1.0):
        with pytest.raises(ConfigError, match="the target or a logits_processor returns NaN or infinite logits"):
            decoder.generate(PROMPT, temperature=temperature, logits_processor=[RepetitionPenaltyLogitsProcessor(1.1)])
        out = decoder.generate(PROMPT, temperature=temperature, logits_processor=[InfNanRemoveLogitsProcessor()])
        assert out.tokens


@pytest.mark.parametrize("kind", ["draft_model", "medusa", "suffix", "hybrid"])
@torch.no_grad()
def test_ids_that_the_tokenizer_does_not_have_are_never_drafted(kind: str, tiny_target: LlamaForCausalLM) -> None:
    """The target writes such an id only, and the drafter agrees: without the limit all drafts are accepted."""
    embeddings, padded = tiny_target.get_input_embeddings().weight, 60
    embeddings.copy_(embeddings[5].expand_as(embeddings))  # the same state everywhere
    state_H = tiny_target.model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
    tiny_target.lm_head.weight.zero_()[padded] = 20 * state_H / state_H.square().sum()
    tiny_target.lm_head.weight[3] = 15 * state_H / state_H.square().sum()
    options = {"max_new_tokens": 24, "eos_token_id": None, "seed": 0}
    for temperature, limit in product((0.0, 1.0), (None, 58)):
        drafter = {
            "draft_model": lambda: DraftModel(tiny_target),
            "medusa": lambda: Medusa.from_target(tiny_target),  # its chains are computed at once
            "suffix": SuffixRetrieval,
            "hybrid": lambda: Hybrid(Medusa.from_target(tiny_target)),
        }[kind]()
        if limit is not None:
            drafter.limit_vocabulary(limit)
        out = SpeculativeDecoder(tiny_target, drafter).generate(PROMPT, temperature=temperature, **options)
        accepted = sum(record.accepted for record in out.rounds)
        assert accepted > 12 if limit is None else accepted <= 1
        assert out.tokens.count(padded) > 20
