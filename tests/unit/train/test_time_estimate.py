"""Estimated operations of a run, compared with counts made by hand and with a step on real tensors."""

from typing import Any

import pytest
import torch
from conftest import make_llama, mostly_slow
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, T5Config, T5ForConditionalGeneration

from draftsmith.errors import ConfigError
from draftsmith.train.estimate.fake_run import Operations, dry_step
from draftsmith.train.estimate.gpus import machine_named
from draftsmith.train.estimate.memory import estimate_memory
from draftsmith.train.estimate.time import estimate_work, fitting_overrides, in_hours
from draftsmith.train.recipe import Recipe, parse_recipe

SHAPES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2}
SHAPES |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def recipe_of(**sections: dict[str, Any]) -> Recipe:
    train = {"batch_size": 8, "steps": 30, "draft_length": 3, "optimizer": "adamw", **sections.pop("train", {})}
    data = {"prompt_tokens": 10, "response_tokens": 20, "count": 100, "batch_size": 16, **sections.pop("data", {})}
    values = {"name": "m", "output": "m", "drafter": {"type": "draft_model"}, "data": data, "train": train}
    return parse_recipe({**values, **sections}, "test")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_pass_counts_two_for_every_product(attention: str) -> None:
    model = make_llama(**SHAPES)
    model.set_attn_implementation(attention)
    rows, width, size, hidden = 3, 12, 8, 16
    of_layer = 2 * hidden * hidden + 2 * hidden * size + 3 * hidden * 40  # q, o; k, v; MLP
    forward = rows * width * (2 * of_layer + hidden * 50) + 2 * 2 * rows * 2 * width * width * size  # QK and PV
    ids = torch.randint(5, 50, (rows, width))
    with torch.no_grad(), Operations() as alone:
        model(ids)
    products = alone.total / 2
    rotary = rows * width * size // 2  # the angles are a product of matrices, too
    assert products - forward in (0, rotary, width * size // 2)
    with Operations() as both:
        model(ids).logits.sum().backward()
    assert 2.8 <= both.total / alone.total <= 3.3  # each is followed by two, or three in attention


def test_a_step_without_data_counts_as_much_as_one_with_data() -> None:
    recipe = recipe_of(train={"gradient_accumulation": 2}, data={"prompt_tokens": 1, "response_tokens": 29})
    target = make_llama(**SHAPES).requires_grad_(False)
    step = dry_step(recipe, target, device="cpu", processes=1, bf16=False)
    step.module.train()
    with Operations() as real:
        step.run()
    assert estimate_work(recipe, target.config).step_operations == pytest.approx(2 * real.total, rel=0.05)
    halves = estimate_work(recipe, target.config, processes=2).step_operations
    assert halves == pytest.approx(real.total, rel=0.05)
    assert halves == pytest.approx(estimate_work(recipe, target.config).step_operations / 2, rel=0.01)


def test_sampling_reads_the_weights_once_a_token() -> None:
    model = make_llama(**SHAPES)
    weights = sum(p.numel() for p in model.parameters())
    work = estimate_work(recipe_of(), model.config)
    assert work.passes == 7 * 20  # a hundred texts in batches of sixteen
    assert work.pass_operations == 2 * weights * 16
    slots = 10 + 20
    assert work.pass_bytes == 4 * weights + 2 * 2 * 16 * 1 * 8 * slots * 4 / 2
    assert work.prompt_operations == 2 * weights * 100 * 10
    assert estimate_work(recipe_of(), model.config, processes=2).passes == 4 * 20
    assert estimate_work(recipe_of(data={"responses": 3}), model.config).passes == 19 * 20
    assert estimate_work(recipe_of(data={"response": "text"}), model.config).passes == 0


def test_caching_the_states_is_a_pass_of_the_target_over_all_samples() -> None:
    model = make_llama(**SHAPES)
    weights = sum(p.numel() for p in model.parameters())
    online = estimate_work(recipe_of(), model.config)
    cached = estimate_work(recipe_of(teacher={"kind": "cached"}), model.config)
    assert online.caching_operations == 0
    assert cached.caching_operations == 2 * weights * 100 * 30
    assert cached.step_operations < online.step_operations
    steps = 30 * cached.step_operations
    assert cached.training_seconds("l4") == pytest.approx((steps + cached.caching_operations) / (0.4 * 121e12))
    assert estimate_work(recipe_of(teacher={"kind": "cached"}), model.config, processes=2).caching_operations == (
        cached.caching_operations / 2
    )


def test_prompts_meet_an_encoder_and_answers_a_decoder() -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 1}
    model = T5ForConditionalGeneration(T5Config(**sizes, vocab_size=50, decoder_start_token_id=0))
    encoder, decoder = (sum(p.numel() for p in part.parameters()) for part in (model.encoder, model.decoder))
    work = estimate_work(recipe_of(), model.config)
    assert work.prompt_operations == 2 * encoder * 100 * 10
    assert work.pass_operations == 2 * decoder * 16  # whose embeddings are its lm_head


def test_only_sources_without_answers_are_sampled() -> None:
    sources = [{"prompts": "a", "share": 3}, {"prompts": "b", "response": "text"}]
    config = make_llama(**SHAPES).config
    whole, mixed = (estimate_work(recipe_of(data=data), config) for data in ({}, {"prompts": sources}))
    assert mixed.prompt_operations == pytest.approx(0.75 * whole.prompt_operations)


def test_seconds_are_operations_and_bytes_by_the_share_of_the_peak() -> None:
    work = estimate_work(recipe_of(), make_llama(**SHAPES).config)
    assert work.training_seconds("h100") == pytest.approx(30 * work.step_operations / (0.4 * 989e12))
    reading = work.passes * work.pass_bytes / (0.5 * 3350e9)  # so few texts are bound by memory
    assert work.sampling_seconds("h100") == pytest.approx(reading + work.prompt_operations / (0.4 * 989e12))
    assert in_hours(7300) == "2.0 h"
    assert in_hours(7100) == "119 min"
    assert work.on("l4").startswith("about 1 min on l4: sampling 1 min, training 1 min")


def test_machines_are_recognised_by_the_names_that_people_use() -> None:
    names = {"H100": "h100", "NVIDIA H100 80GB HBM3": "h100", "4090": "rtx4090", "RTX 4090": "rtx4090", "L4": "l4"}
    names |= {"a100-80gb": "a100", "A10": "a10", "rtx4090": "rtx4090", "L40S": "l40s"}
    assert {name: machine_named(name) for name in names} == names


def test_overrides_that_fit_are_the_first_that_save_enough() -> None:
    saved = {"train.gradient_accumulation": 20, "train.activation_checkpointing": 0, "target.quantization": 40}
    recipe = parse_recipe({"name": "a", "output": "b", "drafter": {"type": "medusa"}}, "test")

    def needed(overrides: list[str]) -> dict[str, int]:
        keys = [entry.partition("=")[0] for entry in overrides]
        if "target.dtype" in keys:
            raise ConfigError("excluded")
        return {"in training": 100 - sum(saved.get(key, 0) for key in keys), "while sampling": 10}

    assert fitting_overrides(recipe, 80, needed) == ["train.gradient_accumulation=4"]
    assert fitting_overrides(recipe, 40, needed) == ["train.gradient_accumulation=4", "target.quantization=int8"]
    assert fitting_overrides(recipe, 30, needed) is None


@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16"], "bfloat16"))
def test_experts_count_for_the_tokens_that_they_read(dtype: str) -> None:
    """Of 8 experts a token reads 2, the texts of a large batch together read all."""
    shapes = {**SHAPES, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}
    config = Qwen3MoeConfig(**shapes, decoder_sparse_step=1, mlp_only_layers=[])
    work = estimate_work(recipe_of(target={"dtype": dtype}), config)
    model = Qwen3MoeForCausalLM(config)
    expert = 16 * 24 * 3 * 2  # gate, up and down, in two layers
    dense = sum(weight.numel() for weight in model.parameters()) - 8 * expert
    assert work.pass_operations == 2 * 16 * (dense + 2 * expert)
    share = 1 - 0.75**16
    assert work.pass_bytes - estimate_memory(recipe_of(target={"dtype": dtype}), config).cache / 2 == pytest.approx(
        (dense + share * 8 * expert) * (4 if dtype == "float32" else 2), rel=1e-6
    )
    few = Qwen3MoeConfig(**{**shapes, "num_experts_per_tok": 1}, decoder_sparse_step=1, mlp_only_layers=[])
    less = work.step_operations - estimate_work(recipe_of(target={"dtype": dtype}), few).step_operations
    assert less == 8 * 30 * 2 * expert * (1 + 3 / 2)  # the draft model has one of the two layers, and a backward pass


def test_values_that_save_in_another_phase_are_found_after_the_first_one() -> None:
    recipe = parse_recipe({"name": "a", "output": "b", "drafter": {"type": "medusa"}}, "test")

    asked = list[list[str]]()

    def needed(overrides: list[str]) -> dict[str, int]:
        asked.append(overrides)
        sampling = 90 - 60 * ("data.batch_size=16" in overrides) - 20 * ("target.quantization=int8" in overrides)
        training = 60 - 30 * ("train.gradient_accumulation=4" in overrides)
        training -= 25 * ("target.quantization=int8" in overrides)
        return {"while sampling": sampling, "in training": training}

    fewer = "data.batch_size=16"
    assert fitting_overrides(recipe, 40, needed) == [fewer, "train.gradient_accumulation=4"]
    assert asked == [[], [fewer], [fewer, "train.gradient_accumulation=4"]], "each takes seconds"


def test_a_target_that_fits_in_4_bits_only_is_served_elsewhere_and_read_layer_by_layer() -> None:
    recipe = parse_recipe({"name": "a", "output": "b", "drafter": {"type": "medusa"}}, "test")
    saved = {"data.response=text": 10, "target.offload=true": 60, "target.quantization=int8": 30}
    saved |= {"train.gradient_accumulation=8": 5}

    def needed(overrides: list[str]) -> dict[str, int]:
        if {"target.quantization=int8", "target.offload=true"} <= {*overrides}:
            raise ConfigError("excluded")
        return {"in training": 100 - sum(saved.get(entry, 0) for entry in overrides)}

    served = ["data.response=text", "teacher.kind=cached", "target.offload=true"]
    assert fitting_overrides(recipe, 65, needed) == ["train.gradient_accumulation=8", "target.quantization=int8"]
    assert fitting_overrides(recipe, 60, needed) == [*served]
    assert fitting_overrides(recipe, 25, needed) == [*served, "train.gradient_accumulation=8"]
    assert fitting_overrides(recipe, 20, needed) is None


def test_answers_of_a_server_cost_no_sampling_here() -> None:
    server = {"url": "http://localhost:8080", "model": "m"}
    config = make_llama(**SHAPES).config
    here, there = recipe_of(), recipe_of(data={"server": server})
    assert estimate_work(there, config).sampling_seconds("l4") == 0 < estimate_work(here, config).sampling_seconds("l4")
    assert estimate_memory(there, config).cache == 0 < estimate_memory(here, config).cache
