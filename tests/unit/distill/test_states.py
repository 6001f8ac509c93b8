"""The command of an engine, room for states in flight, and folders that are swept."""

import fcntl
import json
import os
import shlex
import shutil
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hs_connectors.mooncake_store import MooncakeStoreConfig

from draftsmith.distill.data_section import PLACES, DataSection, TeacherServerSection
from draftsmith.distill.server.client import BadAnswer
from draftsmith.distill.server.state_folder import FolderTransport
from draftsmith.distill.server.transport import bytes_in_flight, engine_command, swept, transport_of
from draftsmith.distill.target_section import TargetSection
from draftsmith.errors import ConfigError
from draftsmith.train.recipe import load_recipe


@pytest.mark.parametrize("transfer", ["file", "fp8"])
def test_the_command_of_an_engine(transfer: str) -> None:
    settings = TeacherServerSection(urls="http://localhost:8000", folder="/dev/shm/it's", transfer=transfer)
    target = TargetSection(model="org/model", revision="abc", dtype="bfloat16")
    data = DataSection(prompt_tokens=512, response_tokens=1024)
    words = shlex.split(engine_command(settings, target, data, [2, 18, 36]))
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert words[:3] == ["vllm", "serve", "org/model"]
    assert options["--max-model-len"] == "1537"
    assert options["--revision"] == "abc"
    assert options["--generation-config"] == "vllm"
    assert options["--port"] == "8000"
    extract = json.loads(options["--speculative-config"])
    assert extract["draft_model_config"]["hf_config"] == {"eagle_aux_hidden_state_layer_ids": [2, 18, 36]}
    connector = json.loads(options["--kv-transfer-config"])
    assert connector["kv_connector_extra_config"] == {"shared_storage_path": "/dev/shm/it's"}
    assert ("FP8" in connector["kv_connector"]) == (transfer == "fp8") == ("kv_connector_module_path" in connector)
    trusted = target.model_copy(update={"trust_remote_code": True})
    assert engine_command(settings, trusted, data, [36]).count(" --trust-remote-code ") == 1


def of_store(*urls: str, **values: Any) -> TeacherServerSection:
    given = {"transfer": "mooncake", "store": "10.0.0.1:50051", **values}
    return TeacherServerSection(urls=list(urls or ["http://a:8000"]), **given)


def test_the_commands_of_a_store() -> None:
    """Each engine is known to the others by the host of its address; the master listens at the given one alone."""
    settings = of_store("http://a:8000", "http://b:8000", "http://b:8001", store_gib=1.5)
    master, *engines = map(shlex.split, engine_command(settings, TargetSection(), DataSection(), [36]).splitlines())
    assert master == ["mooncake_master", "--rpc_address=10.0.0.1", "--rpc_port=50051", "--metrics_host=127.0.0.1"]
    connectors = [json.loads(words[-1]) for words in engines]
    stores = [connector["kv_connector_extra_config"]["mooncake"] for connector in connectors]
    assert [store["local_hostname"] for store in stores] == ["a", "b", "b"]
    assert [words[words.index("--port") + 1] for words in engines] == ["8000", "8000", "8001"]
    assert stores[0]["global_segment_size"] == 1.5 * 2**30
    config = MooncakeStoreConfig.from_dict(stores[0])
    assert config.master_server_address == settings.store
    assert connectors[0]["kv_connector"] == "MooncakeHiddenStatesConnector"
    assert find_spec(connectors[0]["kv_connector_module_path"]) is not None
    public = engine_command(settings.model_copy(update=PLACES), TargetSection(), DataSection(), [36])
    assert public.startswith("mooncake_master --rpc_address=STORE --rpc_port=50051 ")
    assert len(public.splitlines()) == 2, "engines that differ in their addresses alone"
    assert "10.0.0.1" not in public


def test_states_in_flight_must_fit_the_store() -> None:
    transport_of(of_store()).require_room(int(0.89 * 4 * 2**30))
    transport_of(of_store("http://a:1", "http://b:1")).require_room(7 * 2**30)
    with pytest.raises(ConfigError, match=r"store_gib=4 of 1 .* 3.7 GiB, .* 90% .*ahead=2 or train.batch_size, or a"):
        transport_of(of_store()).require_room(int(3.7 * 2**30))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"folder": "/s"}, "teacher.server.folder='/s' with teacher.server.transfer='mooncake'; expected null"),
        ({"store": None}, "teacher.server.store is missing, with teacher.server.transfer='mooncake'"),
        ({"store": "a"}, "teacher.server.store='a'; expected host:port of mooncake_master"),
        ({"transfer": "fp8", "folder": "/s"}, "teacher.server.store='10.0.0.1:50051' with teacher.server.transfer="),
        ({"answers_gib": 1}, "teacher.server.answers_gib=1 with teacher.server.transfer='mooncake'; expected 0, or a"),
        ({"transfer": "file", "store": None}, "teacher.server.folder is missing, with teacher.server.transfer='file'"),
    ],
)
def test_a_transfer_has_its_own_place(values: dict[str, Any], message: str) -> None:
    server = {"urls": "http://a:1", "transfer": "mooncake", "store": "10.0.0.1:50051", **values}
    given = [f"teacher.server={json.dumps(server)}"]
    with pytest.raises(ConfigError) as refused:
        load_recipe("qwen3-30b-a3b/eagle3_server", given)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"handle": None}, "no connector for hidden states of Mooncake"),
        ({"handle": "/etc/passwd"}, "which is no request's"),
        ({"handle": "cmpl-1:error"}, "which is no request's"),
        ({"handle": "kv-cache-1"}, "which is no request's"),
        ({"tensors": []}, "a manifest that cannot be read"),
        ({"tensors": {"hidden_states": {"shape": [-1], "dtype": "torch.float32"}, "token_ids": {}}}, "cannot be read"),
        ({"tensors": {"hidden_states": {"shape": [1], "dtype": "torch.load"}, "token_ids": {}}}, "cannot be read"),
    ],
)
def test_an_answer_names_only_keys_of_requests(changed: dict[str, Any], message: str) -> None:
    transport, spec = transport_of(of_store()), {"shape": [2], "dtype": "torch.int64", "offset": -1, "nbytes": 1}
    params = {"handle": "cmpl-1-0-ab", "version": 1, "tensors": {"hidden_states": spec, "token_ids": spec}}
    assert transport.named(params)["tensors"]["token_ids"]["offset"] == 64, "the answer's are not used"
    with pytest.raises(BadAnswer, match=message):
        transport.named({**params, **changed})


def test_states_in_flight_must_fit_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TeacherServerSection(urls="http://localhost:8000", folder=str(tmp_path), ahead=1)
    sizes = {"batch_rows": 4, "tokens": 100, "layers": 4, "hidden_size": 8}
    needed = bytes_in_flight(settings, **sizes, dtype=torch.bfloat16)
    assert needed == 2 * 4 * 100 * 4 * 8 * 2 == bytes_in_flight(settings, **sizes, dtype=torch.float32) // 2
    transport = transport_of(settings)
    transport.require_room(needed)
    with pytest.raises(ConfigError, match="GiB are free, and states in flight take up to"):
        transport.require_room(2**60)
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk._replace(free=2**20))
    (tmp_path / "cmpl-1.safetensors").write_bytes(b"x" * 2**20)
    transport = transport_of(settings.model_copy(update={"answers_gib": 1 / 1024}))
    transport.require_room(2**20)
    with pytest.raises(ConfigError, match=r"those of answers 0.0 GiB; expected more room, .*answers_gib"):
        transport.require_room(2**20 + 1)


def test_states_of_answers_are_deleted_and_other_files_are_not(tmp_path: Path) -> None:
    settings = TeacherServerSection(urls="http://localhost:8000", folder=str(tmp_path))
    kept = [tmp_path / name for name in ("model.safetensors", "cmpl-notes.txt")]
    states = [tmp_path / f"{name}.safetensors" for name in ("cmpl-1", "chatcmpl-2")]
    old = time.time() - 60
    with swept(settings):
        for file in (*kept, *states):
            file.write_bytes(b"x")
            os.utime(file, (old, old))
        lock = tmp_path / "cmpl-3.safetensors.lock"
        lock.touch()
        os.utime(lock, (old + 30, old + 30))
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_the_newest_states_of_answers_are_kept_up_to_a_size(tmp_path: Path) -> None:
    """Neither a young file is deleted, nor one that the engine still writes; their sizes count."""
    sizes, mib = {"answers_gib": 2.5 / 1024, "urls": "http://a:1"}, 2**20
    transport = FolderTransport(TeacherServerSection(folder=str(tmp_path), **sizes))
    names = ["young", "new", "old", "older", "held", "oldest"]
    for age, name in enumerate(names):
        file, made = tmp_path / f"cmpl-{name}.safetensors", time.time() - 60 * age
        file.write_bytes(b"x" * mib)
        file.with_name(f"{file.name}.lock").touch()
        for path in (file, file.with_name(f"{file.name}.lock")):
            os.utime(path, (made, made))

    def left() -> set[str]:
        return {path.name[len("cmpl-") :].removesuffix(".safetensors") for path in tmp_path.glob("*.safetensors")}

    with (tmp_path / "cmpl-held.safetensors.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        transport.clear()
        assert left() == {"young", "new", "held"}
        for name in ("a", "b", "c"):
            (tmp_path / f"cmpl-{name}.safetensors").write_bytes(b"x" * mib)
        transport.clear()
        assert left() == {"a", "b", "c", "young", "held"}
        assert (tmp_path / "cmpl-held.safetensors.lock").exists()
    transport.clear(age=0.0)
    assert left() == {"c", "b"}


def test_the_first_engine_answers_where_no_other_server_is_named() -> None:
    given = ["teacher.server.urls=[http://a:1,http://b:1]", "teacher.server.model=m"]
    data = load_recipe("qwen3-30b-a3b/eagle3_server", given).data
    assert data.server is not None
    assert (data.server.url, data.server.model) == ("http://a:1", "m")
    assert load_recipe("qwen3-30b-a3b/eagle3_server", [*given, "data.response=text"]).data.server is None
    other = "data.server={url: 'http://c:1', model: n}"
    own = load_recipe("qwen3-30b-a3b/eagle3_server", [*given, other]).data.server
    assert own is not None
    assert own.url == "http://c:1"
