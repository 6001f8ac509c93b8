"""Logits processors, stopping criteria and padded batches against transformers' `generate`, at every node of a tree."""

from functools import cache

import pytest
import torch
from conftest import make_llama, noisy_llama, spread
from transformers import (
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from draftsmith import as_custom_generate
from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.sequence import DecodeOutput
from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.retrieval import SuffixRetrieval

PROMPTS = [[5, 9, 33, 2], [7, 7, 8], [40], [11, 12, 13, 14, 15, 16, 17]]
POLICIES = ("chain:draft_length=4", "best-first:size=8,depth=4", "best-first:size=9,depth=3")
NEW_TOKENS = 24


class OnlyEven(LogitsProcessor):
    """A custom constraint that depends on the text: even tokens follow odd ones, and odd tokens even ones."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        assert input_ids.shape[0] == scores.shape[0]
        parity = (input_ids[:, -1:] + 1) % 2
        allowed = torch.arange(scores.shape[1])[None] % 2 == parity
        scores[~allowed] = -torch.inf  # in place, as some processors do
        return scores


class Sentences(LogitsProcessor):
    """A grammar: two tokens are in no sentence, and nothing follows a text with one of them or with an end."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        outside = torch.isin(input_ids, torch.tensor([4, 45, 19, 53])).any(-1, keepdim=True)
        scores[:, [4, 45]] = -torch.inf
        return scores.masked_fill(outside, -torch.inf)


class EndsWithRepeat(StoppingCriteria):
    """A user's own criterion: the last token has occurred before among the last six."""

    def __call__(self, input_ids: torch.LongTensor, scores: object, **kwargs: object) -> torch.BoolTensor:
        return torch.tensor([row[-1] in row[-6:-1] for row in input_ids.tolist()])


# Arguments of `generate` from which transformers makes processors, and processors of a user's own.
SETTINGS: dict[str, dict] = {
    "repetition penalty": {"repetition_penalty": 1.7},
    "no repeated n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[19], [53, 19], [45, 43]]},
    "sequence bias": {"sequence_bias": [[[19], -3.0], [[4, 45], 5.0]]},
    "min length": {"min_new_tokens": 12, "eos_token_id": [19, 14, 1]},
    "forced end": {"forced_eos_token_id": 1},
    "suppressed": {"suppress_tokens": [19, 14], "begin_suppress_tokens": [4, 45, 43]},
    "length penalty": {"exponential_decay_length_penalty": (4, 1.3)},
    "prefix function": {
        "prefix_allowed_tokens_fn": lambda row, ids: [3, 5, 8 + row] if ids[-1] > 30 else list(range(20, 64))
    },
    "own constraint": {"logits_processor": LogitsProcessorList([OnlyEven()])},
    "nothing after the end": {"logits_processor": LogitsProcessorList([Sentences()]), "eos_token_id": [19, 53]},
    "all together": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 8,
        "logits_processor": LogitsProcessorList([OnlyEven()]),
    },
}


@pytest.fixture
def drafter() -> DraftModel:
    return DraftModel(noisy_llama(0.1))


def texts(model: LlamaForCausalLM, prompts: list[list[int]], **settings: object) -> list[list[int]]:
    """Return the new tokens of each row of `generate` with left padding, up to the first EOS."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, pad_token_id=0, **settings)
    return out[:, width:].tolist()


@cache
def greedy_texts(name: str | None) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Return the texts of `generate` with these settings, each decoded alone and all together."""
    target, settings = make_llama(), {} if name is None else SETTINGS[name]
    alone = [texts(target, [prompt], do_sample=False, **settings) for prompt in PROMPTS]
    return alone, texts(target, PROMPTS, do_sample=False, **settings)


@pytest.mark.parametrize(("name", "policy"), spread(SETTINGS, POLICIES))
def test_greedy_text_with_processors_is_that_of_generate(
    tiny_target: LlamaForCausalLM, drafter: DraftModel, name: str, policy: str
) -> None:
    accepted: list[DecodeOutput] = []
    own = as_custom_generate(drafter, policy=policy, on_output=accepted.extend)
    alone, together = greedy_texts(name)
    assert alone != greedy_texts(None)[0], "the processor changed nothing: the test would prove nothing"
    for prompt, expected in zip(PROMPTS[:2], alone, strict=False):
        assert texts(tiny_target, [prompt], do_sample=False, custom_generate=own, **SETTINGS[name]) == expected
    assert sum(record.accepted for out in accepted for record in out.rounds) > 0
    assert texts(tiny_target, PROMPTS, do_sample=False, custom_generate=own, **SETTINGS[name]) == together


ANSWERS = [
    [[20, 21, 22, 1], [20, 23, 24, 25, 1], [26, 1]],
    [[30, 31, 32, 1], [33, 34, 1]],
    [[40, 41, 42, 43, 1], [44, 1]],
    [[50, 51, 1], [52, 53, 54, 1]],
]


@pytest.mark.parametrize("copies", [1, 2], ids=["T=0", "T=1"])
@pytest.mark.parametrize("policy", [*POLICIES, None])
def test_a_prefix_function_has_answers_for_each_prompt(
    tiny_target: LlamaForCausalLM, drafter: DraftModel, policy: str | None, copies: int
) -> None:
    """Drafts may leave them; the function is called with each text's own row. Without a policy drafts are retrieved."""
    prompts = [[answers[0][0], 9, *prompt] for answers, prompt in zip(ANSWERS, PROMPTS, strict=True)]
    width = max(map(len, prompts))
    seen: list[tuple[int, list[int]]] = []

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        prompt, new = ids[:width].tolist(), ids[width:].tolist()
        seen.append((row, prompt))
        if 1 in new:
            return [0]
        return sorted({answer[len(new)] for answer in ANSWERS[row] if answer[: len(new)] == new})

    settings = {"do_sample": copies > 1, "num_return_sequences": copies, "prefix_allowed_tokens_fn": allowed}
    kept: list[DecodeOutput] = []
    drafts = SuffixRetrieval(min_match=1) if policy is None else drafter
    own = as_custom_generate(drafts, policy=policy, on_output=kept.extend)
    out = texts(tiny_target, prompts, custom_generate=own, **settings)
    assert sum(record.drafted for text in kept for record in text.rounds) > 0
    assert len({tuple(prompt) for _, prompt in seen}) == len(set(map(str, seen))) == len(prompts)
    assert all([token for token in new if token != 0] in ANSWERS[row // copies] for row, new in enumerate(out))
    if copies == 1:
        assert out == texts(tiny_target, prompts, **settings)


def test_stop_strings_that_end_in_mid_block_are_honoured(
    tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """The target drafts for itself with gamma 8, so most stop strings end inside an accepted draft."""
    plain = texts(tiny_target, [PROMPTS[0]], do_sample=False)[0]
    written = tiny_tokenizer.decode(plain)
    decoder = SpeculativeDecoder(tiny_target, DraftModel(make_llama()), draft_length=8)
    inside = 0
    for start in range(2, 18):
        stop = written[start : start + 2]
        stops = stop if start % 2 else [stop]
        expected = texts(tiny_target, [PROMPTS[0]], do_sample=False, stop_strings=stops, tokenizer=tiny_tokenizer)[0]
        out = decoder.generate(
            PROMPTS[0], max_new_tokens=NEW_TOKENS, stop_strings=stops, tokenizer=tiny_tokenizer, eos_token_id=None
        )
        assert out.tokens == expected
        if out.stopped_by == "criteria" and out.rounds:
            inside += out.rounds[-1].committed < out.rounds[-1].accepted + 1
    assert inside > 3


def test_criteria_of_a_user_and_of_transformers(tiny_target: LlamaForCausalLM, drafter: DraftModel) -> None:
    for criterion in (EndsWithRepeat(), MaxTimeCriteria(0.0)):
        for prompt in PROMPTS:
            expected = texts(tiny_target, [prompt], do_sample=False, stopping_criteria=[criterion])
            own = as_custom_generate(drafter)
            assert (
                texts(tiny_target, [prompt], do_sample=False, stopping_criteria=[criterion], custom_generate=own)
                == expected
            )


def test_an_empty_distribution_is_reported_with_the_name_of_its_processor(
    tiny_target: LlamaForCausalLM, drafter: DraftModel
) -> None:
    class Nothing(LogitsProcessor):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            return scores if input_ids.shape[1] < 8 else torch.full_like(scores, -torch.inf)

    for temperature in (0.0, 1.0):
        with pytest.raises(DraftsmithError, match=r"logits_processor=Nothing forbids every token after 8 tokens"):
            SpeculativeDecoder(tiny_target, drafter).generate(
                PROMPTS[0], temperature=temperature, logits_processor=[OnlyEven(), Nothing()], eos_token_id=None
            )


def test_processors_that_depend_on_more_than_the_text_are_refused(
    tiny_target: LlamaForCausalLM, drafter: DraftModel
) -> None:
    own = as_custom_generate(drafter)
    with pytest.raises(ConfigError, match="UnbatchedClassifierFreeGuidanceLogitsProcessor runs the model itself"):
        texts(tiny_target, [PROMPTS[0]], do_sample=False, guidance_scale=1.5, custom_generate=own)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 2}, "num_beams=2; expected 1: beam_search is not supported"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6; expected None: contrastive_search is not supported"),
        ({"dola_layers": "high"}, "dola_layers='high'; expected None: dola_generation is not supported"),
    ],
)
def test_other_modes_of_decoding_are_refused(
    tiny_target: LlamaForCausalLM, drafter: DraftModel, settings: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        texts(
            tiny_target, [PROMPTS[0]], **{"do_sample": False, **settings}, custom_generate=as_custom_generate(drafter)
        )


@pytest.mark.parametrize("lengths", [[3], [14, 9]], ids=str)
def test_a_maximum_length_among_the_criteria_replaces_that_of_generate(
    tiny_target: LlamaForCausalLM, drafter: DraftModel, lengths: list[int]
) -> None:
    ids = torch.tensor([PROMPTS[0]])
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    settings |= {"stopping_criteria": StoppingCriteriaList(map(MaxLengthCriteria, lengths))}
    expected = tiny_target.generate(ids, **settings)
    assert expected.shape[1] == max(5, min(lengths))
    assert (
        tiny_target.generate(ids, custom_generate=as_custom_generate(drafter), **settings).tolist() == expected.tolist()
    )


def test_sampling_through_generate_reproduces_and_follows_its_settings(
    tiny_target: LlamaForCausalLM, drafter: DraftModel
) -> None:
    own = as_custom_generate(drafter, policy="sampled-tree")

    def sampled(seed: int, **settings: object) -> list[list[int]]:
        torch.manual_seed(seed)
        return texts(tiny_target, PROMPTS, do_sample=True, custom_generate=own, **settings)

    assert sampled(0, temperature=0.9) == sampled(0, temperature=0.9) != sampled(1, temperature=0.9)
    # With top_k=1 sampling has one outcome: the greedy text.
    assert sampled(0, top_k=1) == texts(tiny_target, PROMPTS, do_sample=False)


@pytest.mark.parametrize("pad", [None, 3])
def test_ended_rows_are_padded_as_in_generate(drafter: DraftModel, pad: int | None) -> None:
    target, prompts = make_llama(pad_token_id=None), torch.tensor([[5, 9, 33, 2], [40, 1, 2, 3], [11, 12, 13, 14]])
    mask = torch.ones_like(prompts)
    settings = {"attention_mask": mask, "pad_token_id": pad, "eos_token_id": [19, 14], "max_length": 20}
    expected = target.generate(prompts, do_sample=False, **settings)
    ended = (expected[:, -1] == (19 if pad is None else pad)).sum()
    assert 0 < ended < len(prompts), "some rows end before others"
    out = target.generate(prompts, do_sample=False, custom_generate=as_custom_generate(drafter), **settings)
    assert out.tolist() == expected.tolist()


@pytest.mark.parametrize("skip_prompt", [True, False])
def test_the_streamer_gets_what_generate_puts_into_it(
    tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, drafter: DraftModel, skip_prompt: bool
) -> None:
    def streamed(custom: bool) -> tuple[str, list[list[int]]]:
        streamer = TextIteratorStreamer(tiny_tokenizer, skip_prompt=skip_prompt)
        own = {"custom_generate": as_custom_generate(drafter, streamer=streamer)}
        out = texts(tiny_target, [PROMPTS[0]], do_sample=False, **(own if custom else {"streamer": streamer}))
        return "".join(streamer), out

    assert streamed(custom=True) == streamed(custom=False)
