"""From data to a drafter in other ways than the plain one: several responses, packing, continued training."""

import json
import re
import shlex
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
from accelerate import Accelerator
from commands import printed, write_prompts, write_rows
from commands import run as call
from conftest import LETTERS, make_llama
from datasets import Dataset
from forked import Processes, Server
from run_results import finished, losses_of, taus_of
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.decode.cache.rollback import RollbackCache
from draftsmith.distill.conversation import conversation
from draftsmith.distill.data_section import DataSection
from draftsmith.distill.load_target import load_ends, load_target
from draftsmith.distill.packing import pack
from draftsmith.distill.samples import samples_of
from draftsmith.errors import ConfigError
from draftsmith.heads.base import TrainableDrafter
from draftsmith.heads.checkpoint import load_drafter
from draftsmith.train import trainer as loop
from draftsmith.train.recipe import load_recipe
from draftsmith.train.step import AgreementStep
from draftsmith.train.training_data import chat_of


def run(recipe: Path, *overrides: str) -> list[float]:
    """Return the losses of a run."""
    loaded = load_recipe(str(recipe), list(overrides))
    loop.train(loaded)
    return losses_of(Path(loaded.output))


def test_training_steps_begin_without_the_caches_of_sampling(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter and the target that are trained, or read, have drafted and decoded before."""
    caches: WeakSet[RollbackCache] = WeakSet()
    alive: list[int] = []
    build, forward = RollbackCache.__init__, AgreementStep.forward

    def built(cache: RollbackCache, *arguments: Any, **options: Any) -> None:
        build(cache, *arguments, **options)
        caches.add(cache)

    def watched(step: AgreementStep, *arguments: Any) -> Any:
        alive.append(len(caches))
        return forward(step, *arguments)

    monkeypatch.setattr(RollbackCache, "__init__", built)
    monkeypatch.setattr(AgreementStep, "forward", watched)
    short = ["train.steps=6", "train.evaluate_every=3", "data.count=10", "data.response_tokens=6"]
    run(recipe_file, *short, "evaluation.count=1", "evaluation.max_new_tokens=2")
    assert alive
    assert set(alive) == {0}


def test_turns_need_a_chat_template(recipe_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.turns='all' with a tokenizer without a chat template"):
        run(recipe_file, "data.turns=all")


def test_no_response_of_a_held_out_prompt_is_trained_on(recipe_file: Path) -> None:
    recipe = load_recipe(str(recipe_file), ["data.responses=3"])
    data = loop.TrainingRun(recipe, Accelerator(cpu=True), Path(recipe.output)).data
    trained = {tuple(ids[: spans[0][0]]) for ids, spans in zip(data.rows["input_ids"], data.rows["spans"], strict=True)}
    assert len(data.rows) == 3 * len(trained)
    assert data.heldout
    assert not trained & {tuple(prompt.input_ids) for prompt in data.heldout}


def test_a_run_starts_from_a_trained_drafter(recipe_file: Path, tmp_path: Path) -> None:
    run(recipe_file, "train.steps=30", f"output={tmp_path}/first")
    first = str(tmp_path / "first" / "drafter")
    few = "train.steps=1"
    losses = run(recipe_file, few, f"start_from={first}", f"output={tmp_path}/second")
    assert losses < run(recipe_file, few, f"output={tmp_path}/third")
    before, best = taus_of(tmp_path / "second")[0], max(taus_of(tmp_path / "first"))
    assert before == best, "the drafter as it was is the first that is measured"
    adapters = run(recipe_file, few, f"start_from={first}", "drafter.lora_rank=2", f"output={tmp_path}/fourth")
    assert adapters == losses, "adapters change nothing at first"
    for change, said in (
        ("drafter={type: medusa}", "drafter.type='medusa'; expected 'draft_model', as start_from="),
        ("drafter.num_hidden_layers=2", "drafter.num_hidden_layers=2; expected 1, as start_from="),
    ):
        with pytest.raises(ConfigError, match=said):
            run(recipe_file, f"start_from={first}", change, f"output={tmp_path}/fifth")


def test_training_continues_on_served_responses(recipe_file: Path, tmp_path: Path) -> None:
    """The shipped recipe, on responses of the target; the result is never worse than the drafter."""
    run(recipe_file, "train.steps=8", f"output={tmp_path}/first")
    drafter, target = tmp_path / "first" / "drafter", load_recipe(str(recipe_file)).target.model
    served = tmp_path / "served.jsonl"
    asked = write_prompts(tmp_path / "asked.jsonl", *(a + b + "zz" for a in LETTERS[:6] for b in LETTERS[:6]))
    command = ["data", "regenerate", str(asked), "--target", target, "--out", str(served), "--drafter", str(drafter)]
    assert call(*command, "--response-tokens", "20", "--prompt-tokens", "9") == 0
    rows = [json.loads(line) for line in served.read_text().splitlines()]
    assert len(rows) == 36
    twice = [*command[:-4], "--out", str(tmp_path / "twice.jsonl"), "--response-tokens", "20", "--prompt-tokens", "9"]
    assert call(*twice, "--responses", "2") == 0
    again = [json.loads(line) for line in (tmp_path / "twice.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in again] == [row["prompt"] for row in rows] * 2
    assert again[0]["response"] != again[36]["response"]
    assert {*rows[0]} == {"prompt", "response", "input_ids", "spans", "tokenizer"}
    assert not list(tmp_path.glob(".*")), "nothing is left beside the file"
    out = tmp_path / "continued"
    pair = [f"target.model={target}", "drafter.type=draft_model", f"start_from={drafter}"]
    sizes = ["train.steps=30", "train.learning_rate=3e-3", "train.evaluate_every=10", "evaluation.count=6"]
    sizes += ["data.prompt_tokens=9", "data.response_tokens=20", "evaluation.max_new_tokens=20"]
    assert call("train", "eagle3/served_responses", *pair, f"data.prompts={served}", f"output={out}", *sizes) == 0
    taus = taus_of(out)
    assert finished(out)["best_tau"] == max(taus) > taus[0]
    loaded = load_target(target)
    assert load_drafter(out / "drafter", loaded.model, loaded.tokenizer).type == "draft_model"


@pytest.mark.parametrize("teacher", ["online", "cached"])
def test_packed_rows_have_the_losses_of_plain_ones(teacher: str, recipe_file: Path, tmp_path: Path) -> None:
    """Every sample is in the batch, so that the mean over tokens is over the same tokens.

    Of a draft model, whose first weights are not drawn: tests/unit/heads/test_packing.py compares the others.
    """
    kind = ["train.steps=3"]
    plain = run(recipe_file, *kind, "train.batch_size=36", f"output={tmp_path}/plain")
    (rows,) = (tmp_path / "cache" / "samples").glob("*/*/rows-1.arrow")
    count = len(pack(Dataset.from_file(str(rows)), 64))
    assert count < 20
    kind += [f"teacher.kind={teacher}", "teacher.dtype=float32", "data.pack=true", "data.prompt_tokens=52"]
    packed = run(recipe_file, *kind, f"train.batch_size={count}")
    assert packed == pytest.approx(plain, rel=1e-4)


def test_preview_marks_what_is_trained(
    tiny_target_folder: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    tiny_tokenizer.chat_template = "{% for m in messages %}{{ m.role[0]|upper }}{{ m.content }}E{% endfor %}"
    tiny_tokenizer.save_pretrained(tiny_target_folder)
    turns = [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cd"}] * 2
    file = tmp_path / "chats: all #1.jsonl"
    file.write_text(f"{json.dumps({'conversations': turns})}\n{json.dumps({'conversations': turns[1:]})}\n" * 2)
    preview = ("data", "preview", file, "--target", tiny_target_folder)
    code, said, following = printed(capsys, *preview)
    assert code == 0
    following = shlex.split(following.splitlines()[-1].removeprefix("next: draftsmith "))
    assert load_recipe(following[1], following[2:]).data.prompts == str(file)
    assert following[-1] == "data.response=text"
    assert following[0] == "memory"
    assert "UabE⟦AcdE⟧UabE⟦AcdE⟧" in said
    assert "sample 1: 16 tokens, 8 trained" in said
    assert "2 of 4 begin with an answer: left out" in said
    assert "1 of 4 are the same as another: left out" in said
    assert "sample 1: 4 tokens, 0 trained" in printed(capsys, *preview, "--response", "target")[1]
    said = printed(capsys, *preview, "--template-option", "x")[2]
    assert "--template-option x; expected key=value" in said


def test_a_pipe_that_is_closed_ends_a_preview(
    tiny_target_folder: Path, prompts: Path, tmp_path: Path, run_server: Server
) -> None:
    """It is printed through rich, which would exit with another code."""
    processes, log = Processes(run_server, {"DRAFTSMITH_CACHE": str(tmp_path / "cache")}), tmp_path / "log"
    words = ["data", "preview", str(prompts), "--target", str(tiny_target_folder)]
    started = processes.start(words, log, 1, {}, {"closed_pipe": {}}, program="draftsmith")
    assert processes.wait(started) == [141], log.read_text()
    assert "Traceback" not in log.read_text()


def test_preview_marks_what_a_run_trains(
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The end of a turn is named in generation_config.json alone, as by Gemma 2 and Phi 3; here it is E."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    tiny_tokenizer.chat_template = "{% for m in messages %}{{ m.role[0]|upper }}{{ m.content }}Ex{% endfor %}"
    (end,) = tiny_tokenizer("E")["input_ids"]
    tiny_target.config.eos_token_id, tiny_target.generation_config.eos_token_id = 1, [1, end]
    folder = tmp_path / "target"
    tiny_target.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    row = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps(row))
    (sample,) = samples_of(chat_of(DataSection(), load_target(str(folder))), conversation("p:1", row), 9)
    assert f"{sample.trained} trained" in printed(capsys, "data", "preview", file, "--target", folder)[1]
    assert sample.trained == len("AcdE")
    assert load_ends(str(folder)) == {1, end}


def test_tokens_beyond_the_tokenizer_are_read_and_neither_trained_nor_drafted(
    recipe_file: Path, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vocabulary of 96 for 64 tokens, of which the target samples all: in a file, in a run, and in a further one."""
    known, target, out = 64, tmp_path / "padded", tmp_path / "answers.jsonl"
    make_llama(vocab_size=96).save_pretrained(target)
    tiny_tokenizer.save_pretrained(target)
    options = ["--target", target, "--response-tokens", 12, "--out", out]
    assert call("data", "regenerate", tmp_path / "prompts.jsonl", *options) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    answers = [ids[start:end] for ids, ((start, end),) in ((row["input_ids"], row["spans"]) for row in rows)]
    padded = sum(token >= known for answer in answers for token in answer)
    assert padded > 40
    capsys.readouterr()
    said = printed(capsys, "data", "preview", out, "--target", target)[1]
    assert f"{padded} tokens of answers are not in the tokenizer: not trained" in said
    assert f" {sum(map(len, answers)) - padded} " in said.split("longest")[-1].replace("│", " ")
    small = [f"target.model={target}", "drafter.type=eagle3", "drafter.draft_vocab_size=60", "drafter.layers=[1,2]"]
    small += ["drafter.train_steps=1", "train.steps=1", "train.evaluate_every=1", "train.checkpoint_every=1"]
    run(recipe_file, *small)
    assert "sampled tokens are not in the tokenizer: not trained" in (said := capsys.readouterr().err)
    drafter = load_drafter(tmp_path / "run" / "drafter", (loaded := load_target(str(target))).model, loaded.tokenizer)
    assert isinstance(drafter, TrainableDrafter)
    assert drafter.draft_vocabulary is not None
    assert drafter.draft_vocabulary.tokens_D.max() < known
    assert "draft vocabulary: 60 of 96 tokens, " in said
    write_rows(tmp_path / "more.jsonl", ({"prompt": f"{letter}b", "completion": "zzzzzzzy"} for letter in LETTERS))
    again = [f"start_from={tmp_path}/run/drafter", f"data.prompts={tmp_path}/more.jsonl", "data.response=text"]
    run(recipe_file, *small, *again, f"output={tmp_path}/further")
    assert re.search(r"draft vocabulary: 60 of 96 tokens, [\d.]+% of the responses", capsys.readouterr().err)


def test_a_recipes_data_is_prepared_ahead(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = printed(capsys, "data", "prepare", recipe_file, "teacher.kind=cached")[2].splitlines()
    assert said[-1] == f"next: accelerate launch -m draftsmith.train {recipe_file} teacher.kind=cached"
    assert len(list((tmp_path / "cache" / "samples").iterdir())) == 1
    (cache,) = (tmp_path / "cache" / "signals").iterdir()
    written = {file.name: file.stat().st_mtime_ns for file in cache.iterdir()}
    run(recipe_file, "teacher.kind=cached")
    assert {file.name: file.stat().st_mtime_ns for file in cache.iterdir()} == written, "training builds nothing again"
