"""The stored states are those that the target computes on the whole text."""

from collections.abc import Sequence

import pytest
import torch
from conftest import make_llama
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

from draftsmith import SpeculativeDecoder
from draftsmith.decode.policies import Chain, Policy, StaticTree
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.eval.teacher_forced import TargetText
from draftsmith.heads import DraftModel, Eagle3, Medusa, Mtp
from draftsmith.heads.base import FINAL, Drafter
from draftsmith.train.online.buffer import LEAST_TOKENS, OpenRow, Row, RowBuffer, signals_of

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 33, 2, 5, 9], [7], [40, 3, 8]]
FLAT = Sampling()


class Stores:
    """Closes the rows of all texts after `length` decoded tokens, and at the end."""

    def __init__(self, context: int, length: int) -> None:
        self.context, self.length, self.rows, self.final = context, length, list[Row](), False
        self.open: dict[int, OpenRow] = {}

    def attach(self, target: PreTrainedModel, drafter: Drafter | None) -> Drafter | None:
        self.final = drafter.needs.layers == (FINAL,)
        return drafter

    def begin(self, texts: Sequence[DecodeSequence], sampling: Sampling) -> None:
        self.open = {id(text): OpenRow(text, sampling, self.context, self.final) for text in texts}

    def read(self, text: DecodeSequence, hidden_nH: Tensor, features_nF: Tensor | None) -> None:
        self.open[id(text)].add(hidden_nH, features_nF)

    def between_rounds(self) -> None:
        for one in self.open.values():
            if one.decoded >= self.length:
                self.keep(one)

    def keep(self, one: OpenRow) -> None:
        row = one.close()
        if row is not None:
            self.rows.append(row)


def stored(
    target: PreTrainedModel, drafter: Drafter, policy: Policy, context: int = 100, length: int = 1000
) -> tuple[list[Row], list[list[int]]]:
    stores = Stores(context, length)
    decoder = SpeculativeDecoder(target, drafter, policy=policy, learn=stores)
    outputs = decoder.generate_batch(PROMPTS, max_new_tokens=24, temperature=1.0, seeds=3, eos_token_id=[1, 11])
    for one in stores.open.values():
        stores.keep(one)
    return stores.rows, [output.prompt_tokens + output.tokens for output in outputs]


def deep_target() -> LlamaForCausalLM:
    return make_llama(num_hidden_layers=6).requires_grad_(False)


@pytest.mark.parametrize("policy", [Chain(3), StaticTree(((0,), (1,), (0, 0)))], ids=str)
@pytest.mark.parametrize("kind", [DraftModel, Eagle3, Medusa, Mtp])
def test_states_are_those_of_the_whole_text(kind: type[Medusa], policy: Policy) -> None:
    target = deep_target()
    drafter = kind.from_target(target).eval()
    rows, texts = stored(target, drafter, policy, context=0 if kind is Medusa else 100)
    long = [(text, len(prompt)) for text, prompt in zip(texts, PROMPTS, strict=True)]
    long = [(text, first) for text, first in long if len(text) - first >= LEAST_TOKENS]
    assert len(rows) == len(long) > 1
    signals = signals_of(rows, CPU)
    for number, (text, first) in enumerate(long):
        start = first - 1 if kind is Medusa else 0
        ids_1T = torch.tensor([text])
        known = OnlineTeacher(target, drafter.needs.layers).signals(ids_1T, torch.ones_like(ids_1T), ids_1T > 0)
        length = len(text) - start
        assert signals.input_ids_BT[number, :length].tolist() == text[start:]
        assert signals.attention_mask_BT[number].sum() == length
        trained = signals.mask_BT[number].nonzero()[:, 0].tolist()
        assert trained == list(range(first - start, length - 1)), "decoded positions whose next token is known"
        part = slice(first - 1, len(text) - 1)
        part = slice(0, len(text) - 1) if kind is Mtp else part  # its features are the final states, of the prompt too
        ours_nH = signals.hidden_BTH[number, part.start - start : length - 1]
        torch.testing.assert_close(ours_nH, known.hidden_BTH[0, part], rtol=1e-4, atol=1e-4)
        if known.features_BTF is not None:
            ours_TF = signals.features_BTF[number, : length - 1]
            torch.testing.assert_close(ours_TF, known.features_BTF[0, :-1], rtol=1e-4, atol=1e-4)


def test_long_texts_become_rows_that_begin_with_the_text_before_them() -> None:
    target = deep_target()
    drafter = Eagle3.from_target(target).eval()
    whole, texts = stored(target, drafter, Chain(2))
    rows, same = stored(target, drafter, Chain(2), context=3, length=5)
    assert texts == same
    assert len(rows) > len(whole)
    decoded, every = (
        sorted(token for row in some for token in row.text.tokens[row.text.prompt_length :]) for some in (rows, whole)
    )
    assert len(every) - len(decoded) < LEAST_TOKENS * len(texts), "only short ends are left out"
    for row in rows:
        text = next(
            text for text in texts if any(text[i : i + len(row.text.tokens)] == row.text.tokens for i in range(40))
        )
        start = next(i for i in range(40) if text[i : i + len(row.text.tokens)] == row.text.tokens)
        assert row.text.prompt_length <= 4
        ids_1T = torch.tensor([text])
        known = OnlineTeacher(target, drafter.needs.layers).signals(ids_1T, torch.ones_like(ids_1T), ids_1T > 0)
        end = start + len(row.text.tokens) - 1
        first = start + row.text.prompt_length - 1
        torch.testing.assert_close(row.features_TF, known.features_BTF[0, start:end], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(row.hidden_nH, known.hidden_BTH[0, first:end], rtol=1e-4, atol=1e-4)


def test_an_encoder_decoder_keeps_the_source() -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
    target = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    rows, _ = stored(target, DraftModel(target), Chain(2))
    signals = signals_of(rows, CPU)
    assert signals.source_BS.tolist()[0] == rows[0].text.source + [0] * (6 - len(rows[0].text.source))
    ids_BT = signals.input_ids_BT
    teacher = OnlineTeacher(target)
    masks = signals.attention_mask_BT, signals.mask_BT
    known = teacher.signals(ids_BT, *masks, signals.source_BS, signals.source_mask_BS)
    torch.testing.assert_close(
        signals.hidden_BTH[signals.mask_BT], known.hidden_BTH[signals.mask_BT], rtol=1e-3, atol=1e-4
    )


def row_of(size: int) -> Row:
    return Row(TargetText([1, 2, 3], 1, 3), torch.zeros(size, 2), None, FLAT)


def test_the_buffer_keeps_the_newest_rows_within_its_bytes() -> None:
    limit = 3 * row_of(10).bytes
    buffer = RowBuffer(limit)
    rows = [row_of(10) for _ in range(5)]
    for row in rows:
        buffer.add(row)
        assert buffer.bytes == sum(one.bytes for one in buffer) <= limit
    assert list(buffer) == rows[2:]
    buffer.add(row_of(1000))
    assert len(buffer) == buffer.bytes == 0, "a row that does not fit is not kept"
    few = RowBuffer(limit, most=2)
    for row in rows:
        few.add(row)
    assert list(few) == rows[3:]
