"""Two decoders that take turns: their texts are those of undisturbed ones, and no thread is left."""

import threading

import pytest
import torch
from conftest import make_llama
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith import SpeculativeDecoder
from draftsmith.cli.demo import CHAIN, DEFAULT, Demo, DemoRequest
from draftsmith.cli.race import Lane, race
from draftsmith.errors import ConfigError
from draftsmith.eval.settings import Session
from draftsmith.heads import HEADS
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.retrieval import SuffixRetrieval

OPTIONS = {"eagle3": {"layers": [1, 2]}, "draft_model": {"init": "target_layers", "keep": [0, 2]}, "medusa": {}}
SETTINGS = {"max_new_tokens": 24, "eos_token_id": None, "seed": 3}


def target_model() -> LlamaForCausalLM:
    return make_llama(num_hidden_layers=3, eos_token_id=None).double()


def drafter_of(kind: str, target: LlamaForCausalLM) -> Drafter:
    torch.manual_seed(1)
    drafter = HEADS[kind].from_target(target, **OPTIONS[kind]).double().eval()
    for parameter in drafter.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return drafter


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", OPTIONS)
def test_the_texts_are_those_of_undisturbed_decoders(
    kind: str, temperature: float, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """A drafter that reads the target's states reads those of its own text."""
    target, settings = target_model(), {**SETTINGS, "temperature": temperature}
    decoders = [SpeculativeDecoder(target), SpeculativeDecoder(target, drafter_of(kind, target))]
    expected = [decoder.generate([5, 9, 33], **settings) for decoder in decoders]
    lanes = [Lane(decoder, tiny_tokenizer, [5, 9, 33], settings, 1) for decoder in decoders]
    seen = [tuple(len(lane.tokens) for lane in lanes) for _ in race(lanes)]
    assert [lane.tokens for lane in lanes] == [output.tokens for output in expected]
    assert [lane.tau for lane in lanes] == [output.acceptance_length for output in expected]
    overlaps = [[record.overlap for record in text.rounds] for text in (lanes[1], expected[1])]
    assert overlaps[0] == overlaps[1], "q follows from states of the drafter's own text"
    whole = ["".join(piece.text for piece in lane.pieces) for lane in lanes]
    assert whole == [tiny_tokenizer.decode(output.tokens, skip_special_tokens=True) for output in expected]
    accepted = sum(record.accepted for record in expected[1].rounds)
    assert [sum(piece.drafted for piece in lane.pieces) for lane in lanes] == [0, accepted]
    both = [sizes for sizes in seen if 0 < sizes[0] < 24 and 0 < sizes[1] < 24]
    assert len({sizes[0] for sizes in both}) > 2, "both grow together"


def test_the_decoder_with_less_time_decodes_next() -> None:
    class Fixed:
        """Rounds of given length."""

        def __init__(self, seconds: float) -> None:
            self.seconds, self.step, self.error, self.closed = 0.0, seconds, None, False
            self.finished = False

        def advance(self) -> None:
            self.seconds += self.step
            self.finished = self.seconds > 5.9

        def close(self) -> None:
            self.closed = True

    slow, fast = Fixed(2.0), Fixed(1.0)
    apart = [abs(slow.seconds - fast.seconds) for _ in race([slow, fast])]
    assert max(apart) <= 2.0
    assert (slow.seconds, fast.seconds) == (6.0, 6.0)
    assert slow.closed
    assert fast.closed


def test_a_reader_who_leaves_ends_the_threads(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    before = threading.active_count()
    target = target_model()
    lanes = [Lane(SpeculativeDecoder(target), tiny_tokenizer, [5, 9], SETTINGS, 1) for _ in range(2)]
    running = race(lanes)
    for _ in range(5):
        next(running)
    running.close()
    assert all(lane.finished for lane in lanes)
    assert all(0 < len(lane.tokens) < 24 for lane in lanes)
    for lane in lanes:
        lane._thread.join(10)
    assert threading.active_count() == before


def test_an_error_is_raised_where_the_text_is_read(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    target = target_model()
    settings = [SETTINGS, {**SETTINGS, "max_new_tokens": 0}]
    lanes = [Lane(SpeculativeDecoder(target), tiny_tokenizer, [5, 9], chosen, 1) for chosen in settings]
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        list(race(lanes))
    assert all(lane.finished or not lane.tokens for lane in lanes)


@pytest.mark.parametrize("policy", [CHAIN, DEFAULT, "tree:widths=2x1x1"])
def test_what_the_page_shows(policy: str, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    target = target_model()
    pair = Session(target, tiny_tokenizer, {"<drafter>": DraftModel(target_model())}, [])
    demo = Demo(DemoRequest("t", {"<drafter>": "d"}), pair)
    *_, (alone, drafted, bars, comparison) = demo.decode("a<b>", 0.0, policy, 3, 24, 0)
    for shown in (alone, drafted):
        assert "a&lt;b&gt;</span>" in shown, "prompts are text"
        assert shown.split("</div>")[0].endswith("– done")
    assert "&lt;drafter&gt;: " in drafted
    assert ("drafted" in drafted, "drafted" in alone) == (True, False)
    assert "the texts are identical" in comparison
    assert bars.count("<tr>") <= 3 + (policy == DEFAULT) * 5


def test_a_drafter_that_only_retrieves(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    pair = Session(target_model(), tiny_tokenizer, {"suffix": SuffixRetrieval()}, [])
    *_, (_, _, _, comparison) = Demo(DemoRequest("t", {"suffix": "suffix"}), pair).decode("ab", 1.0, CHAIN, 3, 24, 0)
    assert "sampled texts differ" in comparison
