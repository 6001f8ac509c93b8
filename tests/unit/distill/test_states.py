"""The command of an engine, room for states in flight, and folders that are swept."""

import json
import os
import shlex
import time
from pathlib import Path

import pytest

from draftsmith.distill.server.state_folder import bytes_in_flight, engine_command, require_room, swept
from draftsmith.errors import ConfigError
from draftsmith.train.recipe import load_recipe
from draftsmith.train.recipe_sections import TeacherServerSection


@pytest.mark.parametrize("transfer", ["file", "fp8"])
def test_the_command_of_an_engine(transfer: str) -> None:
    settings = TeacherServerSection(urls="http://localhost:8000", folder="/dev/shm/it's", transfer=transfer)
    words = shlex.split(engine_command(settings, "org/model", "abc", "bfloat16", [2, 18, 36], 1536))
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert words[:3] == ["vllm", "serve", "org/model"]
    assert options["--max-model-len"] == "1537"
    assert options["--revision"] == "abc"
    extract = json.loads(options["--speculative-config"])
    assert extract["draft_model_config"]["hf_config"] == {"eagle_aux_hidden_state_layer_ids": [2, 18, 36]}
    connector = json.loads(options["--kv-transfer-config"])
    assert connector["kv_connector_extra_config"] == {"shared_storage_path": "/dev/shm/it's"}
    assert ("FP8" in connector["kv_connector"]) == (transfer == "fp8") == ("kv_connector_module_path" in connector)


def test_states_in_flight_must_fit_the_folder(tmp_path: Path) -> None:
    settings = TeacherServerSection(urls="http://localhost:8000", folder=str(tmp_path), ahead=1)
    needed = bytes_in_flight(settings, batch_rows=4, tokens=100, layers=4, hidden_size=8)
    assert needed == 2 * 4 * 100 * 4 * 8 * 2
    require_room(tmp_path, needed)
    with pytest.raises(ConfigError, match="GiB are free, and states in flight take up to"):
        require_room(tmp_path, 2**60)


def test_states_of_answers_are_deleted_and_other_files_are_not(tmp_path: Path) -> None:
    settings = TeacherServerSection(urls="http://localhost:8000", folder=str(tmp_path))
    kept = [tmp_path / name for name in ("model.safetensors", "cmpl-notes.txt")]
    states = [tmp_path / f"{name}.safetensors" for name in ("cmpl-1", "chatcmpl-2")]
    old = time.time() - 60
    with swept(settings):
        for file in (*kept, *states):
            file.write_bytes(b"x")
            os.utime(file, (old, old))
    assert sorted(tmp_path.iterdir()) == sorted(kept)


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
