"""Untrusted files are checked and bounded; they are never executed, and paths in them never leave their folder."""

import ast
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_llama
from hub_server import Hub
from safetensors.torch import save_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from unit.heads.test_families import make, target_model

from draftsmith import load_drafter
from draftsmith.distill.cotraining import Adapters
from draftsmith.distill.load_target import load_target, load_tokenizer
from draftsmith.errors import ConfigError
from draftsmith.heads import DraftModel, Medusa
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.hub.export import export_drafter

ROOT = Path(__file__).parents[3]
REPO = "someone/model"


class Bomb:
    """An object that writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return Path.write_text, (self.mark, "boom")


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "mark"


@pytest.fixture
def folder(tmp_path: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    """Medusa heads as a draftsmith checkpoint."""
    made_for = describe_target(tiny_target, tiny_tokenizer, "org/target")
    drafter = Medusa.from_target(tiny_target)
    save_drafter(drafter, tmp_path / "medusa", target=made_for, recipe=None, draft_length=3, tokenizer=tiny_tokenizer)
    return tmp_path / "medusa"


@pytest.fixture
def draft_folder(tmp_path: Path) -> Path:
    """A plain transformers checkpoint."""
    make_llama(1, num_hidden_layers=1).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def upload(hub: Hub, folder: Path, **more: bytes) -> None:
    files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    hub.repository(REPO).commit("main", files | more)


def changed(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def test_pickled_weights_are_not_even_fetched(
    hub: Hub, draft_folder: Path, mark: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    bomb = pickle.dumps(Bomb(mark))
    pickle.loads(bomb)
    assert mark.exists(), "it does go off"
    mark.unlink()
    names = ("pytorch_model.bin", "model.pt", "training_args.bin", "model.ckpt", "weights.pkl", "adapter_model.bin")
    bombs = dict.fromkeys(names, bomb)
    tiny_tokenizer.save_pretrained(draft_folder)
    upload(hub, draft_folder, **bombs)
    assert isinstance(load_drafter(REPO, tiny_target, tiny_tokenizer), DraftModel)
    assert load_target(REPO).name == REPO
    (draft_folder / "model.safetensors").unlink()
    upload(hub, draft_folder, **bombs)
    for load in (lambda: load_drafter(REPO, tiny_target), lambda: load_target(REPO)):
        with pytest.raises(ConfigError, match=r"drafter=|target="):
            load()
    with pytest.raises(ConfigError, match=r"drafter\.model="):
        DraftModel.from_target(tiny_target, model=REPO)
    for name, held in bombs.items():
        (draft_folder / name).write_bytes(held)
        assert not [asked for asked in hub.asked if asked.startswith("GET") and asked.endswith(name)]
    for load in (lambda: load_drafter(draft_folder, tiny_target), lambda: load_target(str(draft_folder))):
        with pytest.raises(ConfigError, match=r"drafter=|target="):
            load()
    assert not mark.exists()


def test_an_adapter_beside_a_model_is_not_put_on(
    hub: Hub, draft_folder: Path, mark: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """transformers loads an adapter automatically, also from a pickle."""
    tiny_tokenizer.save_pretrained(draft_folder)
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(draft_folder), "r": 1, "target_modules": ["q_proj"]}
    (draft_folder / "adapter_config.json").write_text(json.dumps(adapter))
    (draft_folder / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    upload(hub, draft_folder)
    for load in (
        lambda: load_drafter(draft_folder, tiny_target),
        lambda: load_drafter(REPO, tiny_target),
        lambda: load_target(REPO),
        lambda: DraftModel.from_target(tiny_target, model=REPO),
        lambda: DraftModel.from_target(tiny_target, model=str(draft_folder)),
    ):
        with pytest.raises(ConfigError, match=r"holds an adapter_config\.json; expected a whole model"):
            load()
    assert not [asked for asked in hub.asked if asked.startswith("GET") and asked.endswith("adapter_model.bin")]
    assert not mark.exists()


def _set(*keys: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        *path, last = keys
        for key in path:
            config = config[key]
        config[last] = to

    return change


OURS, SIZES = "draftsmith", ("draftsmith", "drafter")
LARGE = 10**9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set(OURS, "target", "vocab_size", to="64"), r"draftsmith\.target\.vocab_size='64'"),
        (_set(OURS, "target", "hidden_size", to=10**12), r"draftsmith\.target\.hidden_size=1000000000000"),
        (_set(OURS, "target", "engine", to=["vllm"]), r"draftsmith\.target\.engine=\['vllm'\]"),
        (_set(OURS, "draft_length", to=LARGE), rf"draftsmith\.draft_length={LARGE}"),
        (_set(OURS, "format", to=2), r"draftsmith\.format=2"),
        (_set(OURS, "type", to="__class__"), "is of type '__class__'; expected one of"),
        (_set(*SIZES, "hidden_size", to="wide"), "cannot be read"),
        (_set(*SIZES, "hidden_size", to=2**16), "config.json claims 4294967296 elements or more; expected at most"),
        (_set(*SIZES, "vocab_size", to=2**16 + 1), "config.json claims vocab_size=65537; expected at most 65536"),
        (_set(*SIZES, "num_layers", to=2**16), r"config.json claims \d+ parameters or more; expected what"),
    ],
)
def test_configs_are_checked_before_memory_is_taken(
    change: Callable, message: str, folder: Path, tiny_target: LlamaForCausalLM
) -> None:
    changed(folder / "config.json", change)
    with pytest.raises(ConfigError, match=message) as refused:
        load_drafter(folder, tiny_target)
    assert len(str(refused.value)) < 600


def test_a_draft_model_claims_no_more_than_its_files_hold(draft_folder: Path, tiny_target: LlamaForCausalLM) -> None:
    kept = json.loads((draft_folder / "config.json").read_text())
    kept.pop("layer_types", None)
    claims = {"hidden_size": LARGE, "num_hidden_layers": LARGE, "intermediate_size": LARGE, "vocab_size": 2**31}
    for key, value in claims.items():
        (draft_folder / "config.json").write_text(json.dumps({**kept, key: value}))
        with pytest.raises(ConfigError, match=r"config\.json claims"):
            load_drafter(draft_folder, tiny_target)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_hidden_layers", 2, r"holds no tensor model\.layers\.1\..*; expected all of its weights"),
        ("intermediate_size", 24, r"proj\.weight has shape \[.*\]; expected \[.*24.*\] by its config"),
    ],
)
def test_weights_have_to_be_those_of_the_config(
    key: str, value: int, message: str, draft_folder: Path, tiny_target: LlamaForCausalLM
) -> None:
    changed(draft_folder / "config.json", _set(key, to=value))
    with pytest.raises(ConfigError, match=message):
        load_drafter(draft_folder, tiny_target)


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        ({"num_labels": 2**40}, "num_labels=1099511627776; expected at most 1048576"),
        ({"part": [{"n_layer": 2**40}]}, "n_layer=1099511627776; expected at most 1048576"),
        ({"eos_token_id": [10**400]}, r"eos_token_id=\[1000.*000\]; expected at most 9223372036854775807"),
    ],
)
def test_numbers_of_a_config_are_bounded(
    change: dict[str, Any], claim: str, draft_folder: Path, tiny_target: LlamaForCausalLM
) -> None:
    """transformers builds an entry for each label, and in many families for each layer, while it reads a config."""
    changed(draft_folder / "config.json", lambda config: config.update(change))
    for load in (
        lambda: load_drafter(draft_folder, tiny_target),
        lambda: DraftModel.from_target(tiny_target, model=str(draft_folder)),
        lambda: DraftModel.from_target(tiny_target, config=json.loads((draft_folder / "config.json").read_text())),
    ):
        with pytest.raises(ConfigError, match=rf"^drafter.* claims {claim}"):
            load()


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "medusa", "medusa_num_heads": 2**30, "medusa_num_layers": 1},
        {"speculators_model_type": "mtp", "transformer_layer_config": {"intermediate_size": LARGE}},
    ],
)
def test_other_layouts_claim_no_more_either(config: dict[str, Any], tmp_path: Path, tiny_target: Any) -> None:
    if "transformer_layer_config" in config:
        layer = {"hidden_size": 32, "vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
        config["transformer_layer_config"] = {**layer, **config["transformer_layer_config"]}
    save_file({"x": torch.zeros(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"config\.json claims"):
        load_drafter(tmp_path, tiny_target)


@pytest.mark.parametrize(
    ("name", "format", "key"),
    [
        ("medusa", None, "num_heads"),
        ("mtp of 3 modules", None, "num_modules"),
        ("eagle3", None, "train_steps"),
        ("peagle", None, "num_tokens"),
        ("dflash", None, "block_size"),
        ("lilicorr", None, "lilicorr_num_layers"),
        ("lilicorr", "vllm", "dflash_config.lilicorr_hidden_size"),
        ("dspark", "vllm", "markov_rank"),
        ("dflash", "vllm", "transformer_layer_config.num_hidden_layers"),
        ("dflash2", "sglang", "dflash_config.selector_rank"),
        ("dflash2", "sglang", "dflash_config.conv_kernel_size"),
        ("dflash2", "sglang", "block_size"),
    ],
)
def test_a_size_that_no_file_can_fill_is_named(name: str, format: str | None, key: str, tmp_path: Path) -> None:
    """Some need no weights: before, a step of the check that it runs took minutes for each million positions."""
    target = target_model()
    drafter, folder = make(name, target, noise=0.0), tmp_path / "drafter"
    drafter.attach(target)
    if format is None:
        made_for = describe_target(target, None, "org/target")
        save_drafter(drafter, folder, target=made_for, recipe=None, draft_length=3)
    else:
        export_drafter(drafter, target, format, folder, target_name="org/target")
    load_drafter(folder, target)
    *path, last = (*(SIZES if format is None else ()), *key.split("."))
    changed(folder / "config.json", _set(*path, last, to=LARGE))
    with pytest.raises(ConfigError, match=rf"^drafter=.* claims {last}={LARGE}; expected at most \d+$"):
        load_drafter(folder, target)


def test_files_are_bounded(folder: Path, tiny_target: LlamaForCausalLM) -> None:
    config, weights = folder / "config.json", folder / "model.safetensors"
    kept = config.read_text()
    for text, message in (
        (" " * 2**23 + kept, "expected at most"),
        ("[" * 10**5, "not JSON"),
        ("[]", "not JSON of an"),
    ):
        config.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_drafter(folder, tiny_target)
    config.write_text(kept)
    claimed = {"x": {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 4 * 10**18]}}
    for header in (json.dumps(claimed).encode(), b"{" * 100):
        weights.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 64)
        with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
            load_drafter(folder, tiny_target)
    weights.write_bytes((10**15).to_bytes(8, "little") + b"{}")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        load_drafter(folder, tiny_target)


@pytest.mark.parametrize(
    "shard", ["../other.safetensors", "/etc/x.safetensors", r"..\x.safetensors", "model.bin", 3, ""]
)
def test_an_index_names_files_beside_it(shard: Any, draft_folder: Path, tiny_target: LlamaForCausalLM) -> None:
    (draft_folder / "model.safetensors").rename(draft_folder.parent / "other.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": {"lm_head.weight": shard}}
    (draft_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"index\.json names .*; expected \*\.safetensors beside it"):
        load_drafter(draft_folder, tiny_target)


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({mark!r}).write_text("boom")
class EvilConfig(LlamaConfig):
    model_type = "evil"
class Evil(LlamaForCausalLM):
    config_class = EvilConfig
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""


def test_code_runs_only_when_the_user_says_so(
    hub: Hub,
    draft_folder: Path,
    mark: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked whether to run code"))
    tiny_tokenizer.save_pretrained(draft_folder)
    (draft_folder / "evil.py").write_text(CODE.format(mark=str(mark)))
    classes = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil"}
    changed(draft_folder / "config.json", lambda config: config.update(model_type="evil", auto_map=classes))
    tokenizer = {"AutoTokenizer": [None, "evil.EvilTokenizer"]}
    changed(draft_folder / "tokenizer_config.json", lambda config: config.update(auto_map=tokenizer))
    upload(hub, draft_folder)
    for place in (REPO, str(draft_folder)):
        for load in (
            lambda place=place: load_drafter(place, tiny_target, tiny_tokenizer),
            lambda place=place: load_target(place),
            lambda place=place: load_tokenizer(place),
            lambda place=place: DraftModel.from_target(tiny_target, model=place),
        ):
            with pytest.raises(ConfigError):
                load()
            assert not mark.exists()
    assert not [asked for asked in hub.asked if asked.startswith("GET") and asked.endswith("evil.py")]
    assert type(load_target(str(draft_folder), trust_remote_code=True).model).__name__ == "Evil"
    assert mark.exists(), "it does run"


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_config_names_no_kernel(key: str, draft_folder: Path, tiny_target: LlamaForCausalLM) -> None:
    kept = (draft_folder / "config.json").read_text()
    for change in (_set(key, to="someone/kernel"), _set("text_config", to={key: "someone/kernel"})):
        changed(draft_folder / "config.json", change)
        with pytest.raises(ConfigError, match=f"{key}='someone/kernel' in config.json names code; expected none"):
            load_drafter(draft_folder, tiny_target)
        (draft_folder / "config.json").write_text(kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("r", to=LARGE), "expected a LoRA of rank r=1000000000"),
        (_set("peft_type", to="VERA"), "peft_type='VERA' in adapter_config.json; expected 'LORA'"),
        (_set("megatron_config", to={"a": 1}), "megatron_config="),
        (_set("modules_to_save", to=["lm_head"]), "modules_to_save="),
        (_set("init_lora_weights", to="pissa"), "init_lora_weights='pissa'"),
    ],
)
def test_adapters_on_a_target_are_held_to_their_file(
    change: Callable, message: str, tmp_path: Path, tiny_target_folder: Path, mark: Path
) -> None:
    adapters = Adapters.on(make_llama(), rank=2, modules=None)
    adapters.save(tmp_path / "a", str(tiny_target_folder), {})
    assert load_target(str(tmp_path / "a")).name == str(tmp_path / "a")
    kept = (tmp_path / "a" / "adapter_config.json").read_text()
    changed(tmp_path / "a" / "adapter_config.json", change)
    with pytest.raises(ConfigError, match=message):
        load_target(str(tmp_path / "a"))
    (tmp_path / "a" / "adapter_config.json").write_text(kept)
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    (tmp_path / "a" / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ConfigError, match="pickled are not read"):
        load_target(str(tmp_path / "a"))
    assert not mark.exists()


UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def test_our_code_reads_no_pickle_and_runs_no_text() -> None:
    """No import of such a module, no torch.load or torch.save, no eval or exec; models are read as safetensors."""
    files = [file for room in ROOT.iterdir() if (room / "__init__.py").is_file() for file in room.rglob("*.py")]
    assert len(files) > 100
    for file in files:
        if file.is_relative_to(ROOT / "tests"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not UNSAFE & {name.split(".")[0] for name in names}, where
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            given = {keyword.arg for keyword in node.keywords}
            assert called not in ("torch.load", "torch.save", "eval", "exec", "yaml.load", "np.load"), where
            assert "allow_pickle" not in given, where
            if called.endswith(".from_pretrained"):
                assert {"trust_remote_code", None} & given or called == "LoraConfig.from_pretrained", where
                loads = not called.startswith(("AutoConfig", "AutoProcessor", "AutoTokenizer", "LoraConfig"))
                assert not loads or {"use_safetensors", None} & given, where
