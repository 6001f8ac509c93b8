"""States that engines write: found by their tokens, their layers recognised, and equal to the target's own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_llama
from datasets import Dataset
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedModel,
)

from draftsmith.distill.hidden_state_cache import CachedTeacher, states_of
from draftsmith.distill.state_files import FileStates, StateFiles
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.errors import ConfigError
from draftsmith.heads.base import FINAL
from draftsmith.train.step import collate

CPU = torch.device("cpu")
DEPTH, WIDTH, VOCAB = 4, 32, 64
NOTES: list[str] = []


def target(**changes: Any) -> LlamaForCausalLM:
    model = make_llama(num_hidden_layers=DEPTH, **changes).requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    model.model.norm.weight.copy_(1 + torch.rand(WIDTH, generator=generator))
    return model


def texts(count: int = 6, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (8 + row,), generator=generator).tolist() for row in range(count)]


def rows_of(ids: list[list[int]]) -> Dataset:
    return Dataset.from_list([{"input_ids": row, "spans": [[3, len(row)]]} for row in ids])


def states(model: PreTrainedModel, ids: list[int], layers: tuple[int, ...]) -> Tensor:
    """[T, S, H] in the engine's dtype; the last layer is before the last norm, as vLLM has it."""
    depth = model.config.num_hidden_layers
    every_TW = states_of(OnlineTeacher(model, tuple(range(1, depth + 1))), [ids])[0]
    every = every_TW.chunk(depth + 1, -1)  # the final states first
    return torch.stack([every[max(layer, 0)] for layer in layers], 1)


def vllm(folder: Path, model: PreTrainedModel, ids: list[list[int]], layers: tuple[int, ...], dtype: Any) -> str:
    """Files as the ExampleHiddenStatesConnector of vLLM writes them, with their lock files."""
    folder.mkdir()
    for place, row in enumerate(ids):
        tensors = {"hidden_states": states(model, row, layers).to(dtype).contiguous(), "token_ids": torch.tensor(row)}
        save_file(tensors, folder / f"cmpl-{place}-0.safetensors")
        (folder / f"cmpl-{place}-0.safetensors.lock").touch()
    return str(folder)


def files(folder: str, hidden_size: int = WIDTH) -> StateFiles:
    NOTES.clear()
    return StateFiles(folder, VOCAB, hidden_size, NOTES.append)


def close(model: PreTrainedModel, found: StateFiles, rows: Dataset, layers: tuple[int, ...], error: float) -> None:
    """The states of a batch are the target's own, relative to the largest number of a token."""
    online = OnlineTeacher(model, layers)
    batch = collate(rows, [len(rows) - 1, 0, 2], CPU)
    own = online.signals(batch)
    stored = CachedTeacher(online, FileStates(found, model, layers, rows).read).signals(batch)
    seen_BT = batch.mask_BT
    for a, b in ((own.hidden_BTH, stored.hidden_BTH), (own.features_BTF, stored.features_BTF)):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert ((a - b).abs() / a.abs().amax(-1, keepdim=True))[seen_BT].max() < error


@pytest.mark.parametrize(
    ("stored", "layers"),
    [
        ((1, 2, 3, DEPTH), (1, 2, 3)),
        ((3, DEPTH, 1), (1, 3)),
        ((1, 2, DEPTH), (DEPTH, 2)),
        ((1, 2, FINAL), (2, 1)),
        ((DEPTH,), (FINAL,)),
        ((FINAL, 2), ()),
    ],
)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_layers_are_recognised_in_any_order(
    stored: tuple[int, ...], layers: tuple[int, ...], dtype: torch.dtype, error: float, tmp_path: Path
) -> None:
    """The last layer is normed where the final states are asked for, and only there. bfloat16 has 8 bits."""
    model, ids = target(), texts()
    found = files(vllm(tmp_path / "states", model, ids, stored, dtype))
    close(model, found, rows_of(ids), layers, error)
    assert NOTES == []


def test_a_norm_by_another_name_is_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": DEPTH, "n_head": 2, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.2)).eval().requires_grad_(False)
    model.transformer.ln_f.bias.uniform_()
    found = files(vllm(tmp_path / "states", model, texts(), (2, DEPTH), torch.bfloat16))
    close(model, found, rows_of(texts()), (2,), 2e-2)


def test_a_target_whose_last_norm_lies_in_its_last_layer_needs_its_final_states(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": DEPTH, "n_head": 2, "n_positions": 64}
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(**sizes, initializer_range=0.2)).eval().requires_grad_(False)
    model.transformer.h[-1].ln_2.weight.uniform_(0.5, 1.5)
    found = files(vllm(tmp_path / "states", model, texts(), (2, DEPTH), torch.float32))
    assert "expected the final states, no norm of the last layer" in _refused(model, found, (2,), texts())


def test_packed_rows_have_the_states_of_their_documents(tmp_path: Path) -> None:
    model, ids = target(), texts(6)
    pairs = list(zip(ids[:3], ids[3:], strict=True))
    joined = ({"input_ids": a + b, "spans": [[3, len(a)]], "documents": [len(a), len(b)]} for a, b in pairs)
    rows = Dataset.from_list(list(joined))
    read = FileStates(files(vllm(tmp_path / "states", model, ids, (2, FINAL), torch.float32)), model, (2,), rows)
    for row, (a, b) in enumerate(pairs):
        alone = [states(model, one, (FINAL, 2)).flatten(1) for one in (a, b)]
        torch.testing.assert_close(read.read([row])[0][0], torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_the_last_state_may_be_missing_and_no_other(tmp_path: Path) -> None:
    """vLLM with include_output_tokens has not read the last token, on which no training target depends."""
    model, ids = target(), texts()
    shorter = [row[:-1] for row in ids[:-1]] + [ids[-1][:-2]]
    found = files(vllm(tmp_path / "states", model, shorter, (1, FINAL), torch.float32))
    rows = found.covered(rows_of(ids), "talk.jsonl", NOTES.append)
    assert rows["input_ids"] == ids[:-1]
    assert list(NOTES) == [f"talk.jsonl: 1 of 6 have no states in {tmp_path}/states: left out"]
    close(model, found, rows, (1,), 1e-4)
    assert FileStates(found, model, (1,), rows).read([0])[0][0, -1].abs().max() == 0


def _refused(model: PreTrainedModel, found: StateFiles, layers: tuple[int, ...], ids: list[list[int]]) -> str:
    with pytest.raises(ConfigError) as refused:
        FileStates(found, model, layers, rows_of(ids))
    return str(refused.value)


def test_states_of_another_target_or_layer_are_refused(tmp_path: Path) -> None:
    model, other, ids = target(), target(seed=1), texts()
    folder = vllm(tmp_path / "other", other, ids, (1, 2, DEPTH), torch.float32)
    assert "the states are not the target's; the nearest ones are " in _refused(model, files(folder), (1,), ids)
    folder = vllm(tmp_path / "layers", model, ids, (1, 3, DEPTH), torch.float32)
    said = _refused(model, files(folder), (1, 2), ids)
    assert "holds layer 1 (0.0% off), layer 3 (0.0% off), layer 4 (0.0% off); expected layer 2 as well" in said
    folder = vllm(tmp_path / "final", model, ids, (1, 2), torch.float32)
    said = _refused(model, files(folder), (1,), ids)
    assert "expected the final states as well (the final states are layer 4 for vLLM)" in said
    mixed = tmp_path / "mixed"
    vllm(mixed, model, ids[:3], (1, FINAL), torch.float32)
    vllm(mixed / "more", other, ids[3:], (1, FINAL), torch.float32)
    assert "the states are not the target's" in _refused(model, files(str(mixed)), (1,), ids)


def test_layers_that_are_nearly_the_targets_are_refused(tmp_path: Path) -> None:
    """A fine-tuned target has states that resemble those of the model that it was made from."""
    model, ids = target(), texts()
    folder = vllm(tmp_path / "states", model, ids, (2, FINAL), torch.float32)
    for file in (tmp_path / "states").glob("*.safetensors"):
        text = files(folder).open(file)
        noise = torch.randn(text.states_TSH.shape, generator=torch.Generator().manual_seed(1))
        scale = text.states_TSH.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
        moved = (text.states_TSH + 0.15 * noise * scale).contiguous()
        save_file({"hidden_states": moved, "token_ids": text.ids_T.clone()}, file)
    assert "(15.0% off)" in _refused(model, files(folder), (2,), ids)


DAMAGED: dict[str, Any] = {
    "cut": lambda content: content[:-100],
    "empty": lambda content: b"",
    "width": {"hidden_states": torch.zeros(4, 2, WIDTH + 1)},
    "length": {"hidden_states": torch.zeros(5, 2, WIDTH)},
    "axis": {"hidden_states": torch.zeros(4)},
    "dtype": {"hidden_states": torch.zeros(4, 2, WIDTH, dtype=torch.int32)},
    "vocabulary": {"token_ids": torch.tensor([1, 2, VOCAB, 3])},
    "negative": {"token_ids": torch.tensor([1, -2, 0, 3])},
    "none": {"hidden_states": torch.zeros(0, 2, WIDTH), "token_ids": torch.zeros(0, dtype=torch.long)},
    "names": {"states": torch.zeros(4, 2, WIDTH), "hidden_states": None},
    "flat": {"token_ids": torch.tensor([[0, 1, 2, 3]])},
}
"""Another content of a file, or other tensors in it."""


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_file_is_left_out_and_named(how: str, tmp_path: Path) -> None:
    model, ids = target(), texts()
    folder = vllm(tmp_path / "states", model, ids, (1, FINAL), torch.float32)
    file, other = tmp_path / "states" / "cmpl-1-0.safetensors", DAMAGED[how]
    if callable(other):
        file.write_bytes(other(file.read_bytes()))
    else:
        tensors = {"hidden_states": torch.zeros(4, 2, WIDTH), "token_ids": torch.arange(4), **other}
        save_file({name: value for name, value in tensors.items() if value is not None}, file)
    found = files(folder)
    assert found.find(ids[0]) is not None
    assert found.find(ids[1]) is None
    assert len(NOTES) == 1
    assert NOTES[0].startswith(f"{folder}: 1 of 6 files cannot be read (the first, cmpl-1-0.")


def test_a_file_that_is_removed_while_the_run_reads_is_named(tmp_path: Path) -> None:
    model, ids = target(), texts(18)
    folder = vllm(tmp_path / "states", model, ids, (1, FINAL), torch.float32)
    read = FileStates(files(folder), model, (1,), rows_of(ids))
    (tmp_path / "states" / "cmpl-1-0.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"teacher\.file: .*cmpl-1-0\.safetensors cannot be read"):
        read.read([1])


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    model, ids = target(), texts()
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=r"teacher\.file='.*'; expected a folder of states in \.safetensors"):
            files(str(folder))
    folder = vllm(tmp_path / "states", model, ids, (1, FINAL), torch.float32)
    with pytest.raises(ConfigError, match=r"6 of 6 files cannot be read .*; expected states of hidden size 48"):
        files(folder, hidden_size=48)
    with pytest.raises(ConfigError, match=r"no file has the tokens of a row of data\.prompts=talk; expected states of"):
        files(folder).covered(rows_of(texts(3, seed=9)), "talk", NOTES.append)
    vllm(tmp_path / "states" / "more", model, texts(2, seed=3), (1, 2, FINAL), torch.float32)
    with pytest.raises(ConfigError, match=r"numbers of layers differ \(.* has 2, .* has 3\); expected one number"):
        files(folder)


def test_speculators_rows_of_tokens_are_data(tmp_path: Path, recipe_file: Path) -> None:
    """`prepare_data.py` of speculators saves a data set in torch's format, with a loss mask for each row."""
    from draftsmith.train.recipe import load_recipe
    from draftsmith.train.trainer import train

    model = LlamaForCausalLM.from_pretrained(load_recipe(str(recipe_file)).target.model)
    assert isinstance(model, LlamaForCausalLM)
    ids = texts(16)
    masks = [[0] * 3 + [1] * (len(row) - 3) for row in ids[:-1]] + [[0] * len(ids[-1])]
    data = Dataset.from_dict({"input_ids": ids, "loss_mask": masks, "seq_len": list(map(len, ids))})
    data.with_format("torch").save_to_disk(tmp_path / "prepared")
    kept = tmp_path / "prepared" / "hidden_states"
    kept.mkdir()
    for place, row in enumerate(ids):
        tensors = {"hidden_states": states(model, row, (1, 2)).bfloat16(), "token_ids": torch.tensor(row)}
        save_file(tensors, kept / f"hs_{place}.safetensors")
    options = ["drafter={type: eagle3, layers: [1, 2]}", f"data.prompts={tmp_path}/prepared", "data.response=text"]
    options += ["evaluation.count=2", "train.evaluate_every=2", "train.steps=2"]
    losses = []
    for name, more in (("online", []), ("files", ["teacher.kind=files", f"teacher.file={kept}"])):
        train(load_recipe(str(recipe_file), [*options, *more, f"output={tmp_path}/{name}"]))
        metrics = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in metrics if "loss" in json.loads(line)])
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
