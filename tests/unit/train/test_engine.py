"""Refusals before any work starts, launch configs that accelerate reads, and shards without processes."""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.commands.config.config_args import load_config_from_file
from torch import nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from draftsmith.distill.muon import Muon
from draftsmith.errors import ConfigError
from draftsmith.heads.lora import like, whole
from draftsmith.train import launch as launching
from draftsmith.train.deepspeed import make_plugin
from draftsmith.train.recipe import load_recipe, shipped_recipes
from draftsmith.train.run_folder import comparable
from draftsmith.train.trainer import train

DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
WRAPPED = {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer"}
CONFIGS = sorted(
    file.name for file in (files("draftsmith.recipes") / "accelerate").iterdir() if file.name.endswith(".yaml")
)


def _refused(recipe: Path, overrides: list[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The line; nothing was loaded, and no process was met."""
    monkeypatch.setattr(launching, "Accelerator", lambda *_, **__: pytest.fail("processes met first"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refusal:
        train(load_recipe(str(recipe), overrides))
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"train_batch_size": 4}, "train_batch_size=4, but the recipe has train.batch_size=8; expected 8"),
        ({"train_micro_batch_size_per_gpu": 8}, "train_micro_batch_size_per_gpu=8, .*; expected 2"),
        ({"gradient_accumulation_steps": 1}, "=1, but the recipe has train.gradient_accumulation=2"),
        ({"gradient_clipping": 0.5}, "gradient_clipping=0.5, but the recipe has train.clip_norm=1.0"),
        ({"bf16": {"enabled": True}}, "bf16.enabled=True, but the recipe has train.mixed_precision='no'"),
        ({"fp16": {"enabled": True}}, "fp16.enabled=True, but the recipe has train.mixed_precision='no'"),
        ({"optimizer": {"type": "Adam"}}, r"optimizer=\{\"type\": \"Adam\"\}; .*train.optimizer"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler=.*train.learning_rate"),
        ({"zero_optimization": {"stage": 1}}, "zero_optimization.stage=1; expected 2 or 3"),
    ],
)
def test_a_deepspeed_config_cannot_contradict_the_recipe(
    config: dict[str, Any], message: str, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, **config}))
    environment = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    overrides = ["train.gradient_accumulation=2"]
    refusal = _refused(recipe_file, overrides, {**environment, "WORLD_SIZE": "2"}, monkeypatch)
    assert re.search(message, refusal), refusal


@pytest.mark.parametrize("accelerator", [True, False])
def test_a_deepspeed_config_gets_the_recipes_values(
    accelerator: bool, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that agree or are 'auto' are accepted; precision is autocast's, under every engine."""
    monkeypatch.setattr("torch.accelerator.is_available", lambda: accelerator)
    file = tmp_path / "deepspeed.json"
    same = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": "auto"}
    sizes = {"stage": 3, "reduce_bucket_size": "auto"}
    file.write_text(json.dumps({"zero_optimization": sizes, "bf16": {"enabled": True}, **same}))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    monkeypatch.setenv("WORLD_SIZE", "2")
    overrides = ["train.gradient_accumulation=2", "train.clip_norm=0.7", "train.mixed_precision=bf16"]
    config = make_plugin(load_recipe(str(recipe_file), overrides), "bf16").deepspeed_config
    assert config["gradient_clipping"] == 0.7
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert not config["bf16"]["enabled"]
    with_gloo = {} if accelerator else {"stage3_allgather_sequential": True}
    assert config["zero_optimization"] == {"stage": 3, "memory_efficient_linear": False, **with_gloo}


@pytest.mark.parametrize(
    ("overrides", "environment", "message"),
    [
        (["train.optimizer=muon"], DEEPSPEED, "train.optimizer='muon' under DeepSpeed; expected 'adamw'"),
        (["drafter={type: medusa}", "cotrain.lora_rank=2"], DEEPSPEED, "cotrain under DeepSpeed; expected DDP"),
        (["drafter={type: medusa}", "cotrain.lora_rank=2"], FSDP2, "cotrain under FSDP2; expected DDP"),
        ([], {**FSDP2, "FSDP_VERSION": "1"}, "fsdp_version=1; expected 2"),
        ([], {**FSDP2, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, "fsdp_cpu_ram_efficient_loading=true; expected fal"),
        ([], {**FSDP2, **WRAPPED}, "expected fsdp_auto_wrap_policy: NO_WR"),
        ([], {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "has train.gradient_accumulation=1"),
        (
            [],
            {**DEEPSPEED, "LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "true"},
            "with use_cpu; expected `accelerate launch`",
        ),
        ([], DEEPSPEED, "without ranks"),
        ([], {"ACCELERATE_USE_MEGATRON_LM": "true"}, "expected DDP, FSDP2 or DeepSpeed"),
        (
            ["target.tensor_parallel=2"],
            {},
            "target.tensor_parallel=2 with processes=1; expected a divisor of the number",
        ),
        ([], {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "target.tensor_parallel divides a target, and"),
        (["train.sequence_parallel=3"], {"WORLD_SIZE": "4"}, "train.sequence_parallel=3 with processes=4; expected a"),
        (
            ["train.sequence_parallel=2"],
            {"WORLD_SIZE": "6"},
            "train.batch_size=8; expected a multiple of 3 = 6 processes / sequence_parallel=2",
        ),
        ([], {**DEEPSPEED, "WORLD_SIZE": "3"}, "train.batch_size=8; expected a multiple of 3 = 3 processes"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_before_processes_meet(
    overrides: list[str], environment: dict[str, str], message: str, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert message in _refused(recipe_file, overrides, environment, monkeypatch)


def test_where_the_target_lies_makes_no_other_run(recipe_file: Path) -> None:
    """A run may be resumed with more or fewer processes, and then with the target in shards or not."""
    plain, sharded = (load_recipe(str(recipe_file), [f"target.sharded={value}"]) for value in ("false", "true"))
    assert sharded.target.sharded
    divided = load_recipe(str(recipe_file), ["target.tensor_parallel=2"])
    assert comparable(plain) == comparable(sharded) == comparable(divided)


@pytest.mark.parametrize("name", CONFIGS)
def test_launch_configs_are_accelerates_own(name: str) -> None:
    file = files("draftsmith.recipes") / "accelerate" / name
    config = load_config_from_file(str(file))
    text = file.read_text(encoding="utf-8")
    assert f"accelerate launch --config_file recipes/accelerate/{name} -m draftsmith.train RECIPE" in text
    assert "Hardware:" in text
    assert config.mixed_precision == "no"
    assert config.num_processes == {"2": 2, "8": 8}.get("".join(c for c in name.split("_")[-1] if c.isdigit()), 1)
    engine = {"zero": "DEEPSPEED", "fsdp": "FSDP"}.get(name[:4], "MULTI_GPU" if config.num_processes > 1 else "NO")
    assert config.distributed_type == engine


@pytest.mark.parametrize("name", ["several_machines.sh", "slurm.sh"])
def test_launch_scripts_are_valid_and_name_their_commands(name: str) -> None:
    file = files("draftsmith.recipes") / "accelerate" / name
    text = file.read_text(encoding="utf-8")
    assert f"recipes/accelerate/{name} ddp_8gpu RECIPE [key=value ...]" in text.splitlines()[1]
    assert subprocess.run(["bash", "-n", str(file)], capture_output=True).returncode == 0


def test_ddp_keeps_one_copy_of_the_gradients(recipe_file: Path, tmp_path: Path) -> None:
    handler = launching.make_accelerator(load_recipe(str(recipe_file)), tmp_path).ddp_handler
    assert handler is not None
    assert handler.gradient_as_bucket_view


def test_launch_configs_are_no_recipes() -> None:
    assert CONFIGS
    assert not any(name.startswith("accelerate/") for name in shipped_recipes())


def test_shards_become_whole_tensors_and_back() -> None:
    """One process holds all shards, so that what DTensor does to shapes and placements is all that is tested."""
    with one_process() as mesh:
        value = torch.arange(12.0).view(3, 4)
        shard = DTensor.from_local(torch.zeros(3, 4), mesh, [Shard(0)])
        placed = like(value, shard)
        assert placed.placements == shard.placements
        assert torch.equal(whole(placed), value)
    assert like(value, value) is value
    assert whole(value) is value


def test_muon_takes_one_step_for_shards_and_whole_matrices() -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(2, 6, 4)
    ends = []
    with one_process() as mesh:
        for sharded in (False, True):
            weight = nn.Parameter(DTensor.from_local(start.clone(), mesh, [Shard(0)]) if sharded else start.clone())
            optimizer = Muon([weight], lr=0.1, weight_decay=0.1)
            for _ in range(3):
                weight.grad = like(gradient, weight)
                optimizer.step()
            ends.append(whole(weight.detach()))
    assert not torch.equal(ends[0], start)
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-6)


@contextmanager
def one_process() -> Iterator[DeviceMesh]:
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield init_device_mesh("cpu", (1,))
        finally:
            dist.destroy_process_group()
