"""Recipes are strict, and say what would be valid."""

from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import ConfigError
from draftsmith.train.recipe import load_recipe, parse_recipe
from draftsmith.train.run_folder import append_metrics, check_output, claim_output, read_metrics, restart_metrics

BASE = {"name": "x", "output": "y", "drafter": {"type": "medusa"}}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.stepz=3"], r"unknown key train\.stepz=3; did you mean train\.steps\?"),
        (["trian.steps=3"], r"unknown key trian=.*; did you mean train\?"),
        (["cotrain.rank=3"], r"unknown key cotrain\.rank=3; did you mean cotrain\.lora_rank\?"),
        (["drafter.num_head=3"], r"unknown key drafter\.num_head=3; did you mean drafter\.num_heads\?"),
        (["train.draft_length=0"], r"train\.draft_length=0; expected >= 1 \(medusa/any_prompts\)"),
        (["train.learning_rate=-1"], r"train\.learning_rate=-1; expected > 0"),
        (["train.learning_rate=.inf"], r"train\.learning_rate=inf; expected a finite number"),
        (["train.steps=yes"], r"train\.steps=True; expected a number"),
        (["train.steps=many"], r"train\.steps='many'; expected a valid integer"),
        (["drafter.num_layers=2000000"], r"drafter\.num_layers=2000000; expected <= 1024"),
        (["train.steps=" + "[" * 60 + "]" * 60], r"train\.steps"),
        (["objective.temperature=0"], r"^objective\.temperature=0; expected > 0 \("),
        (["objective.temperature=abc"], r"^objective\.temperature='abc'; expected a valid number"),
        (["objective.mix={kll: 1}"], r"^objective\.mix\.kll='kll'; expected 'kl', 'reverse_kl'"),
        (["drafter={type: draft_model, keep: all}"], r"^drafter\.keep='all'; expected 'even', 'first' or 'last' \("),
        (["drafter={type: draft_model, keep: [0, x]}"], r"^drafter\.keep\.1='x'; expected a valid integer"),
        (["data.server.model=x"], r"^data\.server\.url is missing; expected a value"),
        (["data.server={url: h, model: m}"], "expected an address"),
        (["data.server={url: 'http://h', model: m, route: post}"], "'auto', 'chat' or 'completion'"),
        (["data.server={url: 'http://h', model: m, top: 1}"], r"did you mean data\.server\.top_p"),
        (["objective.position_decay=2"], r"objective\.position_decay=2; expected <= 1"),
        (["train.seed=4294967296"], r"train\.seed=4294967296; expected <= 4294967295"),
        (["drafter={type: eagle3, layers: []}"], r"drafter\.layers=\[\]; expected"),
        (["train=3"], r"train=3; expected a section with keys"),
        (["name=" + "x" * 101], r"name='x+.*; expected at most 100 characters"),
        (["objective.kind=kll"], r"objective\.kind='kll'; expected 'kl', 'reverse_kl', 'js', 'tv'"),
        (["drafter.type=medsua"], r"drafter\.type='medsua'; expected one of draft_model, medusa, eagle"),
        (["evaluation.max_new_tokens=1"], r"evaluation\.max_new_tokens=1; expected >= 2"),
        (["train.steps"], r"override 'train\.steps'; expected section\.key=value"),
    ],
)
def test_bad_values_are_explained(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("medusa/any_prompts", overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.responses=2", "data.temperature=0"], "data.responses=2 with temperature=0, which gives the same text"),
        (["data.responses=2", "data.response=text"], "data.responses=2 with response='text'"),
        (["data.server={url: 'http://h', model: m}", "data.response=text"], "data.server"),
        (["cotrain.lora_rank=2", "teacher.kind=cached"], "teacher.kind='cached' with cotrain; expected 'online'"),
        (["teacher.file=x.jsonl"], "teacher.file=x.jsonl with teacher.kind='online'; expected 'files'"),
        (["teacher.kind=files"], "teacher.kind='files' without teacher.file; expected a folder of hidden states"),
        (["teacher={kind: files, file: x}"], "data.response='target' with teacher.kind='files', which has states of"),
        (["teacher={kind: files, file: x}", "cotrain.lora_rank=2"], "teacher.kind='files' with cotrain; expected"),
        (["target.sharded=true", "cotrain.lora_rank=2"], "target.sharded=True with cotrain; expected false"),
        (["target.offload=true", "target.sharded=true"], "target.offload=True with target.sharded=True"),
        (["train.sequence_parallel=2", "data.images=."], "train.sequence_parallel=2 with data.images; expected one"),
        (["data.images=.", "data.pack=true"], "data.images=. with data.pack=true; expected one of the two"),
        (["data.images=.", "data.turns=all"], "data.images=. with data.turns='all'"),
        (["data.images=.", "teacher.kind=cached"], "data.images=. with teacher.kind='cached'"),
        (["target.attn_implementation=x"], "target.attn_implementation='x'; expected sdpa, eager, flash_attention_2"),
        (["target.attn_implementation=flash_attention_2"], "target.attn_implementation=flash_attention_2 with dtype="),
        (["target.offload=true", "cotrain.lora_rank=2"], "target.offload=True with cotrain; expected one of the two"),
        (["target.quantization=int8", "target.offload=true"], "target.quantization=int8 with target.offload=True; exp"),
        (["target.quantization=int8", "cotrain.lora_rank=2"], "target.quantization=int8 with cotrain; expected one"),
        (["target.quantization=int8", "teacher={kind: files, file: x}"], "target.quantization=int8 with teacher.kind"),
        (["target.quantization=int4"], "target.quantization='int4'; expected 'int8' or 'float8'"),
    ],
)
def test_keys_that_exclude_each_other_are_refused_when_the_recipe_is_read(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_recipe("medusa/any_prompts", overrides)
    assert str(refused.value).startswith(message)
    assert str(refused.value).endswith(" (medusa/any_prompts)")


def test_files_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("name: x\noutput: y\ndrafter: {type: medusa}\ntrain: {learning_rate: 1e-3, steps: 7}\n")
    recipe = load_recipe(str(file), ["train.steps=9", "data.prompts=other.jsonl", "train.learning_rate=2e-4"])
    assert (recipe.train.steps, recipe.data.prompts, recipe.train.learning_rate) == (9, "other.jsonl", 2e-4)
    config = "drafter={type: draft_model, config: {model_type: llama, rms_norm_eps: 1e-6}}"
    assert load_recipe(str(file), [config]).drafter_options()["config"]["rms_norm_eps"] == 1e-6
    file.write_text("name: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_recipe(str(file))
    file.write_text("name: x\ndata:\n  count: 8\ntrain: {steps: 7}\ndata:\n  batch_size: 4\n")
    with pytest.raises(ConfigError, match=r"r\.yaml is not YAML \(key 'data' in line 2 and again in line 5\); expe"):
        load_recipe(str(file))
    with pytest.raises(ConfigError, match=r"did you mean medusa/any_prompts\?"):
        load_recipe("medusa/any_prompt")
    for section in ({}, {"drafter": {"num_heads": 3}}, {"drafter": {"type": None}}):
        with pytest.raises(ConfigError, match=r"drafter\.type is missing; expected one of draft_model, medusa, eagle"):
            parse_recipe({"name": "x", "output": "y", **section}, "here")


def test_options_of_a_drafter_whose_type_is_in_its_files() -> None:
    recipe = load_recipe("continue/any_prompts", ["start_from=org/name", "drafter.anchors=8"])
    assert (recipe.drafter.type, recipe.drafter_options()) == (None, {"anchors": 8})
    assert parse_recipe(recipe.model_dump(), "stored") == recipe
    with pytest.raises(ConfigError, match=r"unknown key drafter\.anchorz=8; did you mean drafter\.anchors\?"):
        load_recipe("continue/any_prompts", ["start_from=org/name", "drafter.anchorz=8"])
    with pytest.raises(ConfigError, match=r"drafter\.type='dflesh'; expected one of draft_model"):
        load_recipe("continue/any_prompts", ["start_from=org/name", "drafter.type=dflesh"])


def test_the_home_folder_has_a_short_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    drafter = {"type": "draft_model", "model": "~/small"}
    recipe = parse_recipe({"name": "~", "output": "~/runs/x", "drafter": drafter}, "here")
    assert (recipe.output, recipe.drafter_options()["model"], recipe.name) == ("/home/me/runs/x", "/home/me/small", "~")


def test_a_draft_longer_than_the_drafter_can_propose_is_refused() -> None:
    recipe = parse_recipe({**BASE, "train": {"draft_length": 4}}, "here")
    assert recipe.draft_length(None) == recipe.draft_length(4) == 4
    with pytest.raises(ConfigError, match=r"train\.draft_length=4; expected at most 3"):
        recipe.draft_length(3)
    unset = parse_recipe(BASE, "here")
    assert unset.draft_length(3) == 3
    assert unset.draft_length(None) == 4


def _rates(**train: Any) -> list[float]:
    recipe = parse_recipe({**BASE, "train": {"steps": 100, "learning_rate": 1.0, "warmup_fraction": 0.1, **train}}, "")
    return [recipe.train.rate(step) for step in range(100)]


def test_schedules() -> None:
    rising = pytest.approx([0.1 * (i + 1) for i in range(10)])
    for schedule in ("cosine", "linear", "wsd", "constant"):
        assert _rates(schedule=schedule)[:10] == rising
    cosine = _rates()[9:]
    assert cosine == sorted(cosine, reverse=True)
    assert cosine[0] == 1.0
    assert 0.1 <= cosine[-1] < 0.11
    assert _rates(schedule="constant")[10:] == [1.0] * 90
    assert _rates(schedule="linear")[10:] == pytest.approx([1 - i / 90 for i in range(90)])
    wsd = _rates(schedule="wsd", decay_fraction=0.25)
    assert wsd[10:76] == [1.0] * 66
    assert wsd[75:] == pytest.approx([1 - (i / 25) ** 0.5 for i in range(25)])
    assert wsd[-1] > 0
    with pytest.raises(ConfigError, match=r"decay_fraction=0\.95 with train\.warmup_fraction=0\.1; expected a sum"):
        _rates(schedule="wsd", decay_fraction=0.95)


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    base = {**BASE, "name": "12e4", "output": str(tmp_path / "run")}
    recipe = parse_recipe({**base, "train": {"learning_rate": 1.0}}, "here")
    check_output(recipe)
    claim_output(parse_recipe({**base, "train": {"steps": 9}}, "here"))
    check_output(recipe)  # that start was refused, or killed, before it had done anything
    claim_output(recipe)
    restart_metrics(tmp_path / "run", None)
    check_output(recipe)
    other = parse_recipe({**base, "train": {"steps": 17, "learning_rate": 1.0}}, "here")
    with pytest.raises(ConfigError, match=r"run: train\.steps=200 there, 17 here; expected another output folder$"):
        check_output(other)
    for step in ("000004", "000012"):
        (tmp_path / "run" / "checkpoints" / f"step-{step}").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"with continue_from=.*/run/checkpoints/step-000012; with train.schedule='c"):
        check_output(other)
    stored = tmp_path / "run" / "recipe.yaml"
    stored.write_text(stored.read_text().replace("  response: target\n", ""))
    check_output(recipe)  # a key that an older version did not know has its default
    text = stored.read_text()
    placed = ("target", "tensor_parallel: 8")
    for section, key in (("objective", "dpace: null"), ("data", "speculate: true"), ("drafter", "gone: []"), placed):
        text = text.replace(f"{section}:\n", f"{section}:\n  {key}\n")
    stored.write_text(text)
    check_output(recipe)  # keys that were removed since, and were off or changed no number
    stored.write_text(text.replace("dpace: null", "dpace: 0.5"))
    with pytest.raises(ConfigError, match=r"recipe that this version knows \(unknown key objective\.dpace=0\.5; exp"):
        check_output(recipe)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds files but no recipe\.yaml"):
        check_output(parse_recipe({**BASE, "output": str(tmp_path / "full")}, "here"))


def test_no_step_is_in_the_metrics_twice(tmp_path: Path) -> None:
    restart_metrics(tmp_path, None)
    for step in range(6):
        append_metrics(tmp_path, {"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    restart_metrics(tmp_path, 4)
    append_metrics(tmp_path, {"step": 5, "again": True})
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3, 4, 5]
    assert read_metrics(tmp_path)[-1]["again"]
    restart_metrics(tmp_path, None)
    append_metrics(tmp_path, {"step": 0})
    assert read_metrics(tmp_path) == [{"step": 0}]


def test_an_evaluation_that_is_due_again_is_dropped(tmp_path: Path) -> None:
    """An earlier start did it after its checkpoint, and perhaps decided that the run ends."""
    loss = {"loss": 1.0, "alpha": [0.5]}
    rows = [{"step": 2, "evaluation": {"tau": 1.5}}, {"step": 4, **loss}]
    for row in (*rows, {"step": 4, "evaluation": {"tau": 2.0}}, {"step": 4, "ending": {"last_step": 6}}):
        append_metrics(tmp_path, row)
    restart_metrics(tmp_path, 4)
    assert len(read_metrics(tmp_path)) == 4
    restart_metrics(tmp_path, 4, evaluated=False)
    assert read_metrics(tmp_path) == rows


@pytest.mark.parametrize("row", ["null", '{"loss": 1}', '{"step": "x"}', '["step": 1}'])
@pytest.mark.parametrize("after", ["", '{"step": 2}\n'])
def test_metrics_of_another_shape_are_refused(row: str, after: str, tmp_path: Path) -> None:
    """No row after a damaged one is dropped in silence; only a last line without its end is of a killed run."""
    recipe = parse_recipe({**BASE, "output": str(tmp_path / "run")}, "here")
    claim_output(recipe)
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text(f'{{"step": 0}}\n{row}\n{after}')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2 is not a row of a run's metrics"):
        check_output(recipe)
    file.write_text(f'{{"step": 0}}\n{after}{row}')
    check_output(recipe)
