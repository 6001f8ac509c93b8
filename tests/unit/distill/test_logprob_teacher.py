"""A teacher that knows only the most likely tokens: objectives with a tail, file layouts, and training."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB, make_llama
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.distill.logprob_teacher import (
    LogprobTeacher,
    TokenTable,
    byte_alphabet,
    logprob_rows,
    require_reads_text_alone,
)
from draftsmith.distill.losses import LOSSES
from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS
from draftsmith.heads.base import DraftStates, TeacherSignals
from draftsmith.heads.draft_model import DraftModel
from draftsmith.train.batch import collate
from draftsmith.train.recipe import Recipe, parse_recipe

B, T, H, D, V = 3, 11, 8, 6, 13
ETA, LAST_ALPHA = 3.0, [0.3, 0.6, 0.5]
SUMMED = [kind for kind in LOSSES if kind != "accepted_length"]


class Both:
    """A batch as the target's states and as its `known` most likely tokens, and a drafter of three positions."""

    def __init__(self, seed: int, known: int, offsets: tuple[int, ...] = (1, 2, 3)) -> None:
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        mask = torch.rand(B, T, generator=generator) < 0.6
        hidden = 2 * torch.randn(B, T, H, dtype=torch.float64, generator=generator)
        ids = torch.randint(V, (B, T), generator=generator)
        self.lm_head = nn.Linear(H, V, bias=False).double().requires_grad_(False)
        self.p_log_BTV = self.lm_head(hidden).log_softmax(-1)
        best = self.p_log_BTV.topk(known)
        order = torch.rand(best.indices.shape).argsort(-1)  # files need not be sorted
        top_ids, top_log = best.indices.gather(-1, order), best.values.gather(-1, order)
        attention = torch.ones_like(ids)
        self.whole = TeacherSignals(ids, attention, hidden, mask)
        self.top_ids, self.top_log = top_ids, top_log
        torch.manual_seed(seed)
        self.head = nn.Linear(D, V).double()
        shapes = [(B, T, D)] * len(offsets)
        self.states = [torch.randn(*s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]
        self.unrolled = [DraftStates(s, self.head, offset=k) for s, k in zip(self.states, offsets, strict=True)]
        self.leaves = [*self.states, *self.head.parameters()]

    @property
    def coarse(self) -> TeacherSignals:
        ids, attention, mask = self.whole.input_ids_BT, self.whole.attention_mask_BT, self.whole.mask_BT
        nothing = torch.zeros(B, T, 0)
        return TeacherSignals(ids, attention, nothing, mask, top_ids_BTE=self.top_ids, top_log_BTE=self.top_log)


def _forbidden(_: Tensor) -> Tensor:
    raise AssertionError("there are no states to take logits of")


@pytest.mark.parametrize("dpace", [None, 0.5])
@pytest.mark.parametrize("kind", LOSSES)
def test_with_every_token_known_nothing_is_lost(kind: str, dpace: float | None) -> None:
    both = Both(seed=1, known=V)
    objective = Objective(kind, dpace=dpace, chunk_tokens=4)
    ours = objective(both.unrolled, both.coarse, _forbidden, LAST_ALPHA)
    theirs = objective(both.unrolled, both.whole, both.lm_head, LAST_ALPHA)
    # Sums that a draft's weights go into are kept in float32.
    for mine, other in zip(vars(ours).values(), vars(theirs).values(), strict=True):
        torch.testing.assert_close(mine.double(), other.double(), rtol=1e-6, atol=1e-6)
    gradients = (torch.autograd.grad(one.loss, both.leaves) for one in (ours, theirs))
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6 if dpace else 1e-9, atol=1e-12)


def _coarse_rows(ids: Tensor, logs: Tensor, q_log_V: Tensor) -> tuple[Tensor, Tensor]:
    """Return (p, q) over the known tokens and the tail, by subtraction."""
    kept = [i for i, token in enumerate(ids.tolist()) if token >= 0]
    p, q = logs[kept].exp(), q_log_V.exp()[ids[kept]]
    rest = [token for token in range(len(q_log_V)) if token not in ids.tolist()]
    if not rest:
        return p, q
    return torch.cat([p, 1 - p.sum(0, keepdim=True)]), torch.cat([q, q_log_V.exp()[rest].sum(0, keepdim=True)])


def _plain(kind: str, p: Tensor, q: Tensor, k: int) -> Tensor:
    m = (p + q) / 2
    kl, tv = (p * (p / q).log()).sum(), (p - q).abs().sum() / 2
    share = math.exp(-ETA * LAST_ALPHA[k])
    return {
        "kl": kl,
        "reverse_kl": (q * (q / p).log()).sum(),
        "js": (p * (p / m).log()).sum() / 2 + (q * (q / m).log()).sum() / 2,
        "tv": tv,
        "lk_alpha": -torch.minimum(p, q).sum().log(),
        "lk_lambda": share * kl + (1 - share) * tv,
    }[kind]


def _expected(kind: str, both: Both, k: int, b: int, anchor: int, place: int) -> tuple[Tensor, Tensor, bool]:
    """Return loss, alpha and equality of the argmaxes of one state, by plain formulas."""
    ids, logs = both.top_ids[b, place], both.top_log[b, place]
    q_log_V = both.unrolled[k].head(both.states[k][b, anchor]).log_softmax(-1)
    p, q = _coarse_rows(ids, logs, q_log_V)
    alpha = torch.minimum(p, q).sum()
    known = [(log, token) for log, token in zip(logs.tolist(), ids.tolist(), strict=True) if token >= 0]
    best = max(known)[1] if known else None
    agree = best == int(q_log_V.argmax())
    if kind in ("ce", "label"):
        end = place + 1 == T
        token = best if kind == "ce" else None if end else int(both.whole.input_ids_BT[b, place + 1])
        return (0 * q.sum() if token is None else -q_log_V[token]), alpha, agree
    return _plain(kind, p, q, k), alpha, agree


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("kind", SUMMED)
def test_with_some_known_the_tail_is_one_more_event(kind: str, chunk: int) -> None:
    """Value, alpha, matches and gradient with zero to four known tokens a position, by offset and by place."""
    both = Both(seed=2, known=4)
    generator = torch.Generator().manual_seed(3)
    both.top_ids[torch.rand(both.top_ids.shape, generator=generator) < 0.3] = -1
    both.top_ids[:, 4] = -1
    both.top_log[:2][both.top_ids[:2] < 0] = -torch.inf  # log-probabilities beside -1 are ignored
    places = torch.randint(-1, T, (B, T), generator=generator)
    both.unrolled[2] = DraftStates(both.states[2], both.head, places_BT=places)
    objective = Objective(kind, position_decay=0.5, chunk_tokens=chunk)
    sums = objective(both.unrolled, both.coarse, _forbidden, LAST_ALPHA)
    expected, alphas, matches = torch.zeros((), dtype=torch.float64), [0.0] * 3, [0] * 3
    for k, entry in enumerate(both.unrolled):
        for b in range(B):
            for anchor in range(T):
                place = anchor + entry.offset if entry.places_BT is None else int(places[b, anchor])
                if 0 <= place < T and both.whole.mask_BT[b, place]:
                    loss, alpha, agree = _expected(kind, both, k, b, anchor, place)
                    expected = expected + 0.5**k * loss
                    alphas[k] += alpha.item()
                    matches[k] += agree
    torch.testing.assert_close(sums.loss.double(), expected, rtol=1e-6, atol=1e-6)
    assert sums.alpha_K.tolist() == pytest.approx(alphas, rel=1e-6)
    assert sums.match_K.tolist() == matches
    assert sum(matches) > 0, "the case under test"
    ours, plain = (torch.autograd.grad(loss, both.leaves) for loss in (sums.loss, expected))
    for mine, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10)


def test_merging_tokens_can_only_hide_disagreement() -> None:
    """Data-processing inequality: with fewer known tokens divergences never grow and alpha never shrinks."""
    for kind in ("kl", "reverse_kl", "js", "tv", "lk_alpha"):
        losses, alphas = [], []
        for known in (1, 2, 4, 8, V):
            both = Both(seed=4, known=known)
            sums = Objective(kind)(both.unrolled, both.coarse, _forbidden)
            losses.append(sums.loss.item())
            alphas.append(sums.alpha_K.sum().item())
        both = Both(seed=4, known=V)
        whole = Objective(kind)(both.unrolled, both.whole, both.lm_head)
        # The tail's minimum probability allows for rounding.
        assert all(fewer <= more + 1e-5 for fewer, more in zip(losses, [*losses[1:], whole.loss.item()], strict=True))
        assert all(fewer >= more - 1e-5 for fewer, more in zip(alphas, [*alphas[1:], whole.alpha_K.sum()], strict=True))
        assert losses[0] < 0.9 * whole.loss.item()
        assert alphas[0] > 1.05 * whole.alpha_K.sum().item()


@pytest.mark.parametrize("kind", ["kl", "tv", "js", "ce", "label"])
def test_known_tokens_outside_a_draft_vocabulary_are_misses(kind: str) -> None:
    """With every token known, the result equals that from states; the draft vocabulary is not sorted."""
    some = torch.tensor([9, 1, 4, 5])
    both = Both(seed=5, known=V)
    head = nn.Linear(D, len(some)).double()
    entries = [DraftStates(both.states[0], head, offset=1, vocabulary_D=some)]
    ours = Objective(kind)(entries, both.coarse, _forbidden)
    theirs = Objective(kind)(entries, both.whole, both.lm_head)
    assert 0 < ours.match_K.item() == theirs.match_K.item()
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.alpha_K, theirs.alpha_K, rtol=1e-9, atol=1e-9)
    gradients = (torch.autograd.grad(one.loss, list(head.parameters())) for one in (ours, theirs))
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


def test_a_tail_of_nothing_and_impossible_tokens_stay_finite() -> None:
    """Rounded files: known tokens may add up to more than 1 or be impossible; the drafter's tail may be 1e-20."""
    both = Both(seed=6, known=3, offsets=(0,))
    both.top_log[..., 0], both.top_log[..., 1], both.top_log[..., 2] = 1e-4, -20.0, -torch.inf
    sure = torch.zeros(B, T, V)
    sure.scatter_(-1, both.top_ids[..., :1], 50.0)
    sure.requires_grad_()
    for kind in SUMMED:
        sums = Objective(kind)([DraftStates(sure, nn.Identity())], both.coarse, _forbidden, LAST_ALPHA)
        (gradient,) = torch.autograd.grad(sums.loss, [sure])
        assert sums.loss.isfinite(), kind
        assert gradient.isfinite().all(), kind
        assert sums.alpha_K.item() == pytest.approx(sums.count_K.item(), rel=1e-3)


def test_a_small_tail_keeps_its_gradient() -> None:
    """The drafter's tail of 1e-9 in float32, which 1 - sum of q would round to 0 or 6e-8."""
    logits = torch.tensor([[[21.0, 0.5, 0.0]]], requires_grad=True)
    ids = torch.tensor([[0]])
    top_log = torch.tensor([[[math.log(0.75)]]])
    signals = TeacherSignals(
        ids, ids + 1, torch.zeros(1, 1, 0), ids == 0, None, None, None, None, ids[..., None], top_log
    )
    loss = Objective("kl")([DraftStates(logits, nn.Identity())], signals, _forbidden).loss
    q = logits.detach().double().softmax(-1).flatten()
    expected = 0.75 * (0.75 / q[0]).log() + 0.25 * (0.25 / (q[1] + q[2])).log()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    tail = q[1:] / q[1:].sum()
    assert logits.grad.flatten()[1:].tolist() == pytest.approx((q[1:] - 0.25 * tail).tolist(), rel=1e-5)


# Files.


def _write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return str(path)


PROMPT, ANSWER = "ab", "cd"
"""2, 3 and 4, 5 in the tiny tokenizer; EOS is 1."""
KNOWN = [[("c", -0.5), ("e", -2.0)], [("f", -0.25), ("a", -3.0)]]
"""Alternatives to the two tokens of the answer; the second answer token is not among them, its own is -4."""
CHAT = {
    "content": [
        {
            "token": token,
            "logprob": log,
            "bytes": list(token.encode()),
            "top_logprobs": [{"token": t, "logprob": x, "bytes": list(t.encode())} for t, x in top],
        }
        for token, log, top in zip(ANSWER, (-0.5, -4.0), KNOWN, strict=True)
    ]
}
BARE_CHAT = {
    "content": [{key: entry[key] for key in ("token", "logprob", "top_logprobs")} for entry in CHAT["content"]]
}
COMPLETION = {"tokens": list(ANSWER), "token_logprobs": [-0.5, -4.0], "top_logprobs": [dict(top) for top in KNOWN]}
NUMBERED = {
    "tokens": ["token_id:4", "token_id:5"],
    "token_logprobs": [-0.5, -4.0],
    "top_logprobs": [{"token_id:4": -0.5, "token_id:6": -2.0}, {"token_id:7": -0.25, "token_id:2": -3.0}],
}
NUMBERED_CHAT = {
    "content": [
        {
            "token": token,
            "logprob": log,
            "bytes": list(token.encode()),
            "top_logprobs": [{"token": t, "logprob": x, "bytes": list(t.encode())} for t, x in top.items()],
        }
        for token, log, top in zip(*NUMBERED.values(), strict=True)
    ]
}
PLAIN = {
    "input_ids": [2, 3, 4, 5],
    "prompt_length": 2,
    "top_ids": [[4, 6, -1], [7, 2, 5]],
    "top_logprobs": [[-0.5, -2.0, 0.0], [-0.25, -3.0, -4.0]],
}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": PROMPT, "choices": [{"index": 0, "message": {"content": ANSWER}, "logprobs": CHAT}]},
        {"prompt": PROMPT, "logprobs": BARE_CHAT},
        {"messages": [{"role": "user", "content": PROMPT}], "choices": [{"logprobs": CHAT}]},
        {"prompt_token_ids": [2, 3], "prompt": "zz", "choices": [{"logprobs": COMPLETION}]},
        {"prompt": PROMPT, "text": ANSWER, "logprobs": COMPLETION},
        {"prompt": [2, 3], "choices": [{"logprobs": NUMBERED}]},
        {"prompt": PROMPT, "choices": [{"logprobs": NUMBERED_CHAT, "finish_reason": "length"}]},
        {"choices": [{"prompt_token_ids": [2, 3], "logprobs": NUMBERED, "finish_reason": "stop", "stop_reason": "d"}]},
        PLAIN,
    ],
)
def test_every_layout_says_the_same(row: dict[str, Any], tmp_path: Path, tiny_tokenizer: Any) -> None:
    (found,) = logprob_rows(_write(tmp_path / "file.jsonl", row), tiny_tokenizer)
    assert found["input_ids"] == [2, 3, 4, 5]
    assert found["spans"] == [[2, 4]]
    assert found["top_ids"] == [[4, 6, -1], [7, 2, 5]]
    assert found["top_logprobs"] == [[-0.5, -2.0, -math.inf], [-0.25, -3.0, -4.0]]


def test_prompts_are_those_of_the_template_with_the_tools_of_the_row(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Messages are read as in other files."""
    tiny_tokenizer.chat_template = (
        "{{ tools[0].function.name if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "xyz", "description": "", "parameters": {}}}]
    content = [{"type": "text", "text": PROMPT}]
    row = {"messages": [{"role": "user", "content": content}], "tools": tools, "logprobs": CHAT}
    (found,) = logprob_rows(_write(tmp_path / "file.jsonl", row), tiny_tokenizer)
    assert tiny_tokenizer.decode(found["input_ids"]) == "xyzabcd"


def test_answers_that_ended_are_followed_by_eos_of_which_nothing_is_known(tmp_path: Path, tiny_tokenizer: Any) -> None:
    ended = {"tokens": ["c", "<eos>"], "token_logprobs": [-0.5, -0.125], "top_logprobs": None}
    row = {
        "prompt": PROMPT,
        "choices": [
            {"logprobs": NUMBERED, "finish_reason": "stop"},
            {"logprobs": NUMBERED, "finish_reason": "length"},
            {"logprobs": ended, "finish_reason": "stop", "stop_reason": None},
            {"logprobs": NUMBERED, "finish_reason": "stop", "stop_reason": 9},
        ],
    }
    whole, cut, written, other = logprob_rows(_write(tmp_path / "file.jsonl", row), tiny_tokenizer)
    assert (whole["input_ids"], whole["spans"]) == ([2, 3, 4, 5, 1], [[2, 5]])
    assert (whole["top_ids"][2], whole["top_logprobs"][2]) == ([-1] * 3, [-math.inf] * 3)
    assert (cut["input_ids"], cut["spans"]) == ([2, 3, 4, 5], [[2, 4]])
    assert (written["input_ids"], written["top_ids"]) == ([2, 3, 4, 1], [[4, -1, -1], [1, -1, -1]])
    assert (other["input_ids"], other["spans"]) == ([2, 3, 4, 5, 9], [[2, 5]]), "vLLM names the token that ended it"


def test_alternatives_that_are_no_token_stay_unknown_and_are_counted(tmp_path: Path, tiny_tokenizer: Any) -> None:
    top = {"c": 0.0005, "ce": -1.0, "e": -9999.0, "token_id:64": -3.0, "\ufffd": -4.0}
    row = {"prompt": PROMPT, "logprobs": {"tokens": ["c"], "token_logprobs": [-0.5], "top_logprobs": [top]}}
    said: list[str] = []
    (found,) = logprob_rows(_write(tmp_path / "file.jsonl", row), tiny_tokenizer, said.append)
    assert (found["top_ids"], found["top_logprobs"]) == ([[4]], [[0.0]]), "rounded up by its server"
    assert "3 of 5 alternatives" in said[0]


def _byte_level_tokenizer() -> PreTrainedTokenizerFast:
    letters = byte_alphabet()
    vocabulary = {**letters, "Ġt": 256, "ï¿": 257, "ï¿½": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "t"), ("ï", "¿"), ("ï¿", "½")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def test_the_byte_alphabet_is_the_one_that_tokenizers_write() -> None:
    alphabet, written = byte_alphabet(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    for character in map(chr, range(0x800)):  # their UTF-8 has every byte up to 0xdf
        ((piece, _),) = written.pre_tokenize_str(character)
        assert bytes(alphabet[letter] for letter in piece) == character.encode()


def test_tokens_that_are_halves_of_a_character(tmp_path: Path) -> None:
    """The euro sign is e2 82 ac, each byte a token; only `bytes` and OpenAI's escapes identify them."""
    tokenizer = _byte_level_tokenizer()
    assert tokenizer("€ t")["input_ids"] == [0xE2, 0x82, 0xAC, 256], "the vocabulary's ids are the bytes"
    said = [("\ufffd", [0xE2]), ("\\x82", [0x82]), ("\ufffd", [0xAC]), (" t", [32, 116]), ("<|end|>", None)]
    content = [{"token": token, "bytes": raw, "logprob": -0.5} for token, raw in said]
    tokens = ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", " t", "<|end|>"]
    row = {"prompt": " t", "logprobs": {"content": content}, "finish_reason": "stop"}
    other = {"prompt": " t", "logprobs": {"tokens": tokens, "token_logprobs": [-0.5] * 5}, "finish_reason": "stop"}
    for found in logprob_rows(_write(tmp_path / "file.jsonl", row, other), tokenizer):
        assert found["input_ids"] == [256, 0xE2, 0x82, 0xAC, 256, 259]
        assert found["top_ids"] == [[0xE2], [0x82], [0xAC], [256], [259]]
    replaced = {"token": "\ufffd", "bytes": list("\ufffd".encode()), "logprob": -0.5}
    file = _write(tmp_path / "lost.jsonl", {"prompt": "t", "logprobs": {"content": [replaced]}})
    assert tokenizer("\ufffd")["input_ids"] == [258], "is a token, and is what servers write for any broken one"
    with pytest.raises(ConfigError, match=r"lost.jsonl:1: token 1 is '\ufffd'; expected one token"):
        logprob_rows(file, tokenizer)
    assert TokenTable(tokenizer).find("?") == ord("?")
    assert TokenTable(tokenizer).find("\ud83d") is None, "half a surrogate is no question mark"


def test_the_kind_of_a_vocabulary_does_not_depend_on_special_tokens() -> None:
    """DeepSeek's special tokens have sentencepiece's space in a byte-level vocabulary; the other way round, too."""
    tokenizer = _byte_level_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<｜begin▁of▁sentence｜>"})
    table = TokenTable(tokenizer)
    assert [table.find(" t"), table.find("\n"), table.find("<｜begin▁of▁sentence｜>")] == [256, 10, 260]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab={"é": 0, "a": 1}, merges=[])), bos_token="<Ġ>"
    )
    assert TokenTable(tokenizer).find("é") == 0


def test_tokens_of_sentencepiece() -> None:
    """Byte pieces are used where no other piece matches; special tokens are their own text."""
    vocabulary = {"<unk>": 0, "<0x0A>": 1, "<0x61>": 2, "<0xE2>": 3, "▁the": 4, "a": 5, "▁": 6, "the": 7, "▁▁": 8}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True)), eos_token="</s>"
    )
    table = TokenTable(tokenizer)
    texts = ["\n", "a", " the", " ", "the", "  ", "</s>", "<unk>"]
    assert [table.find(text) for text in texts] == [1, 5, 4, 6, 7, 8, 9, 0]
    assert table.find("?", [0xE2]) == 3
    assert table.find("b") is None


def test_a_text_that_two_tokens_share_is_neither() -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab={"▁a": 0, "b": 1}, merges=[])), additional_special_tokens=[" a"]
    )
    table = TokenTable(tokenizer)
    assert (table.find(" a"), table.find("b"), table.find("token_id:0")) == (None, 1, 0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": PROMPT}, "no log-probabilities; expected 'logprobs'"),
        ({"prompt": PROMPT, "choices": []}, "choices=[]; expected a list of answers"),
        ({"logprobs": COMPLETION}, "no prompt; expected 'prompt', 'messages' or 'prompt_token_ids'"),
        ({"prompt": [2, 64], "logprobs": COMPLETION}, "expected token ids below 64"),
        (
            {"messages": [{"role": "assistant", "content": "cd"}], "logprobs": COMPLETION},
            "messages end with the assistant;",
        ),
        ({"messages": ["ab"], "logprobs": COMPLETION}, "message 1 is str; expected role and content"),
        (
            {"prompt": PROMPT, "logprobs": {"tokens": ["c", "ce"], "token_logprobs": [-1.0, -1.0]}},
            "token 2 is 'ce'; expected one token of the target's vocabulary",
        ),
        (
            {"prompt": PROMPT, "logprobs": {"tokens": ["c", "d"], "token_logprobs": [None, -1.0]}},
            "the first token has no probability; expected the answer alone (echo=false)",
        ),
        ({"prompt": PROMPT, "logprobs": {**COMPLETION, "token_logprobs": [-1.0]}}, "2 tokens; expected as many"),
        (
            {"prompt": PROMPT, "logprobs": {"tokens": ["c"], "token_logprobs": [0.7]}},
            "log-probability 0.7 at token 1; expected a number up to 0",
        ),
        (
            {"prompt": PROMPT, "logprobs": {"tokens": ["c"], "token_logprobs": [math.nan]}},
            "log-probability nan at token 1",
        ),
        (
            {**PLAIN, "top_logprobs": [[-0.5, -0.1, 0.0], [-1.0, -2.0, -3.0]]},
            "probabilities of 1.51 at token 1; expected at most 1 together",
        ),
        ({**PLAIN, "prompt_length": 0}, "prompt_length=0; expected 1 to 4"),
        ({**PLAIN, "top_ids": [[4, 6, -1]]}, "top_ids of 1 tokens; expected 2"),
        ({**PLAIN, "top_ids": [[4, 4, -1], [7, 2, 5]]}, "token 1 has [4, 4, -1]"),
        ({**PLAIN, "top_ids": [[4, 99, -1], [7, 2, 5]]}, "expected token ids below 64"),
        ({**PLAIN, "input_ids": [2, 3], "top_ids": [], "top_logprobs": []}, "an answer of no token"),
        ({"prompt": PROMPT, "logprobs": {"content": [{"token": "c"}]}}, "expected 'token' and 'logprob'"),
        (
            {"prompt": PROMPT, "logprobs": {"content": [{"token": "c", "logprob": -1.0, "bytes": [300]}]}},
            "token 1 is {",
        ),
    ],
)
def test_refusals_name_the_line(row: dict[str, Any], message: str, tmp_path: Path, tiny_tokenizer: Any) -> None:
    file = _write(tmp_path / "file.jsonl", PLAIN, row)
    with pytest.raises(ConfigError) as error:
        logprob_rows(file, tiny_tokenizer)
    assert str(error.value).startswith(f"{file}:2: ")
    assert message in str(error.value)


# The teacher.


def test_signals_stand_before_the_tokens_that_they_are_about(
    tmp_path: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: Any
) -> None:
    file = _write(tmp_path / "file.jsonl", PLAIN, {"prompt": "abc", "logprobs": COMPLETION, "finish_reason": "stop"})
    rows = logprob_rows(file, tiny_tokenizer)
    batch = collate(rows, [1, 0], torch.device("cpu"), limit=6)
    signals = LogprobTeacher(tiny_target, rows).signals(**vars(batch))
    assert signals.hidden_BTH.shape == (2, 6, 0)
    none = [-1] * 3
    known = [[4, 6, -1], [7, 2, 5]]
    assert signals.top_ids_BTE.tolist() == [[none, none, *known, none, none][:6], [none, *known, none, none, none][:6]]
    assert torch.equal(signals.top_log_BTE == -torch.inf, signals.top_ids_BTE == -1)
    for b in range(2):
        for t in range(5):
            if signals.mask_BT[b, t] and signals.top_ids_BTE[b, t, 0] >= 0:
                assert batch.input_ids_BT[b, t + 1] in signals.top_ids_BTE[b, t], "the written token is known"


def test_packed_rows_know_what_their_documents_do(
    tmp_path: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: Any
) -> None:
    """A packed row's `top_ids` are those of its documents in order, as its spans are."""
    file = _write(tmp_path / "file.jsonl", PLAIN, {"prompt": "abc", "logprobs": COMPLETION})
    first, second = logprob_rows(file, tiny_tokenizer)
    packed = {key: [*first[key], *second[key]] for key in ("input_ids", "top_ids", "top_logprobs")}
    rows = Dataset.from_list([{**packed, "spans": [[2, 4], [7, 9]], "documents": [4, 5]}])
    signals = LogprobTeacher(tiny_target, rows).signals(**vars(collate(rows, [0], torch.device("cpu"), limit=9)))
    none, known = [-1] * 3, [[4, 6, -1], [7, 2, 5]]
    assert signals.top_ids_BTE.tolist() == [[none, *known, none, none, none, *known, none]]
    assert signals.documents_BT.tolist() == [[0] * 4 + [1] * 5]


@pytest.mark.parametrize("kind", LOSSES)
def test_a_draft_model_has_the_gradient_that_states_give(kind: str, tiny_target: LlamaForCausalLM) -> None:
    """With every token known, the gradients of all weights of a draft model are equal."""
    target = tiny_target.double()
    drafter = DraftModel.from_target(target, num_hidden_layers=1, hidden_size=8, num_attention_heads=2).double()
    ids, mask = torch.randint(VOCAB, (2, 9)), torch.rand(2, 9) < 0.7
    whole = OnlineTeacher(target).signals(ids, torch.ones_like(ids), mask)
    log_BTV = target.lm_head(whole.hidden_BTH).log_softmax(-1)
    every = torch.arange(VOCAB).expand(log_BTV.shape)
    coarse = replace(whole, hidden_BTH=log_BTV[..., :0], top_ids_BTE=every, top_log_BTE=log_BTV)
    weights = list(drafter.parameters())
    ours, theirs = (
        torch.autograd.grad(Objective(kind)(drafter.unroll(one), one, target.lm_head, [0.5]).loss, weights)
        for one in (coarse, whole)
    )
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-12)


def test_an_appended_eos_has_no_known_probabilities(tmp_path: Path, tiny_target: Any, tiny_tokenizer: Any) -> None:
    """At the position of an appended EOS only the label term has a gradient."""
    file = _write(tmp_path / "file.jsonl", {"prompt": PROMPT, "logprobs": COMPLETION, "finish_reason": "stop"})
    rows = logprob_rows(file, tiny_tokenizer)
    batch = collate(rows, [0], torch.device("cpu"))
    signals = LogprobTeacher(tiny_target, rows).signals(**vars(batch))
    for kind in SUMMED:
        state = torch.randn(1, 5, VOCAB, requires_grad=True)
        Objective(kind)([DraftStates(state, nn.Identity())], signals, _forbidden, LAST_ALPHA).loss.backward()
        assert state.grad[0, 1:3].any(-1).all()
        moved = state.grad[0, 3].abs().max().item()
        assert moved > 0.1 if kind == "label" else moved < 1e-6, kind


def _answered(target: LlamaForCausalLM, prompts_BT: Tensor, length: int, top: int) -> list[dict[str, Any]]:
    """Return rows in vLLM's layout: sampled by the target, with the `top` most likely tokens at each place."""
    ids_BT = prompts_BT
    found = [{"tokens": [], "token_logprobs": [], "top_logprobs": []} for _ in prompts_BT]
    for _ in range(length):
        log_BV = target(ids_BT).logits[:, -1].log_softmax(-1)
        next_B1, best = torch.multinomial(log_BV.exp(), 1), log_BV.topk(top)
        ids_BT = torch.cat([ids_BT, next_B1], -1)
        for b, one in enumerate(found):
            token = int(next_B1[b])
            pairs = zip(best.indices[b].tolist(), best.values[b].tolist(), strict=True)
            one["tokens"].append(f"token_id:{token}")
            one["token_logprobs"].append(log_BV[b, token].item())
            one["top_logprobs"].append({f"token_id:{other}": log for other, log in pairs})
    choices = [[{"logprobs": one, "finish_reason": "length"}] for one in found]
    return [{"prompt_token_ids": p.tolist(), "choices": c} for p, c in zip(prompts_BT, choices, strict=True)]


def test_a_draft_model_learns_the_target_from_a_file_alone(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Train from the file; measure with the target's full distribution on held-out answers."""
    target = make_llama()
    torch.manual_seed(0)
    with torch.no_grad():
        written = _answered(target, torch.randint(2, VOCAB, (272, 4)), 16, top=5)
    rows = logprob_rows(_write(tmp_path / "file.jsonl", *written), tiny_tokenizer)
    torch.manual_seed(1)
    drafter = DraftModel.from_target(target, num_hidden_layers=1, init="target_layers")
    teacher, online, objective = LogprobTeacher(target, rows), OnlineTeacher(target), Objective("kl")
    heldout = collate(rows, list(range(256, 272)), torch.device("cpu"))

    def kl_to_the_target() -> float:
        with torch.no_grad():
            signals = online.signals(**vars(heldout))
            sums = objective(drafter.unroll(signals), signals, online.lm_head)
        return (sums.loss / sums.count_K).item()

    before, optimizer = kl_to_the_target(), torch.optim.Adam(drafter.parameters(), lr=1e-3)
    watched = target.register_forward_pre_hook(lambda *_: _forbidden(torch.empty(0)))
    for step in range(64):
        batch = collate(rows, [(step * 16 + i) % 256 for i in range(16)], torch.device("cpu"))
        signals = teacher.signals(**vars(batch))
        sums = objective(drafter.unroll(signals), signals, teacher.lm_head)
        optimizer.zero_grad()
        (sums.loss / sums.count_K).backward()
        optimizer.step()
    watched.remove()
    # From 0.36 to 0.29 nats (from states to 0.25); to 0.40 without the tail, to 0.42 with the places shifted by one.
    assert kl_to_the_target() < 0.87 * before


# Drafters and objectives that need hidden states.


def test_only_drafters_that_read_text_alone() -> None:
    require_reads_text_alone(DraftModel)
    for name, kind in HEADS.items():
        if name != "draft_model":
            with pytest.raises(ConfigError, match=f"drafter.type='{name}', which reads the target's hidden states"):
                require_reads_text_alone(kind)


def test_objectives_that_need_more_than_a_file() -> None:
    both = Both(seed=7, known=3)
    for settings, message in (
        ({"temperatures": (1.0, 0.7)}, "objective.temperature=0.7 with teacher.kind='logprobs'; expected 1"),
        ({"top_k_weight": 0.5}, "objective.top_k_weight=0.5 with teacher.kind='logprobs'; expected 0"),
        ({"feature_weight": 0.5}, "objective.feature_weight=0.5 with teacher.kind='logprobs'; expected 0"),
    ):
        objective = Objective(**settings)
        objective.require_usable("online")
        with pytest.raises(ConfigError, match=message):
            objective(both.unrolled, both.coarse, _forbidden)


def _recipe(**changes: Any) -> Recipe:
    values = {"name": "file", "output": "out", "drafter": {"type": "draft_model"}}
    return parse_recipe({**values, "teacher": {"kind": "logprobs", "file": "file.jsonl"}, **changes}, "a test")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": {"kind": "logprobs"}}, "teacher.kind='logprobs' without teacher.file"),
        ({"teacher": {"file": "file.jsonl"}}, "teacher.file=file.jsonl with teacher.kind='online'"),
        ({"cotrain": {}}, "teacher.kind='logprobs' with cotrain"),
        ({"drafter": {"type": "medusa"}}, "drafter.type='medusa', which reads"),
        ({"objective": {"temperature": 0.5}}, "objective.temperature=0.5"),
    ],
)
def test_recipes_that_no_file_can_serve(changes: dict[str, Any], message: str) -> None:
    _recipe()
    _recipe(teacher={"kind": "cached"})
    with pytest.raises(ConfigError, match=message):
        _recipe(**changes)
