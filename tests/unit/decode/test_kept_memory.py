"""Caches end with the call of the decoder: texts may fill most of a device, and drafters and decoders live on."""

import weakref
from collections.abc import Callable

import pytest
import torch
from conftest import make_llama, make_t5
from gpu.families import PROMPTS, make_drafter, target_model
from recurrent_models import build, noisy
from transformers import PreTrainedModel

from draftsmith import SpeculativeDecoder
from draftsmith.decode.cache.rollback import RollbackLayer
from draftsmith.decode.passes import graphs
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.heads import DraftModel
from draftsmith.heads.base import Drafter
from draftsmith.heads.retrieval import Hybrid

SETTINGS = {"max_new_tokens": 8, "eos_token_id": None}
Alive = Callable[[], list[str]]


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Alive:
    """Return a function that names passes and storage that are alive, except the storage of compiled passes."""
    made: list[tuple[str, weakref.ref]] = []
    build_runner, allocate = ModelRunner.__init__, RollbackLayer.lazy_initialization

    def built(runner: ModelRunner, *arguments: object) -> None:
        build_runner(runner, *arguments)
        made.append((type(runner.passes).__name__, weakref.ref(runner.passes)))

    def allocated(layer: RollbackLayer, *arguments: torch.Tensor) -> None:
        allocate(layer, *arguments)
        if not layer._fixed:
            made.extend((name, weakref.ref(getattr(layer, name))) for name in ("keys", "values"))

    monkeypatch.setattr(ModelRunner, "__init__", built)
    monkeypatch.setattr(RollbackLayer, "lazy_initialization", allocated)

    def names() -> list[str]:
        assert made
        return [name for name, part in made if part() is not None]

    return names


def drafter_of(name: str, target: PreTrainedModel) -> Drafter | None:
    if name == "hybrid":
        return Hybrid(make_drafter("eagle3", target), min_match=2)
    return None if name == "alone" else make_drafter(name, target)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", ["alone", "hybrid", "draft_model", "eagle3", "dflash"])
def test_decoders_and_drafters_keep_no_cache(
    name: str, compile: bool, alive: Alive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(graphs.OPTIONS, "cpu", {"disable": True})
    target = target_model()
    drafter = drafter_of(name, target)
    decoder = SpeculativeDecoder(target, drafter, draft_length=2 if drafter else None, compile=compile)
    for temperature in (0.0, 1.0):
        decoder.generate_batch(PROMPTS, **SETTINGS, temperature=temperature)
        assert alive() == []
    assert len(graphs._FREE.get(target, ())) == compile, "storage that later calls use again"


@pytest.mark.parametrize("name", ["alone", "draft_model", "eagle3"])
def test_nothing_is_kept_after_an_error(name: str, alive: Alive) -> None:
    target = target_model()
    drafter = drafter_of(name, target)
    decoder = SpeculativeDecoder(target, drafter, draft_length=2 if drafter else None)
    calls = 0

    def interrupt(number: int, tokens: list[int], record: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.generate_batch(PROMPTS, **SETTINGS, on_tokens=interrupt)
    assert alive() == []
    decoder.generate_batch(PROMPTS, **SETTINGS)


@pytest.mark.parametrize("family", ["lfm2", "mamba", "rwkv"])
def test_states_of_recurrent_layers_are_not_kept(family: str, alive: Alive) -> None:
    target = build(family)
    decoder = SpeculativeDecoder(target, noisy(target), draft_length=2)
    decoder.generate_batch(PROMPTS, **SETTINGS)
    assert alive() == []


def test_keys_of_an_encoder_are_not_kept(alive: Alive) -> None:
    decoder = SpeculativeDecoder(make_t5(2), DraftModel(make_t5(2)), draft_length=2)
    decoder.generate_batch(PROMPTS, **SETTINGS)
    assert alive() == []


def test_measuring_costs_keeps_no_cache(alive: Alive) -> None:
    target, drafter = make_llama(), DraftModel(make_llama(1))
    SpeculativeDecoder(target, drafter, policy="adaptive")
    assert alive() == []
