"""Threads that decode with one model: their texts are those of decoders that run alone."""

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from conftest import make_llama, noisy_llama
from transformers import LlamaForCausalLM

from draftsmith import ConfigError, SpeculativeDecoder, as_custom_generate
from draftsmith.decode.profiling import measure_costs
from draftsmith.heads import Drafter, Medusa
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.retrieval import Hybrid

PROMPT, OTHER = [5, 9, 33, 2], [7, 7, 8]
WAIT = 0.5
"""Seconds in which a thread that does not wait for its turn gets far."""


def draft_model() -> DraftModel:
    return DraftModel(noisy_llama(0.1))


def decode(decoder: SpeculativeDecoder, prompt: list[int], **more: object) -> list[int]:
    return decoder.generate(prompt, max_new_tokens=16, eos_token_id=None, temperature=1.0, seed=3, **more).tokens


def started(run: Callable[[], list[int]]) -> tuple[Thread, list[list[int]]]:
    """Return a thread that runs this for a while, and the list that gets its result."""
    results: list[list[int]] = []
    thread = Thread(target=lambda: results.append(run()))
    thread.start()
    thread.join(WAIT)
    return thread, results


def test_decoders_of_one_model_take_turns() -> None:
    """The other thread begins while a pass runs, in which the layers have another attention function."""
    target = make_llama()
    first, second = (SpeculativeDecoder(target, draft_model()) for _ in range(2))
    alone = [decode(first, PROMPT), decode(second, OTHER)]
    waiting: list[tuple[Thread, list[list[int]]]] = []

    def begin(*_: object) -> None:
        if not waiting:
            waiting.append(started(lambda: decode(second, OTHER)))

    hook = target.model.layers[0].register_forward_hook(begin)
    assert decode(first, PROMPT) == alone[0]
    hook.remove()
    thread, results = waiting[0]
    thread.join()
    assert results == [alone[1]]


def test_a_model_is_a_target_and_drafts_for_another() -> None:
    """The other thread waits for the pass, and begins while a callback runs."""
    model, other = make_llama(), make_llama(2)
    first = SpeculativeDecoder(model, Medusa.from_target(model, num_heads=3).eval())
    second = SpeculativeDecoder(other, DraftModel(model))
    alone = [decode(first, PROMPT), decode(second, OTHER)]
    waiting: list[tuple[Thread, list[list[int]]]] = []

    def begin(*_: object) -> None:
        if not waiting:
            waiting.append(started(lambda: decode(second, OTHER)))
            assert waiting[0][1] == []

    hook = model.model.layers[0].register_forward_hook(begin)
    assert decode(first, PROMPT, on_tokens=lambda *_: waiting[0][0].join(60)) == alone[0]
    hook.remove()
    assert waiting[0][1] == [alone[1]]


@pytest.mark.parametrize("kind", ["decoder", "drafter", "no drafter", "in hybrids"])
def test_texts_of_one_decoder_or_drafter_take_turns(tiny_target: LlamaForCausalLM, kind: str) -> None:
    """The other thread begins between two rounds, as where a streamer has to wait."""
    drafter: Drafter | None = None if kind == "no drafter" else Medusa.from_target(tiny_target, num_heads=3).eval()
    decoder = SpeculativeDecoder(tiny_target, drafter)
    other = SpeculativeDecoder(tiny_target, drafter) if kind == "drafter" else decoder
    if kind == "in hybrids":
        decoder, other = (SpeculativeDecoder(tiny_target, Hybrid(drafter)) for _ in range(2))
    alone = [decode(decoder, PROMPT), decode(other, OTHER)]
    waiting: list[tuple[Thread, list[list[int]]]] = []

    def begin(*_: object) -> None:
        if not waiting:
            waiting.append(started(lambda: decode(other, OTHER)))
            assert waiting[0][1] == [], "the other text waits for the end of this one"

    assert decode(decoder, PROMPT, on_tokens=begin) == alone[0]
    thread, results = waiting[0]
    thread.join()
    assert results == [alone[1]]


def test_other_threads_decode_with_the_model_while_a_callback_runs(tiny_target: LlamaForCausalLM) -> None:
    decoder, other = SpeculativeDecoder(tiny_target, draft_model()), SpeculativeDecoder(tiny_target, draft_model())
    alone = [decode(decoder, PROMPT), decode(other, OTHER)]
    results: list[list[int]] = []

    def run(*_: object) -> None:
        thread = Thread(target=lambda: results.append(decode(other, OTHER)), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "nobody waits for a callback"
        assert decode(other, OTHER) == alone[1], "nor in this thread"

    assert decode(decoder, PROMPT, on_tokens=run) == alone[0]
    assert results == [alone[1]] * len(results) != []


@pytest.mark.parametrize("kind", ["decoder", "drafter", "costs"])
@pytest.mark.parametrize("callback", ["on_tokens", "stopping_criteria", "logits_processor"])
def test_a_callback_that_uses_its_own_drafter_is_refused(
    tiny_target: LlamaForCausalLM, kind: str, callback: str
) -> None:
    drafter = draft_model()
    decoder = SpeculativeDecoder(tiny_target, drafter)
    alone, refused, passes = decode(decoder, PROMPT), [], []
    tiny_target.model.layers[0].register_forward_hook(lambda *_: passes.append(1))

    def run(*given: Any) -> Any:
        inner = decoder if kind == "decoder" else SpeculativeDecoder(tiny_target, Hybrid(drafter))
        before = len(passes)
        with pytest.raises(ConfigError, match=f"a callback uses the {'decoder' if kind == 'decoder' else ''}") as error:
            measure_costs(tiny_target, drafter) if kind == "costs" else decode(inner, OTHER)
        assert len(passes) == before, "before any pass, which takes long for a large target"
        refused.append(error)
        return given[1] if callback == "logits_processor" else False

    given = run if callback == "on_tokens" else [run]
    assert decode(decoder, PROMPT, **{callback: given}) == alone
    assert refused


def test_requests_of_one_custom_generate(tiny_target: LlamaForCausalLM) -> None:
    """They share a decoder."""
    own, results = as_custom_generate(draft_model()), []

    def text(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
        return tiny_target.generate(ids, custom_generate=own, eos_token_id=None, **settings)[0].tolist()

    def request(prompt: list[int]) -> None:
        results.extend(text(prompt) for _ in range(4))

    alone = [text(PROMPT), text(OTHER)]
    threads = [Thread(target=request, args=[prompt]) for prompt in (PROMPT, OTHER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted(alone * 4)
