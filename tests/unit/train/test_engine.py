"""Refusals before any work starts, launch configs that accelerate reads, and shards without processes."""

import json
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from draftsmith.errors import ConfigError
from draftsmith.train import launch as launching
from draftsmith.train.deepspeed import make_plugin
from draftsmith.train.recipe import load_recipe
from draftsmith.train.run_folder import comparable
from draftsmith.train.trainer import train

DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
WRAPPED = {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer"}
ACCELERATE = files("draftsmith.recipes") / "accelerate"
CONFIGS = sorted(file.name for file in ACCELERATE.iterdir() if file.name.endswith(".yaml"))


def _refused(recipe: Path, overrides: list[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The line; nothing was loaded, and no process was met."""
    monkeypatch.setattr(launching, "Accelerator", lambda *_, **__: pytest.fail("processes met first"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refusal:
        train(load_recipe(str(recipe), overrides))
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize("accelerator", [True, False])
def test_a_deepspeed_config_gets_the_recipes_values(
    accelerator: bool, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They replace those of the file; precision is autocast's, under every engine."""
    monkeypatch.setattr("torch.accelerator.is_available", lambda: accelerator)
    file = tmp_path / "deepspeed.json"
    other = {"train_batch_size": 4, "gradient_clipping": "auto", "optimizer": {"type": "Adam"}}
    sizes = {"stage": 3, "reduce_bucket_size": "auto"}
    file.write_text(json.dumps({"zero_optimization": sizes, "bf16": {"enabled": True}, **other}))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    overrides = ["train.gradient_accumulation=2", "train.clip_norm=0.7", "train.mixed_precision=bf16"]
    config = make_plugin(load_recipe(str(recipe_file), overrides), processes=2).deepspeed_config
    assert "optimizer" not in config
    assert config["train_batch_size"] == 8
    assert config["gradient_clipping"] == 0.7
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert not config["bf16"]["enabled"]
    with_gloo = {} if accelerator else {"stage3_allgather_sequential": True}
    assert config["zero_optimization"] == {"stage": 3, "memory_efficient_linear": False, **with_gloo}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, []),
        ({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}, []),
        ({"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"}, []),  # the recipe's
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto"}, []),
        (
            {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
            [
                "launch: mixed_precision=fp16 is not used; the recipe has train.mixed_precision=bf16",
                "launch: gradient_accumulation_steps=4 is not used; the recipe has train.gradient_accumulation=2",
            ],
        ),
    ],
)
def test_settings_of_the_launch_that_are_not_used_are_named(
    environment: dict[str, str], expected: list[str], recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    recipe = load_recipe(str(recipe_file), ["train.mixed_precision=bf16", "train.gradient_accumulation=2"])
    assert launching.unused_settings(recipe.train) == expected
    monkeypatch.setattr("draftsmith.train.step.bf16_is_fast", lambda device: False)
    lines = launching.unused_settings(load_recipe(str(recipe_file), ["train.mixed_precision=auto"]).train)
    given = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    auto = f"launch: mixed_precision={given} is not used; the recipe has train.mixed_precision=auto, here no"
    assert (auto in lines) == (given != "no")


@pytest.mark.parametrize(
    ("overrides", "environment", "message"),
    [
        (["train.optimizer=muon"], DEEPSPEED, "train.optimizer='muon' under DeepSpeed; expected 'adamw'"),
        (["drafter={type: medusa}", "cotrain.lora_rank=2"], DEEPSPEED, "cotrain under DeepSpeed; expected DDP"),
        (["drafter={type: medusa}", "cotrain.lora_rank=2"], FSDP2, "cotrain under FSDP2; expected DDP"),
        ([], {**FSDP2, "FSDP_VERSION": "1"}, "fsdp_version=1; expected 2"),
        ([], {**FSDP2, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, "fsdp_cpu_ram_efficient_loading=true; expected fal"),
        ([], {**FSDP2, **WRAPPED}, "expected fsdp_auto_wrap_policy: NO_WR"),
        ([], {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, "zero_optimization.stage=1; expected 2 or 3"),
        ([], {**DEEPSPEED, **LAUNCHED, "WORLD_SIZE": "1", "ACCELERATE_USE_CPU": "true"}, "with use_cpu; expected `acc"),
        ([], DEEPSPEED, "without ranks"),
        (["train.sequence_parallel=3"], {**LAUNCHED, "WORLD_SIZE": "4"}, "train.sequence_parallel=3 with processes=4"),
        (["train.sequence_parallel=2"], {**LAUNCHED, "WORLD_SIZE": "6"}, "a multiple of 3 = 6 processes / sequence"),
        ([], {**DEEPSPEED, **LAUNCHED, "WORLD_SIZE": "3"}, "train.batch_size=8; expected a multiple of 3 = 3 proc"),
        (["train.batch_size=7", "train.gradient_accumulation=2"], {}, "train.batch_size=7; expected a multiple of 2"),
        ([], {"WORLD_SIZE": ""}, "WORLD_SIZE='' in the environment; expected a whole number >= 1, or unset"),
        ([], {"LOCAL_RANK": "x"}, "LOCAL_RANK='x' in the environment; expected a whole number >= 0"),
        ([], {**LAUNCHED, "WORLD_SIZE": "2", "MASTER_PORT": "0"}, "MASTER_PORT='0' in the environment; expected"),
        ([], {"RANK": "0", "LOCAL_RANK": "0"}, "RANK=0, LOCAL_RANK=0 in the environment without WORLD_SIZE, MASTER"),
        ([], {"WORLD_SIZE": "2"}, "WORLD_SIZE=2 in the environment without RANK, LOCAL_RANK, MASTER_ADDR, MAS"),
        ([], {**LAUNCHED, "WORLD_SIZE": "2", "MASTER_ADDR": ""}, "in the environment without MASTER_ADDR; exp"),
        ([], {**LAUNCHED, "WORLD_SIZE": "2", "RANK": "2"}, "MASTER_PORT=29500 in the environment; expected all"),
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
    assert comparable(plain) == comparable(sharded)


def test_where_an_engine_is_makes_no_other_run(recipe_file: Path) -> None:
    """Nor how it is asked; its model and its sampling do."""

    def of(*overrides: str) -> dict[str, Any]:
        return comparable(load_recipe(str(recipe_file), ["data.server.model=m", *overrides]))

    here = of("data.server.url=http://a:1")
    assert of("data.server.url=http://b:2", "data.server.concurrency=3", "data.server.failures=1") == here
    assert of("data.server.url=http://a:1", "data.server.top_p=0.9") != here


@pytest.mark.parametrize("name", CONFIGS)
def test_launch_configs_are_accelerates_own(name: str) -> None:
    file = ACCELERATE / name
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
    file = ACCELERATE / name
    text = file.read_text(encoding="utf-8")
    assert f"recipes/accelerate/{name} ddp_8gpu RECIPE [key=value ...]" in text.splitlines()[1]
    assert subprocess.run(["bash", "-n", str(file)], capture_output=True).returncode == 0
