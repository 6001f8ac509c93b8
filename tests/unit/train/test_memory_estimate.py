"""The memory that is foretold, compared with what real tensors take, on real models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_llama
from datasets import Dataset
from gguf_files import tiny_llama, write_gguf
from torch import nn
from transformers import AutoConfig, T5Config, T5ForConditionalGeneration

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.distill.hidden_state_cache import CachedTeacher, SignalCache
from draftsmith.distill.load_target import load_target
from draftsmith.distill.teacher import Batch, OnlineTeacher
from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.heads import HEADS
from draftsmith.train.estimate import memory
from draftsmith.train.estimate.fake_run import DryStep, LiveBytes
from draftsmith.train.models import new_drafter
from draftsmith.train.progress import in_units
from draftsmith.train.recipe import Recipe, parse_recipe
from draftsmith.train.step import Teacher, make_step

WIDE = {"vocab_size": 700, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
PROMPT, RESPONSE, ROWS = 40, 56, 8
MEDUSA, DRAFT_MODEL = {"type": "medusa"}, {"type": "draft_model", "num_hidden_layers": 2}
EAGLE3 = {"type": "eagle3", "train_steps": 3, "layers": [1, 2]}


def estimated(drafter: dict[str, Any], config: Any, **sections: Any) -> memory.MemoryEstimate:
    how = {key: sections.pop(key) for key in ("processes", "sharded", "accelerated") if key in sections}
    return memory.estimate_memory(recipe_of(drafter, **sections), config, **how)


def wide_target() -> nn.Module:
    return make_llama(**WIDE)


def tiny_t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2, "vocab_size": 700}
    config = T5Config(**sizes, decoder_start_token_id=0, tie_word_embeddings=False)
    return T5ForConditionalGeneration(config).eval()


def recipe_of(drafter: dict[str, Any], **sections: dict[str, Any]) -> Recipe:
    train = {"batch_size": ROWS, "draft_length": 3, **sections.pop("train", {})}
    objective = {"chunk_tokens": 64, **sections.pop("objective", {})}
    data = {"prompt_tokens": PROMPT, "response_tokens": RESPONSE, **sections.pop("data", {})}
    values = {"name": "m", "output": "m", "drafter": drafter, "data": data, "train": train, "objective": objective}
    return parse_recipe({**values, **sections}, "test")


def real_peak(
    recipe: Recipe,
    make_target: Callable[[], nn.Module],
    make_teacher: Callable[[nn.Module, tuple[int, ...]], Teacher] = OnlineTeacher,
    bf16: bool = False,
) -> int:
    """Bytes of a real second step on tensors with data, weights included; nothing of the estimate's is asked."""
    rows = recipe.train.batch_size // recipe.train.gradient_accumulation
    if make_target is tiny_t5:
        source_BS, ids_BT = torch.ones(rows, PROMPT).long(), torch.ones(rows, RESPONSE + 1).long()
        more: dict[str, Any] = {"source_BS": source_BS, "source_mask_BS": torch.ones_like(source_BS)}
        mask_BT = torch.ones_like(ids_BT).bool()
    else:
        ids_BT, more = torch.randint(5, 300, (rows, PROMPT + RESPONSE)), {}
        mask_BT = (torch.arange(PROMPT + RESPONSE) >= PROMPT - 1).expand_as(ids_BT)
    batch = Batch(ids_BT, torch.ones_like(ids_BT), mask_BT, rows=range(rows), **more)
    with LiveBytes() as live:
        target = make_target().requires_grad_(False)
        drafter = new_drafter(recipe, target)
        drafter.attach(target)
        teacher = make_teacher(target, drafter.needs.layers)
        step, optimizers, _ = make_step(recipe, target, drafter.train(), teacher)
        for _ in range(2):
            live.peak = live.now
            DryStep(drafter, step, optimizers, lambda: batch, "cpu", bf16=bf16).run()
    return live.peak


@pytest.mark.parametrize(
    ("drafter", "sections"),
    [
        pytest.param(*case, marks=() if case[0] == EAGLE3 else pytest.mark.slow)
        for case in (
            (DRAFT_MODEL, {"train": {"activation_checkpointing": True}}),
            (MEDUSA, {"objective": {"chunk_tokens": 1024}}),
            (MEDUSA, {"train": {"gradient_accumulation": 4, "optimizer": "muon"}}),
            (MEDUSA, {"cotrain": {"lora_rank": 4, "warmup_fraction": 0.0}}),
            (EAGLE3, {}),
            ({"type": "mtp", "draft_vocab_size": 70}, {}),
        )
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_estimate_is_within_15_percent_of_what_tensors_take(
    drafter: dict[str, Any], sections: dict[str, Any]
) -> None:
    target, recipe = wide_target(), recipe_of(drafter, **sections)
    estimate = memory.estimate_memory(recipe, target.config)
    assert estimate.target == sum(p.numel() * 4 for p in target.parameters()) + _buffers(target)
    # Kernels' own buffers are in neither; a run's resident memory is compared in benchmarks/training.py.
    assert estimate.training == pytest.approx(real_peak(recipe, wide_target), rel=0.15)


def test_the_estimate_of_a_gguf_target_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its converted weights are read in bfloat16; nothing of the file's float32 stays."""
    pytest.importorskip("gguf")
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "target.gguf", tiny_llama(), "Q8_0")

    def load() -> nn.Module:
        return load_target(str(file), dtype="bfloat16", device="cpu").model

    drafter = {"type": "eagle3", "train_steps": 3, "layers": [1, 2]}
    recipe = recipe_of(drafter, target={"model": str(file), "dtype": "bfloat16"}, train={"mixed_precision": "bf16"})
    target = load()
    estimate = memory.estimate_memory(recipe, target.config, bf16=True)
    assert estimate.target == sum(p.numel() * 2 for p in target.parameters()) + _buffers(target)
    assert estimate.training == pytest.approx(real_peak(recipe, load, bf16=True), rel=0.15)


def _buffers(model: nn.Module) -> int:
    return sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())


@pytest.mark.slow
def test_a_cached_teacher_computes_the_draft_rows_of_the_lm_head_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    drafter = {"type": "eagle3", "train_steps": 2, "layers": [1, 2], "draft_vocab_size": 100}
    recipe = recipe_of(drafter, teacher={"kind": "cached"})
    target = make_llama(**{**WIDE, "vocab_size": 20_000}).requires_grad_(False)
    rows = Dataset.from_list([{"input_ids": [5] * (PROMPT + RESPONSE)}] * ROWS)
    cache = SignalCache(target, rows, (1, 2), "bfloat16", normalizers=True)
    cache.build([0], OnlineTeacher(target, (1, 2)), lambda: None)

    def make_target() -> nn.Module:
        return make_llama(**{**WIDE, "vocab_size": 20_000})

    def cached(model: nn.Module, layers: tuple[int, ...]) -> CachedTeacher:
        return CachedTeacher(OnlineTeacher(model, layers), cache.read)

    estimate = memory.estimate_memory(recipe, target.config)
    assert estimate.training == pytest.approx(real_peak(recipe, make_target, cached), rel=0.15)
    online = memory.estimate_memory(recipe_of(drafter), target.config)
    assert estimate.activations < 0.5 * online.activations
    stored = {"teacher": {"kind": "files", "file": "states"}, "data": {"response": "text"}}
    files = memory.estimate_memory(recipe_of(drafter, **stored), target.config)
    assert files.activations > 2 * estimate.activations, "an engine's files have states alone"


def test_an_encoder_decoder_pair() -> None:
    recipe = recipe_of({"type": "draft_model", "num_hidden_layers": 1})
    estimate = memory.estimate_memory(recipe, tiny_t5().config)
    assert estimate.training == pytest.approx(real_peak(recipe, tiny_t5), rel=0.15)


@pytest.mark.slow
def test_the_keys_that_save_memory_do() -> None:
    config = make_llama(**WIDE).config
    base = {"type": "draft_model", "num_hidden_layers": 2}

    def activations(**sections: dict[str, Any]) -> int:
        return memory.estimate_memory(recipe_of(base, **sections), config).activations

    plain = activations()
    assert activations(train={"activation_checkpointing": True}) < 0.7 * plain
    assert activations(train={"gradient_accumulation": 4}) < 0.5 * plain
    assert activations(objective={"chunk_tokens": 448}) > 1.3 * plain
    # Cached hidden states need no target forward pass.
    cached = memory.estimate_memory(recipe_of(base, teacher={"kind": "cached"}), config)
    assert cached.activations <= plain


def test_bf16_processes_vocabulary_and_quantisation_are_seen() -> None:
    config = make_llama(**WIDE).config
    one = estimated(MEDUSA, config)
    half = estimated(MEDUSA, config, target={"dtype": "bfloat16"})
    assert half.target < 0.55 * one.target
    two = estimated(MEDUSA, config, processes=2)
    sharded = estimated(MEDUSA, config, processes=2, sharded=True)
    assert sharded.activations < one.activations, "half of the rows"
    assert two.gradients == one.gradients, "DDP's gradients are views of its buckets"
    heads = 3 * 700 * 64 * 4
    assert two.activations > sharded.activations + 0.5 * heads, "buckets stay while the objective makes gradients"
    few = memory.estimate_memory(recipe_of({"type": "medusa", "draft_vocab_size": 70}), config)
    assert few.drafter < 0.5 * one.drafter
    whole = memory.estimate_memory(recipe_of({"type": "mtp"}), config)
    rows = memory.estimate_memory(recipe_of({"type": "mtp", "draft_vocab_size": 70}), config)
    assert rows.drafter - whole.drafter == 70 * 64 * 4 + 70 * 8 + 700, "the rows and the map of their tokens"
    assert rows.activations < whole.activations
    config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(DraftsmithError, match="quantised"):
        estimated(MEDUSA, config)


def test_an_offloaded_target_leaves_the_accelerator_one_layer() -> None:
    target = make_llama(**{**WIDE, "num_hidden_layers": 4})
    layer = sum(p.numel() * 4 for p in target.model.layers[0].parameters())
    recipe = recipe_of({"type": "medusa"}, target={"offload": True})
    whole, put_off = (memory.estimate_memory(recipe, target.config, accelerated=on).target for on in (False, True))
    assert whole - put_off == 3 * layer


def test_a_quantized_target_takes_a_byte_a_number() -> None:
    target = make_llama(**WIDE)
    plain, quantized = (estimated(MEDUSA, target.config, target={"quantization": kind}) for kind in (None, "int8"))
    matrices = [p for p in target.model.layers.parameters() if p.ndim == 2]
    assert plain.target - quantized.target == sum(3 * p.numel() - 4 * len(p) for p in matrices)
    assert plain.training - quantized.training == plain.target - quantized.target


@pytest.mark.parametrize(
    ("prompt", "response", "rows", "vocabulary"),
    [
        pytest.param(40, 56, 5, 700, marks=pytest.mark.slow),
        pytest.param(100, 300, 5, 700, marks=pytest.mark.slow),  # storage has to grow
        (24, 8, 24, 20_000),  # one row of logits for each prompt, not one for each length of a prompt
    ],
)
def test_sampling_takes_what_is_foretold(prompt: int, response: int, rows: int, vocabulary: int) -> None:
    lengths = {"prompt_tokens": prompt, "response_tokens": response, "batch_size": rows}
    longer = {**WIDE, "vocab_size": vocabulary, "max_position_embeddings": 512, "eos_token_id": None}
    estimate = estimated(MEDUSA, make_llama(**longer).config, data=lengths)
    with LiveBytes() as live:
        target = make_llama(**longer).requires_grad_(False)
        drafter = HEADS["medusa"].from_target(target)
        live.peak = live.now
        prompts = [[5] * (prompt - row) for row in range(rows)]
        limits = {"max_new_tokens": response, "temperature": 1.0}
        SpeculativeDecoder(target).generate_batch(prompts, seeds=list(range(rows)), **limits)
    assert drafter.training, "alive until here"
    assert estimate.sampling == pytest.approx(live.peak, rel=0.15)
    text = recipe_of({"type": "medusa"}, data={**lengths, "response": "text"})
    assert memory.estimate_memory(text, make_llama(**longer).config).cache == 0


def test_the_pass_that_builds_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    teacher_section = {"kind": "cached", "shard_rows": 40}
    recipe = recipe_of({"type": "eagle3", "layers": [1, 2], "train_steps": 2}, teacher=teacher_section)
    target = wide_target()
    estimate = memory.estimate_memory(recipe, target.config)
    rows = Dataset.from_list([{"input_ids": [5] * (PROMPT + RESPONSE)}] * 40)
    teacher = OnlineTeacher(target.requires_grad_(False), (1, 2))
    cache = SignalCache(target, rows, (1, 2), "bfloat16", shard_rows=40)
    with LiveBytes() as live:
        cache.build([0], teacher, lambda: None)
    assert estimate.caching == pytest.approx(live.peak, rel=0.15)
    assert estimate.peak >= estimate.target + estimate.drafter + estimate.caching
    assert "while caching" in str(estimate)
    on_disk = sum(file.stat().st_size for file in cache.folder.glob("*.safetensors"))
    assert estimate.disk == pytest.approx(on_disk * recipe.data.count / 40, rel=0.02)
    assert "on disk; teacher.kind=online takes none" in str(estimate)
    on_device = memory.estimate_memory(recipe, target.config, accelerated=True)
    assert 0 < on_device.caching < 0.7 * estimate.caching, "the shard is in host memory"
    assert "while caching" not in str(estimated(MEDUSA, target.config))


def test_the_larger_phase_is_announced_first() -> None:
    small, config = {"prompt_tokens": 4, "response_tokens": 4, "batch_size": 4, "count": 150}, make_llama(**WIDE).config
    short = estimated(MEDUSA, config, data={**small, "batch_size": 1})
    assert short.training > short.sampling
    assert list(short.phases) == ["in training", "while sampling"]
    several = estimated(MEDUSA, config, data={**small, "batch_size": 150})
    assert list(several.phases) == ["while sampling", "in training"]
    assert str(several).startswith(f"{in_units(several.announced)} a process while sampling (target ")
    few = estimated(MEDUSA, config, data={**small, "batch_size": 200})
    assert few.cache == several.cache, "no more prompts are answered together than there are"
    on_device = estimated(MEDUSA, config, data=small, accelerated=True)
    assert on_device.announced == on_device.peak, "an accelerator's allocator counts tensors alone"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "eagle3", "dflash"])
def test_activations_of_every_kind_of_block_are_computed_again(kind: str) -> None:
    more = {"eagle3": {"layers": [1, 2], "train_steps": 3}, "dflash": {"layers": [1, 2]}}
    drafter = {"type": kind, **more.get(kind, {})}
    config, few = make_llama(**WIDE).config, {"chunk_tokens": 8}

    def activations(again: bool) -> int:
        recipe = recipe_of(drafter, train={"activation_checkpointing": again, "batch_size": 4}, objective=few)
        return memory.estimate_memory(recipe, config).activations

    assert activations(True) < 0.95 * activations(False)


def test_a_pretrained_drafter_is_known_by_its_config(tmp_path: Path) -> None:
    small = make_llama(**{**WIDE, "num_hidden_layers": 1})
    small.config.save_pretrained(tmp_path)  # no weights: nothing is loaded
    estimate = memory.estimate_memory(
        recipe_of({"type": "draft_model", "model": str(tmp_path)}), make_llama(**WIDE).config
    )
    assert estimate.drafter == sum(p.numel() * 4 for p in small.parameters()) + _buffers(small)
    assert AutoConfig.from_pretrained(tmp_path).num_hidden_layers == 1


@pytest.mark.slow
def test_the_targets_own_module_counts_as_a_new_one() -> None:
    """Its files are not read, which have no data here."""
    config = make_llama(**WIDE).config
    sizes = [memory.estimate_memory(recipe_of({"type": "mtp", "init": init}), config) for init in ("native", "random")]
    assert sizes[0].drafter == sizes[1].drafter > 0


def test_a_drafter_that_does_not_fit_is_refused_before_anything_is_loaded() -> None:
    recipe = recipe_of({"type": "draft_model", "num_hidden_layers": 9, "init": "target_layers"})
    with pytest.raises(ConfigError, match="num_hidden_layers=9; expected 1 to the target's 2"):
        memory.estimate_memory(recipe, make_llama(**WIDE).config)
