"""The demo's page, and two decoders that take turns: their texts are those of undisturbed ones, no thread is left."""

import threading
import time
from collections.abc import Callable

import pytest
import torch
from conftest import make_llama
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith import SpeculativeDecoder
from draftsmith.cli.demo import DEFAULT, Demo, Lane, race, steps
from draftsmith.distill.detokenize import IncrementalText
from draftsmith.errors import ConfigError
from draftsmith.eval.session import Session
from draftsmith.eval.settings import PairSettings
from draftsmith.heads import HEADS
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_model import DraftModel

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
    texts = [IncrementalText(tiny_tokenizer, [5, 9, 33]) for _ in decoders]
    lanes = [Lane(text, steps(one, [5, 9, 33], 1, **settings)) for text, one in zip(texts, decoders, strict=True)]
    seen = [tuple(len(lane.tokens) for lane in lanes) for _ in race(lanes)]
    assert [lane.tokens for lane in lanes] == [output.tokens for output in expected]
    overlaps = [[alpha for record in text.rounds for alpha in record.overlap] for text in (lanes[1], expected[1])]
    assert overlaps[0] == pytest.approx(overlaps[1], rel=1e-12), "q follows from states of the drafter's own text"
    whole = ["".join(piece for piece, _ in lane.pieces) for lane in lanes]
    assert whole == [tiny_tokenizer.decode(output.tokens, skip_special_tokens=True) for output in expected]
    accepted = sum(record.accepted for record in expected[1].rounds)
    assert [sum(drafted for _, drafted in lane.pieces) for lane in lanes] == [0, accepted]
    both = [sizes for sizes in seen if 0 < sizes[0] < 24 and 0 < sizes[1] < 24]
    assert len({sizes[0] for sizes in both}) > 2, "both grow together"


def test_decoding_waits_for_its_reader() -> None:
    """Otherwise a round would be timed while the page is drawn or the other text decodes."""

    class Counting:
        given = 0

        def generate(self, prompt: list[int], *, on_tokens: Callable) -> None:
            for token in range(5):
                self.given += 1
                on_tokens([token], None)

    decoder = Counting()
    running = steps(decoder, [], 1)
    for count in (1, 2, 3):
        assert next(running) == ([count - 1], None)
        time.sleep(0.05)
        assert decoder.given == count
    running.close()


def test_a_reader_who_leaves_ends_the_thread_and_sees_errors() -> None:
    before, decoder = threading.active_count(), SpeculativeDecoder(target_model())
    running = steps(decoder, [5, 9], 1, **SETTINGS)
    assert [len(tokens) for tokens, _ in (next(running), next(running))] == [1, 1]
    running.close()
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        list(steps(decoder, [5, 9], 1, max_new_tokens=0))
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= before


@pytest.mark.parametrize("policy", [DEFAULT, "chain:draft_length=3", "best-first:size=6,depth=3"])
def test_what_the_page_shows(policy: str, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    target = target_model()
    pair = Session(target, tiny_tokenizer, {"<drafter>": DraftModel(target_model())}, [])
    demo = Demo(PairSettings(target="t", drafters={"<drafter>": "d"}), pair)
    *_, (alone, drafted, bars, comparison) = demo.decode("a<b>", 0.0, policy, 24, 0)
    *_, (*_, sampled) = demo.decode("a<b>", 1.0, policy, 24, 0)
    assert "sampled texts differ" in sampled
    for shown in (alone, drafted):
        assert "a&lt;b&gt;</span>" in shown, "prompts are text"
        assert shown.split("</div>")[0].endswith("– done")
    assert "&lt;drafter&gt;: " in drafted
    assert ("drafted" in drafted, "drafted" in alone) == (True, False)
    assert "the texts are identical" in comparison
    assert bars.count("<tr>") <= 3 + (policy == DEFAULT) * 5
