"""Recipes for real models: each trains on a small random model of the same kind, and its header says what it costs."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import printed, write_prompts
from conftest import mostly_slow
from states_server import StatesEngine, running
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from draftsmith import SpeculativeDecoder, load_drafter
from draftsmith.distill.load_target import decoder_class, load_target
from draftsmith.train.__main__ import main
from draftsmith.train.estimate.gpus import MACHINES
from draftsmith.train.estimate.memory import estimate_memory
from draftsmith.train.recipe import load_recipe, shipped_recipes
from draftsmith.train.run_folder import read_metrics

SHAPES: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "architectures.yaml").read_text())
EVERY = [name for name in shipped_recipes() if load_recipe(name).target.model != "embedded"]
SERVED = [name for name in EVERY if load_recipe(name).teacher.kind == "server"]
REAL = [name for name in EVERY if name not in SERVED]
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "head_dim": 8, "vocab_size": 64}
SMALL |= {"n_embd": 32, "n_layer": 6, "n_head": 4, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2}
SMALL |= {"max_position_embeddings": 256, "n_positions": 256, "num_heads": 4, "query_pre_attn_scalar": 8}
SMALL |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
SMALL |= {"num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
SMALL |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "kv_lora_rank": 8, "v_head_dim": 8}
SMALL |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
SMALL |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "global_head_dim": 16, "num_kv_shared_layers": 0}
SMALL |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
SMALL |= {"depth": 2, "out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
SMALL |= {"mrope_section": [1, 1, 2], "top_k_experts": 2, "num_global_key_value_heads": 1, "q_lora_rank": 8}
FAST = ("gpt-oss-20b/eagle3", "lfm2-1.2b/lfm2-350m", "t5-base/t5-small", "vicuna-7b/eagle")
"""Recipes in `make test`: experts, recurrent layers, an encoder; tests/recipes/test_shipped_recipes.py has other
drafters."""
SHORT = {"gpt2/distilgpt2", "t5-base/t5-small", "smollm2-135m/draft_model", "smollm2-135m/mtp", "gemma3-270m/eagle3"}
"""Recipes of targets that answer no questions or fit a CPU."""
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is defined %}{% endif %}"


def small_shapes(shapes: dict[str, Any]) -> dict[str, Any]:
    """Return small sizes for those of a config, of its parts too, with as many heads of queries for each of keys."""
    nested = {key: small_shapes(value) for key, value in shapes.items() if isinstance(value, dict)}
    values = {key: SMALL.get(key, value) if value else value for key, value in shapes.items()} | nested
    if "num_attention_heads" in shapes:
        groups = shapes["num_attention_heads"] // shapes["num_key_value_heads"]
        values |= {"num_attention_heads": 4, "num_key_value_heads": 1 if groups >= 4 else 4 // groups}
    return values


def small_model(shapes: dict[str, Any], folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Of the same kind: model type, ties, groups of heads, rope and windows, in a few thousand weights."""
    config = AutoConfig.for_model(**small_shapes(shapes) | {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None})
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else decoder_class(config, images=False)
    auto.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("without_estimate")
@pytest.mark.parametrize("name", mostly_slow(REAL, *FAST))
def test_a_recipe_trains_on_a_small_model_of_the_kind(
    name: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    recipe, out = load_recipe(name), tmp_path / "run"
    tiny_tokenizer.chat_template = TEMPLATE
    target = small_model(SHAPES[recipe.target.model], tmp_path / "target", tiny_tokenizer)
    prompts = write_prompts(tmp_path / "prompts.jsonl", *("abcdefgh"[i % 5 :] + "ab"[i % 2] for i in range(24)))
    small = [f"output={out}", f"target.model={target}", f"data.prompts={prompts}", "data.response_tokens=16"]
    small += ["data.prompt_tokens=48", "train.steps=2", "train.evaluate_every=2", "train.batch_size=8"]
    small += ["evaluation.count=2", "evaluation.max_new_tokens=8"]
    if recipe.target.sharded:  # over several processes
        small.append("target.sharded=false")
    if recipe.draft_vocab_size is not None:
        small.append("drafter.draft_vocab_size=40")
    if getattr(recipe.drafter, "layers", None) is not None:  # of as many as the small model has
        small.append("drafter.layers=[1, 3, 5]")
    if getattr(recipe.drafter, "init", None) == "native":  # the small model has no module of its own
        small += ["drafter.init=random"]
    if getattr(recipe.drafter, "model", None) is not None:
        small.append(f"drafter.model={small_model(SHAPES[recipe.drafter.model], tmp_path / 'draft', tiny_tokenizer)}")
    assert main([name, *small]) == 0
    assert [row["step"] for row in read_metrics(out) if "loss" in row] == [1, 2]
    loaded = load_target(str(target))
    drafter = load_drafter(out / "drafter", loaded.model, loaded.tokenizer)
    decoder = SpeculativeDecoder(loaded.model, drafter)
    assert len(decoder.generate([5, 6, 7], max_new_tokens=12, eos_token_id=None).tokens) == 12


@pytest.mark.usefixtures("without_estimate")
@pytest.mark.parametrize("name", mostly_slow(SERVED, "gpt-oss-120b/eagle3_server"))
def test_a_recipe_with_an_engine_trains_on_a_small_model_of_the_kind(
    name: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    tiny_tokenizer.chat_template = TEMPLATE + "{% if thinking is defined or reasoning_effort is defined %}{% endif %}"
    target = small_model(SHAPES[load_recipe(name).target.model], tmp_path / "target", tiny_tokenizer)
    (tmp_path / "states").mkdir()
    rows = [{"prompt": "abcdefgh"[i % 5 :] + "ab"[i % 2], "response": "hgfedcba"[i % 3 :]} for i in range(24)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    small = [f"output={tmp_path / 'run'}", f"target.model={target}", f"data.prompts={tmp_path / 'prompts.jsonl'}"]
    small += [
        "data.response=text",
        "data.response_tokens=16",
        "data.prompt_tokens=48",
        "train.steps=2",
        "data.validation=2",
    ]
    small += ["train.batch_size=4", "drafter.draft_vocab_size=40", f"teacher.server.folder={tmp_path / 'states'}"]
    _, shown, _ = printed(capsys, "data", "server", name, *small)
    layers = json.loads(re.search(r"layer_ids\": (\[[^]]*\])", shown)[1])  # pyright: ignore[reportOptionalSubscript]
    assert layers[-1] == 6
    assert "--max-model-len 65 " in shown
    _, told, _ = printed(capsys, "memory", name, *small, "--on", "h100")
    assert f"states of layers {', '.join(map(str, layers))}: at most 0 MiB a step from the engine, " in told
    with running(StatesEngine(load_target(str(target)).model, tmp_path / "states", layers)) as address:  # pyright: ignore
        assert main([name, *small, f"teacher.server.urls={address}", "target.dtype=float32"]) == 0
    assert [row["step"] for row in read_metrics(tmp_path / "run") if "loss" in row] == [1, 2]
    card = re.search(r"# Hardware: one GPU of (\d+) GB beside the engine: (\S+) GiB", shipped_recipes()[name])
    assert card is not None
    recipe = load_recipe(name)
    estimate = estimate_memory(recipe, AutoConfig.for_model(**SHAPES[recipe.target.model]), bf16=True, accelerated=True)
    assert estimate.announced / 2**30 == pytest.approx(float(card[2]), abs=0.06)
    assert recipe.unread_answers == 0


@pytest.mark.parametrize("name", REAL)
def test_a_header_tells_hardware_time_and_what_to_approach(name: str) -> None:
    header = shipped_recipes()[name].split("\nname:")[0]
    gpus = "8 GPUs of" if load_recipe(name).target.sharded else "one GPU of"
    measured = "# Measured: " in header
    gpus, figures = ("any", "# Measured: ") if measured else (gpus, "# Approach: ")
    for line in ("# Launch:   accelerate launch", f"# Hardware: {gpus}", "# Time:     about", figures):
        assert header.count(f"\n{line}") == 1, line
    assert ("(computed)" in header) != measured, "what was never run says so"


@pytest.mark.parametrize("name", REAL)
def test_hours_are_of_a_machine_that_has_the_memory(name: str) -> None:
    header = shipped_recipes()[name]
    card, machine = re.search(r"# Hardware: .* GPUs? of (\d+) GB", header), re.search(r"h on (\w+): sampling", header)
    if card is not None and machine is not None:
        assert MACHINES[machine[1]][2] >= min(int(card[1]), 140)


@pytest.mark.parametrize("name", REAL)
def test_every_answer_that_is_sampled_is_trained_on(name: str) -> None:
    """The rule for `data.count`: sampling costs hours, and a step reads `train.batch_size` answers."""
    for overrides in ([], thinking_overrides(name)):
        assert load_recipe(name, overrides).unread_answers == 0


def test_estimates_read_no_prompts(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recipes whose prompts are the user's have an estimate before the file is there."""
    names = [name for name in REAL if load_recipe(name).data.prompts == "prompts.jsonl"]
    assert len(names) >= 5
    folder, given = small_model(SHAPES["openai-community/gpt2"], tmp_path / "target", tiny_tokenizer), tmp_path / "out"
    recipe = "llama3.1-8b/eagle3_32k"
    changed = ["data.prompt_tokens=64", "data.response_tokens=16", "drafter={type: medusa}", "train.draft_length=3"]
    changed += ["train.sequence_parallel=1", "train.steps=100", f"target.model={folder}", f"output={given}"]
    code, said, problem = printed(capsys, "memory", recipe, *changed, "--on", "h100")
    assert code == 0, problem
    assert "kernel launches and Python come on top" in said
    assert "3,200 of the answers that it samples are in no step: lower data.count" in said
    code, _, problem = printed(capsys, "data", "prepare", recipe, *changed)
    assert (code, "data.prompts=prompts.jsonl" in problem) == (2, True)


def thinking_overrides(name: str) -> list[str]:
    found = re.search(r"(?m)^# Thinking: (.+)$", shipped_recipes()[name])
    return [] if found is None else found[1].split()


THINKING = [name for name in REAL if thinking_overrides(name)]


def test_targets_that_think_have_overrides_for_it() -> None:
    assert len(THINKING) >= 12
    for name in REAL:
        recipe, answers = load_recipe(name), load_recipe(name, thinking_overrides(name))
        assert recipe.data.template_options == {} or name in THINKING
        assert recipe.data.response_tokens >= 1024 or "# Measured: " in shipped_recipes()[name] or name in SHORT
        if name in THINKING:
            assert answers.data.template_options in ({"enable_thinking": True}, {"reasoning_effort": "high"})
            assert answers.data.response_tokens >= 4096


@pytest.mark.slow
@pytest.mark.parametrize("name", THINKING)
def test_a_run_with_thinking_fits_the_card_of_the_header(
    name: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, given = load_recipe(name), thinking_overrides(name)
    for key, model in (
        ("target.model", recipe.target.model),
        ("drafter.model", getattr(recipe.drafter, "model", None)),
    ):
        if model is not None:
            AutoConfig.for_model(**SHAPES[model]).save_pretrained(tmp_path / key)
            tiny_tokenizer.save_pretrained(tmp_path / key)
            given.append(f"{key}={tmp_path / key}")
    code, said, problem = printed(capsys, "memory", name, *given, "--on", "h100", "--json")
    assert code == 0, problem
    phases = json.loads(said)["bytes"]
    card = re.search(r"# Hardware: one GPU of (\d+) GB", shipped_recipes()[name])
    assert card is not None
    assert max(sum(parts.values()) for parts in phases.values()) < 0.9 * int(card[1]) * 2**30


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-1.7b/smollm2-135m", "llama3.1-8b/eagle3", "llama3.1-8b/eagle3_128k"])
def test_a_header_is_what_is_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from recipe_costs import costs  # the script that writes the headers

    hardware, time = costs(name, SHAPES, None)
    header = shipped_recipes()[name]
    assert f"# Hardware: {hardware}\n" in header
    assert f"# Time:     {time}\n" in header
    sys.modules.pop("recipe_costs")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3_32k", "eagle3_128k"])
def test_long_texts_fit_an_accelerator(name: str) -> None:
    recipe = load_recipe(f"llama3.1-8b/{name}")
    config = AutoConfig.for_model(**SHAPES[recipe.target.model])
    estimate = estimate_memory(recipe, config, bf16=True, accelerated=True)
    assert estimate.peak < 0.9 * 80e9
    assert recipe.data.prompt_tokens + recipe.data.response_tokens <= config.max_position_embeddings


@pytest.mark.slow
def test_blocks_at_many_anchors_fit_an_accelerator() -> None:
    """512 blocks of 16 positions a text, for a target of 8B on one process."""
    recipe = load_recipe("dflash/any_prompts", ["target.dtype=bfloat16"])
    config = AutoConfig.for_model(**SHAPES["meta-llama/Llama-3.1-8B-Instruct"])
    estimate = estimate_memory(recipe, config, bf16=True, accelerated=True)
    assert estimate.peak < 0.9 * 80e9


def test_the_table_of_the_readme_is_that_of_the_recipes() -> None:
    """Cards and hours are those of the headers, and the disk of cached states follows from sizes."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\S+)` \| (\d+) GB \| (\S+), (\S+) \(H100\) \| none; (\S+) TB", text, re.MULTILINE)
    assert len(rows) >= 5
    for name, card, *hours, disk in rows:
        recipe, header = load_recipe(name), shipped_recipes()[name]
        assert f"one GPU of {card} GB" in header
        found = re.search(r"sampling (\S+) (h|min), training (\S+) (h|min) \(computed\)", header)
        assert found is not None
        told = [float(found[n]) / (60 if found[n + 1] == "min" else 1) for n in (1, 3)]
        assert [float(hour) for hour in hours] == pytest.approx(told, abs=0.06)
        drafter, data = yaml.safe_load(header)["drafter"], recipe.data
        layers = {"eagle3": 3, "mtp": 0, "dflash": drafter.get("num_hidden_layers")}[drafter["type"]]
        width = SHAPES[recipe.target.model]["hidden_size"]
        tokens = data.count * (data.prompt_tokens + data.response_tokens)
        assert float(disk) == pytest.approx(tokens * (1 + layers) * width * 2 / 1e12, abs=0.06)
