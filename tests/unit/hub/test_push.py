"""`draftsmith push` against a local Hub server: uploads, resumption, refusals, and files that are not uploaded."""

import json
import re
import shlex
import time
from pathlib import Path

import pytest
import torch
from commands import run as command
from conftest import make_llama
from hub_server import TOKEN, Hub
from huggingface_hub import ModelCard, constants, snapshot_download
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast
from unit.eval.made import evaluation, row

from draftsmith import __version__, load_drafter
from draftsmith.distill.load_target import load_target
from draftsmith.errors import ConfigError
from draftsmith.heads import DraftModel, Medusa
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.provenance import model_fingerprint
from draftsmith.train.recipe import load_recipe, parse_recipe
from draftsmith.train.trainer import train

pytestmark = pytest.mark.usefixtures("pictures_of_a_pixel")

REPO = "user/tiny-drafter"
WRONG = "hf_" + "NotTheRightOne" * 2


@pytest.fixture
def run(tmp_path: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A finished run: two drafters, one in `drafter`, metrics, and private files."""
    folder = tmp_path / "home" / "someone" / "run"
    for kind, drafter in (("drafter", DraftModel(make_llama(1))), ("medusa", Medusa.from_target(tiny_target))):
        for parameter in drafter.parameters():
            parameter.data += torch.randn_like(parameter)
        values = {"name": "tiny", "output": str(folder), "drafter": {"type": drafter.type}}
        values |= {"target": {"model": str(tmp_path / "tiny")}, "data": {"prompts": str(tmp_path / "p.jsonl")}}
        values |= {"train": {"learning_rate": 1e-3}}
        recipe = parse_recipe(values, "test").model_dump(mode="json")
        made_for = describe_target(tiny_target, tiny_tokenizer, str(tmp_path / "tiny"))
        options = {"target": made_for, "recipe": recipe, "draft_length": 3, "tokenizer": tiny_tokenizer}
        save_drafter(drafter, folder / kind, **options)
    for name in ("training.log", "pytorch_model.bin", "notes.txt", "checkpoints/step-4/state.json"):
        file = folder / "drafter" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("private")
    rows = [{"step": step, "loss": 2.0 / step, "alpha": [0.5]} for step in (1, 2, 3)]
    metrics = [*rows, {"step": 3, "evaluation": {"tau": 1.5}}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(value) + "\n" for value in metrics))
    made = evaluation(rows=[row(), row(temperature=1.0, batch_size=4, speedup=1.25)]).as_json()
    made["settings"]["drafters"] = {"d": str(folder / "drafter")}
    words = ["--target", f"{tmp_path}/tiny", "--drafter", f"d={folder}/drafter", "--prompts", f"{tmp_path}/my own/a b"]
    made["environment"]["command"] = shlex.join(["draftsmith", "eval", *words])
    (folder / "eval.json").write_text(json.dumps(made))
    return folder


def push(*arguments: object) -> int:
    return command("push", *arguments)


PUSHED = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
PLOTS = {"plots/training.png", "plots/speedup.png", "plots/acceptance.png"}


def test_pushed_and_loaded_by_name(
    hub: Hub,
    run: Path,
    tmp_path: Path,
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    capsys: pytest.CaptureFixture,
) -> None:
    given = ("--eval", run / "eval.json", "--licence", "mit", "--base-model", "org/tiny", "--message", "first")
    assert push(run / "drafter", REPO, *given) == 0
    page, following = capsys.readouterr().out.splitlines()
    assert page.startswith(f"{hub.url}/{REPO} at ")
    assert following == f"next: draftsmith demo --target org/tiny --drafter {REPO}"
    repository = hub.repositories[REPO]
    files = repository.files()
    assert files.keys() - {".gitattributes"} == PUSHED | PLOTS | {"eval.json", "generation_config.json"}
    assert repository.messages[-1] == "first"
    assert not repository.private

    assert not [name for name, held in files.items() if str(tmp_path).encode() in held], "paths of this machine"
    assert not [name for name, held in files.items() if TOKEN.encode() in held]
    config = json.loads(files["config.json"])
    assert config["draftsmith"]["recipe"]["data"]["prompts"] == "p.jsonl"
    assert config["draftsmith"]["target"]["name"] == config["draftsmith"]["recipe"]["target"]["model"] == "org/tiny"
    measured = json.loads(files["eval.json"])
    assert measured["environment"]["command"] == "draftsmith eval --target tiny --drafter d=drafter --prompts 'a b'"
    assert measured["settings"]["drafters"] == {"d": REPO}

    data = ModelCard(files["README.md"].decode()).data
    known = {"license": "mit", "base_model": "org/tiny", "base_model_relation": "finetune"}
    known |= {"pipeline_tag": "text-generation", "library_name": "transformers"}
    assert {key: data[key] for key in known} == known
    assert [(result.metric_type, result.metric_value) for result in data.eval_results][:3] == [
        ("speedup", 1.5),
        ("tau", 2.4),
        ("alpha", 0.8),
    ]
    assert "| 1 | chain:draft_length=2 | 4 | 0.800 [0.700, 0.900] |" in files["README.md"].decode()

    drafter = load_drafter(REPO, tiny_target, tiny_tokenizer)
    local = load_drafter(run / "drafter", tiny_target, tiny_tokenizer)
    assert drafter.draft_length_hint == 3
    ids = torch.arange(2, 40)[None]
    assert torch.equal(drafter.model(ids).logits, local.model(ids).logits)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(REPO)(ids).logits, local.model(ids).logits)
    assert AutoTokenizer.from_pretrained(REPO).get_vocab() == tiny_tokenizer.get_vocab()

    commits, puts = len(repository.commits), hub.puts.copy()
    assert push(run / "drafter", REPO, *given) == 0
    assert (len(repository.commits), hub.puts) == (commits, puts), "the same again: nothing is sent, nothing committed"


def test_heads_and_a_card_without_measurement(
    hub: Hub, run: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    assert push(run / "medusa", REPO) == 0
    files = hub.repositories[REPO].files()
    assert files.keys() - {".gitattributes"} == PUSHED | {"plots/training.png"} | {"custom_generate/generate.py"}
    card = files["README.md"].decode()
    assert "pypi.org" not in card, "the index has no package of ours"
    assert "from a clone of its repository" in card
    assert f"draftsmith {__version__} or newer" in files["custom_generate/generate.py"].decode()
    assert "Not measured yet" in card
    assert f'custom_generate="{REPO}", trust_remote_code=True' in card
    data = ModelCard(card).data.to_dict()
    assert data["library_name"] == "draftsmith"
    assert not {"base_model", "base_model_relation", "license", "datasets", "model-index"} & data.keys()
    drafter = load_drafter(REPO, tiny_target, tiny_tokenizer)
    local = load_drafter(run / "medusa", tiny_target, tiny_tokenizer)
    torch.testing.assert_close(drafter.state_dict(), local.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["drafter", "medusa"])
def test_the_cards_own_code_runs(kind: str, hub: Hub, run: Path, tiny_target_folder: Path) -> None:
    """Both code blocks run as they are, with another length, and with target and drafter from the Hub."""
    hub.repository("org/tiny").commit("main", {file.name: file.read_bytes() for file in tiny_target_folder.iterdir()})
    assert push(run / kind, REPO, "--base-model", "org/tiny") == 0
    card = hub.repositories[REPO].files()["README.md"].decode()
    blocks = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(block.replace("max_new_tokens=128", "max_new_tokens=16"), names)
    assert len(names["out"].tokens) == 16
    if kind == "medusa":
        options = {**names["inputs"], "max_new_tokens": 16, "do_sample": False}
        drafted = names["target"].generate(**options, custom_generate=REPO, trust_remote_code=True)
        assert torch.equal(drafted, names["target"].generate(**options)), "what transformers fetched and ran"
        with pytest.raises(ValueError, match="trust_remote_code"):
            names["target"].generate(**options, custom_generate=REPO, trust_remote_code=False)


def test_private_repositories_and_branches(
    hub: Hub, run: Path, tiny_target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert push(run / "drafter", REPO, "--private", "--revision", "trial") == 0
    repository = hub.repositories[REPO]
    assert repository.private
    assert "config.json" in repository.files("trial")
    assert "config.json" not in repository.files("main")
    assert f"/{REPO}/tree/trial at " in capsys.readouterr().out
    for name, options in ((REPO, {"revision": "trial"}), (f"{REPO}@trial", {})):
        assert isinstance(load_drafter(name, tiny_target, **options), DraftModel)
    with pytest.raises(ConfigError, match=r"expected a folder with config\.json"):
        load_drafter(REPO, tiny_target)
    with pytest.raises(ConfigError, match="expected one of the two"):
        load_drafter(f"{REPO}@trial", tiny_target, revision="trial")
    monkeypatch.setenv("HF_TOKEN", WRONG)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(run / "other-cache"))
    with pytest.raises(ConfigError, match=f"drafter={REPO}@trial; expected a local folder or a Hub id"):
        load_drafter(f"{REPO}@trial", tiny_target)


def test_a_dry_run_asks_nobody(hub: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        given = ("--licence", "mit", "--message", "a b", "--private")
        assert push(run / "drafter", REPO, "--dry-run", "--out", out, *given) == 0
    shown = capsys.readouterr()
    assert "nothing was uploaded" in shown.out
    assert "note: not measured" in shown.err
    assert shown.out.endswith(
        f"\nnext: draftsmith push {run / 'drafter'} {REPO} --licence mit --message 'a b' --private\n"
    )
    assert not hub.asked
    assert {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()} >= PUSHED
    (tmp_path / "link").symlink_to(run / "drafter")
    assert push(run / "drafter", REPO, "--dry-run", "--out", tmp_path / "link") == 2
    assert "link is the drafter; expected another folder" in capsys.readouterr().err
    (out / "diary.txt").write_text("mine")
    assert push(run / "drafter", REPO, "--dry-run", "--out", out) == 2
    assert "holds diary.txt; expected a new folder" in capsys.readouterr().err
    assert (out / "diary.txt").read_text() == "mine"


def test_a_dropped_connection(
    hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Nothing is published by half; a single dropped connection is retried."""
    weights = (run / "drafter" / "model.safetensors").stat().st_size

    def drop(size: int) -> bool:
        while size == weights and not hub.puts:
            time.sleep(0.01)  # until the plot is there
        return size == weights

    hub.drop = drop
    assert push(run / "drafter", REPO) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert err.startswith(f"DraftsmithError: push={REPO} failed; nothing was published (")
    assert len(hub.puts) == 1
    assert hub.repositories[REPO].files().keys() == {".gitattributes"}, "no half of a drafter"
    drops = []
    hub.drop = lambda size: not drops and (drops.append(size) or True)
    assert push(run / "drafter", REPO) == 0
    assert drops == [weights]
    assert sorted(hub.puts.values()) == [1, 1]
    assert hub.repositories[REPO].files().keys() > PUSHED
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert push(run / "drafter", REPO) == 2
    assert f"DraftsmithError: push={REPO} failed; nothing was published (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("repo", "token", "fail", "message"),
    [
        (REPO, WRONG, {}, "DraftsmithError: push=.* failed; .*401.*; expected `hf auth login` or HF_TOKEN with write"),
        (REPO, None, {}, "DraftsmithError: push=.* failed; .*; expected `hf auth login`"),
        ("other/name", TOKEN, {}, "DraftsmithError: push=other/name failed; .*403"),
        ("name", TOKEN, {}, "ConfigError: repo='name'; expected user/name"),
        (REPO, TOKEN, {"POST .*/commit/": 503}, "DraftsmithError: .*503"),
        (REPO, TOKEN, {"POST /api/validate-yaml": 400}, "DraftsmithError: .*Invalid metadata"),
        (REPO, TOKEN, {"POST /api/repos/create": 404}, "DraftsmithError: .*404"),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    repo: str,
    token: str | None,
    fail: dict[str, int],
    message: str,
    hub: Hub,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.fail = fail
    assert push(run / "drafter", repo) == 2
    shown = capfd.readouterr()
    (line,) = [line for line in shown.err.splitlines() if "Error: " in line]
    assert re.match(message, line), line
    assert not {TOKEN, WRONG} & set(re.findall(r"hf_\w+", shown.out + shown.err))
    assert not any(repository.files().keys() & PUSHED for repository in hub.repositories.values())


def test_bad_requests_stop_before_any_work(hub: Hub, run: Path, capsys: pytest.CaptureFixture) -> None:
    for options, message in (
        (["--base-model", "a/b/c"], "--base-model='a/b/c'; expected user/name"),
        (["--eval", "absent"], "absent; expected an eval.json or the folder of one"),
        (["--eval", run / "eval.json", "--as", "x"], "expected --as with one of the drafters measured there: d"),
    ):
        assert push(run / "drafter", REPO, *options) == 2
        assert message in capsys.readouterr().err
    assert push(run, REPO) == 2
    assert "expected a folder with config.json" in capsys.readouterr().err
    assert not hub.asked


def test_a_measurement_of_another_drafter_is_not_taken_for_this_ones(
    hub: Hub, run: Path, tmp_path: Path, tiny_target: LlamaForCausalLM, capsys: pytest.CaptureFixture
) -> None:
    given = (run / "medusa", REPO, "--dry-run", "--out", tmp_path / "out", "--eval", run / "eval.json")
    assert push(*given) == 2
    assert "expected --as with one of the drafters measured there: d" in capsys.readouterr().err
    assert push(*given, "--as", "d") == 2
    assert "d is a drafter of type draft_model; expected medusa" in capsys.readouterr().err
    made = json.loads((run / "eval.json").read_text())
    made["rows"] = [{**row, "drafter_type": "medusa"} for row in made["rows"]]
    (run / "eval.json").write_text(json.dumps(made))
    assert push(*given, "--as", "d") == 0
    made["settings"]["drafters"] = {"d": "runs/gone/drafter"}
    (run / "eval.json").write_text(json.dumps(made))
    assert push(*given) == 0, "moved since"
    head = load_drafter(run / "medusa", tiny_target)
    made["identity"] = {"target": model_fingerprint(tiny_target), "drafters": {"d": model_fingerprint(head)}}
    (run / "eval.json").write_text(json.dumps(made))
    assert push(*given) == 0
    next(iter(head.parameters())).data += 1
    save_file(head.state_dict(), run / "medusa" / "model.safetensors")
    assert push(*given) == 2
    assert f"d had other weights than {run}/medusa has; expected it measured again" in capsys.readouterr().err


HOSTS = ["eng-1.corp", "10.9.8.7", "answers.corp", "gpu-box", "plain-box"]


@pytest.fixture
def served(run: Path) -> Path:
    """A measurement of a server beside the run: one row with a baseline, one of an engine that counts nothing."""
    made = json.loads((run / "eval.json").read_text())
    first = {
        "temperature": 0.0,
        "concurrency": 2,
        "prompts": 6,
        "tokens_per_second": 90.0,
        "acceptance_at": [0.5, 0.25],
    }
    first |= {"milliseconds_per_token": 1.5, "alpha": 0.5, "tau": 1.5, "tau_interval": [1.0, 2.0], "speedup": 1.2}
    first |= {"baseline_tokens_per_second": 75.0, "speedup_interval": [1.1, 1.3]}
    nothing = dict.fromkeys(
        ["alpha", "tau", "tau_interval", "speedup", "speedup_interval", "baseline_tokens_per_second"]
    )
    second = first | nothing | {"temperature": 1.0, "concurrency": 8, "acceptance_at": []}
    made |= {
        "rows": [],
        "server": [first, second],
        "measurements": [],
        "notes": ["no counters at http://gpu-box:1/x"],
    }
    made["settings"] |= {"drafters": {"/srv/models/tiny": "http://gpu-box:8000/v1"}, "prompts": "/srv/data/p.jsonl"}
    command = "draftsmith eval server http://gpu-box:8000 --model /srv/models/tiny --baseline=https://plain-box"
    made["environment"]["command"] = command
    (run / "served.json").write_text(json.dumps(made))
    return run / "served.json"


def taught_by_an_engine(folder: Path) -> None:
    """Let a checkpoint name engines, a store and a server of answers."""
    config = json.loads((folder / "config.json").read_text())
    recipe, engines = config["draftsmith"]["recipe"], {"urls": ["http://eng-1.corp:8000", "HTTP://10.9.8.7"]}
    recipe["teacher"] |= {"kind": "server", "server": engines | {"transfer": "mooncake", "store": "10.9.8.7:50051"}}
    recipe["teacher"]["server"]["folder"] = None
    recipe["data"]["server"] = {"url": "https://answers.corp/v1", "model": "tiny"}
    (folder / "config.json").write_text(json.dumps(config))


def test_a_measurement_of_a_server_is_refused(hub: Hub, run: Path, served: Path, capsys: pytest.CaptureFixture) -> None:
    """It holds no rows, no type and no fingerprint of the drafter; so it may be another one's."""
    assert push(run / "drafter", REPO, "--eval", served, "--as", "/srv/models/tiny") == 2
    assert "served.json was measured on a server, which does not tell which drafter" in capsys.readouterr().err
    assert not hub.asked


def test_a_measurement_of_a_server_is_that_of_a_drafter_whose_target_is_served(
    hub: Hub, run: Path, served: Path, capsys: pytest.CaptureFixture
) -> None:
    """Also of a checkpoint without the engine's command; no file has an address, a folder or a store of the user."""
    taught_by_an_engine(run / "medusa")
    estimates = [{"tau": tau, "estimated": True, "tokens": [5, 6], "acceptance_at": [0.4]} for tau in (1.75, 1.75, 1.0)]
    rows = [{"step": step, "evaluation": estimate} for step, estimate in enumerate(estimates)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert push(run / "medusa", REPO, "--eval", served, "--as", "other") == 2
    assert "expected --as with one of the drafters measured there: /srv/models/tiny" in capsys.readouterr().err
    assert push(run / "medusa", REPO, "--eval", served) == 0
    assert "not measured" not in capsys.readouterr().err
    files = hub.repositories[REPO].files()
    for name, held in files.items():
        assert not [host for host in [*HOSTS, "/srv", str(run)] if host.encode() in held], name
    card = files["README.md"].decode()
    assert "| 0 | *estimated* | 1.75 | 0.40 | | | |\n" in card
    assert "along 2 held-out answers after step 1," in card
    assert (
        "| 0 | 2 | 1.50 [1.00, 2.00] | 0.50 0.25 | 75 | 90 | 1.20× [1.10, 1.30] |\n| 1 | 8 |   | |  | 90 |   |" in card
    )
    assert "on 6 prompts (p.jsonl), at most" in card
    assert "A server does not tell which drafter it has" in card
    assert "- no counters at http://ENGINE:8000/x" in card
    assert "Not measured yet" not in card
    assert "vllm serve tiny" not in card, "the checkpoint has no command"
    results = [(result.metric_name, result.metric_value) for result in ModelCard(card).data.eval_results]
    where = "(T=0, 2 requests)"
    assert results == [
        (f"speedup {where}", 1.2),
        (f"acceptance length tau {where}", 1.5),
        (f"acceptance rate alpha {where}", 0.5),
    ]
    recipe, measured = (json.loads(files[name]) for name in ("config.json", "eval.json"))
    recipe = recipe["draftsmith"]["recipe"]
    assert recipe["teacher"]["server"]["urls"] == "http://ENGINE:8000"
    assert recipe["teacher"]["server"]["store"] == "STORE:50051"
    assert recipe["teacher"]["server"]["folder"] is None
    assert recipe["data"]["server"]["url"] == "http://ENGINE:8000/v1"
    assert measured["settings"]["drafters"] == {"tiny": REPO}
    assert len(measured["server"]) == 2


def test_local_rows_beside_those_of_a_server_are_still_compared(
    hub: Hub, run: Path, served: Path, capsys: pytest.CaptureFixture
) -> None:
    taught_by_an_engine(run / "drafter")
    taught_by_an_engine(run / "medusa")
    made = json.loads((run / "eval.json").read_text()) | {"server": json.loads(served.read_text())["server"]}
    (run / "drafter" / "eval.json").write_text(json.dumps(made))
    assert push(run / "medusa", REPO, "--eval", run / "drafter", "--as", "d") == 2
    assert "d is a drafter of type draft_model; expected medusa" in capsys.readouterr().err
    assert push(run / "drafter", REPO) == 0, "the checkpoint's own eval.json"
    card = hub.repositories[REPO].files()["README.md"].decode()
    assert "| 0 | chain:draft_length=2 | 1 | 0.800" in card
    assert "| 0 | 2 | 1.50 [1.00, 2.00] |" in card
    assert len(ModelCard(card).data.eval_results) == 9


def test_from_inside_the_folder_and_again_without_what_it_had(
    hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(run / "medusa")
    assert push(".", REPO) == 0
    files = hub.repositories[REPO].files()
    assert {"plots/training.png", "custom_generate/generate.py"} < files.keys()
    mine = {"notes.md": b"mine", "gguf/model.safetensors": b"mine", "eval.json": b"{}"}
    shards = {"model-00001-of-00002.safetensors": b"old", "model.safetensors.index.json": b"old"}
    hub.repositories[REPO].commit("main", files | mine | shards)
    monkeypatch.chdir(run)
    assert push("drafter", REPO) == 0
    files = hub.repositories[REPO].files()
    assert {"notes.md", "gguf/model.safetensors"} < files.keys()
    assert not {"eval.json", "custom_generate/generate.py", *shards} & files.keys(), "they would be read for this one"


def test_the_adapter_of_a_target_that_was_trained_too(
    hub: Hub, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes along, and the drafter loads for the two together."""
    options = ["drafter.type=medusa", "cotrain.lora_rank=4", "cotrain.max_quality_kl=5", "cotrain.warmup_fraction=0"]
    drafter = train(load_recipe(str(recipe_file), [*options, "train.steps=2"]))
    assert push(drafter, REPO) == 0
    files = hub.repositories[REPO].files()
    assert {"target/adapter_config.json", "target/adapter_model.safetensors", "target/tokenizer.json"} < files.keys()
    assert str(tmp_path).encode() not in files["target/adapter_config.json"] + files["config.json"]
    folder = Path(snapshot_download(REPO))
    config = json.loads((folder / "target" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny-target"
    monkeypatch.chdir(tmp_path)  # where a folder of that name lies
    target = load_target(str(folder / "target"))
    loaded = load_drafter(REPO, target.model, target.tokenizer)
    assert loaded.target_quality["kl"] >= 0
