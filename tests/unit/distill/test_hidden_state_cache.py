"""The hidden-state cache: states are read as they were written, and damage invalidates one shard."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import YARN, make_llama
from datasets import Dataset
from torch import Tensor

from draftsmith.distill import hidden_state_cache as signal_cache
from draftsmith.distill.hidden_state_cache import CachedTeacher, DamagedShard, SignalCache
from draftsmith.distill.load_target import load_target
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.heads.base import FINAL, TeacherSignals
from draftsmith.heads.hidden_states import final_states
from draftsmith.train.step import collate

LAYERS = (1, FINAL)
CPU = torch.device("cpu")


def rows_of(count: int = 10) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    lengths = [5 + (3 * row) % 7 for row in range(count)]
    ids = [torch.randint(2, 64, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_list([{"input_ids": row, "spans": [[2, len(row)]]} for row in ids])


def cache_of(
    rows: Dataset, dtype: str = "float32", layers: tuple[int, ...] = LAYERS, gain: float = 1.0, **options: Any
) -> tuple[SignalCache, OnlineTeacher]:
    """Return the cache of a new target, with nothing in it unless an equal one was built before."""
    model = make_llama().requires_grad_(False)
    model.model.norm.weight *= gain
    return SignalCache(model, rows, layers, dtype, shard_rows=4, **options), OnlineTeacher(model, layers)


def built(rows: Dataset, *how: Any, **options: Any) -> tuple[SignalCache, OnlineTeacher]:
    cache, teacher = cache_of(rows, *how, **options)
    cache.build(cache.missing()[0], teacher, lambda: None, batch=3)
    return cache, teacher


def both(cache: SignalCache, teacher: OnlineTeacher, rows: Dataset) -> tuple[TeacherSignals, TeacherSignals]:
    batch = collate(rows, [7, 0, 9], CPU)
    return teacher.signals(batch), CachedTeacher(teacher, cache.read).signals(batch)


def seen(x_BTH: Tensor, signals: TeacherSignals) -> Tensor:
    return x_BTH[signals.attention_mask_BT.bool()]


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell the memory of a process")
def test_memory_does_not_grow_with_the_tokens_of_a_shard() -> None:
    """The logits of 100 parts take 1 GB together. The heap is used as after sampling, when glibc keeps such blocks."""
    for megabytes in (8, 16, 20, 24, 28):
        torch.empty(megabytes, 2**18).fill_(0.0)
    model = make_llama(vocab_size=40_000, hidden_size=8, intermediate_size=8).requires_grad_(False)
    rows = Dataset.from_list([{"input_ids": [row] * 100, "spans": [[2, 100]]} for row in range(64)])
    cache, teacher = SignalCache(model, rows, LAYERS, "float32", normalizers=True), OnlineTeacher(model, LAYERS)
    before = resident()
    cache.build(cache.missing()[0], teacher, lambda: None)
    assert resident() - before < 3e8


@pytest.mark.parametrize("gain", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize(("dtype", "bits"), [("float32", 24), ("bfloat16", 8), ("float8", 4)])
def test_states_come_back(dtype: str, bits: int, gain: float) -> None:
    """Each number is rounded to the bits of the dtype, whatever the size of the states; to the nearest is half a bit.

    The largest number of a token is 448 in float8, where those below 2**-6 are multiples of 2**-9. Two passes of the
    model differ by 1e-5 of it.
    """
    rows = rows_of()
    cache, teacher = built(rows, dtype, gain=gain)
    online, cached = both(cache, teacher, rows)
    pairs = ((online.hidden_BTH, cached.hidden_BTH), (online.features_BTF, cached.features_BTF))
    largest = torch.cat([seen(a, online) for a, _ in pairs], -1).abs().amax(-1, keepdim=True)
    for a, b in pairs:
        a, b = seen(a, online), seen(b, online)
        least = 2.0**-10 / 448 if dtype == "float8" else 0.0
        assert ((a - b).abs() <= 2.0**-bits * a.abs() + (least + 1e-5) * largest).all()
    width = {"float32": 4, "bfloat16": 2, "float8": 1}[dtype] * 32 * 2  # the final states once, and layer 1
    assert width < cache.bytes_a_token() < width + 30, "states, a scale, and the files' headers"


@pytest.mark.parametrize("layers", [(), (FINAL,), (FINAL, 2, 1), (1, FINAL, 2)])
def test_every_order_of_layers_comes_back(layers: tuple[int, ...]) -> None:
    rows = rows_of()
    cache, teacher = built(rows, "float32", layers)
    online, cached = both(cache, teacher, rows)
    assert (online.features_BTF is None) == (cached.features_BTF is None) == (not layers)
    for a, b in ((online.hidden_BTH, cached.hidden_BTH), (online.features_BTF, cached.features_BTF)):
        if a is not None and b is not None:
            torch.testing.assert_close(seen(b, online), seen(a, online), rtol=1e-5, atol=1e-5)


def test_drafters_of_the_final_states_share_a_cache() -> None:
    """The second one finds every shard, whichever of them wrote it."""
    rows = rows_of()
    built(rows, "float32", ())
    second, teacher = cache_of(rows, "float32", (FINAL,))
    assert second.missing() == ([], [])
    online, cached = both(second, teacher, rows)
    a_BTF, b_BTF = (seen(one.features_BTF, online) for one in (cached, online))
    torch.testing.assert_close(a_BTF, b_BTF, rtol=1e-5, atol=1e-5)


def test_a_killed_build_continues_and_damage_costs_one_shard() -> None:
    rows = rows_of()
    cache, teacher = cache_of(rows)

    def until_killed() -> Iterator[int]:
        yield 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.build(until_killed(), teacher, lambda: None)
    assert cache.missing() == ([1, 2], [])
    cache.build([1, 2], teacher, lambda: None)
    assert cache.missing() == ([], [])
    file = cache.folder / "shard-00001.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-9] + b"123456789")
    (cache.folder / "shard-00002.json").unlink()
    again, _ = cache_of(rows)
    wanted, problems = again.missing()
    assert wanted == [1, 2]
    assert problems == [
        "teacher cache: shard-00001.safetensors does not match its checksum; building it again",
        "teacher cache: shard-00002.safetensors has no readable checksum file; building it again",
    ]
    again.build(wanted, teacher, lambda: None)
    assert file.read_bytes() == whole


def test_shards_that_change_places_with_their_notes_are_built_again() -> None:
    """Rows of equal lengths, whose bytes and checksums fit the place of the other shard; also in a run that reads."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 64, (8, 5), generator=generator).tolist()
    rows = Dataset.from_list([{"input_ids": row, "spans": [[2, 5]]} for row in ids])
    cache, teacher = built(rows)
    (expected,) = cache.read([1])
    fresh, _ = cache_of(rows)
    for suffix in (".safetensors", ".json"):
        one, other = (cache.folder / f"shard-0000{shard}{suffix}" for shard in (0, 1))
        one.rename(cache.folder / "spare")
        other.rename(one)
        (cache.folder / "spare").rename(other)
    with pytest.raises(DamagedShard, match="holds the rows of shard 1"):
        fresh.read([1])
    wanted, problems = fresh.missing()
    assert wanted == [0, 1]
    assert problems[0] == "teacher cache: shard-00000.safetensors holds the rows of shard 1; building it again"
    fresh.build(wanted, teacher, lambda: None)
    assert fresh.missing() == ([], [])
    torch.testing.assert_close(fresh.read([1])[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize("note", ["[]", "7", "{}", "nothing"])
def test_a_note_that_is_none_is_named(note: str) -> None:
    cache, _ = built(rows_of())
    (cache.folder / "shard-00001.json").write_text(note)
    fresh, _ = cache_of(rows_of())
    with pytest.raises(DamagedShard):
        fresh.read([5])
    problem = "teacher cache: shard-00001.safetensors has no readable checksum file; building it again"
    assert fresh.missing() == ([1], [problem])


def test_a_damaged_header_is_repaired_in_the_process_that_has_read_it() -> None:
    """The offsets of the damaged header are not those of the shard that replaces it."""
    rows = rows_of()
    cache, teacher = built(rows)
    (expected,) = cache.read([5])
    file = cache.folder / "shard-00001.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["states"]["data_offsets"] = [4, header["states"]["data_offsets"][1]]
    file.write_bytes(content[:8] + json.dumps(header, separators=(",", ":")).encode().ljust(size) + content[8 + size :])
    again, _ = cache_of(rows)

    def repair(damaged: DamagedShard) -> None:
        assert "does not match its checksum" in damaged.problem
        again.build(again.missing()[0], teacher, lambda: None)

    signals = CachedTeacher(teacher, again.read, repair).signals(collate(rows, [5], CPU))
    torch.testing.assert_close(signals.hidden_BTH[0, : len(rows[5]["input_ids"])], expected[0, :, :32])


def test_another_target_data_layers_or_dtype_is_another_cache() -> None:
    rows, model = rows_of(), make_llama()
    keys = {
        SignalCache(model, rows, LAYERS, "float32").key,
        SignalCache(make_llama(seed=1), rows, LAYERS, "float32").key,
        SignalCache(model, rows_of(9), LAYERS, "float32").key,
        SignalCache(model, rows, (FINAL,), "float32").key,
        SignalCache(model, rows, LAYERS, "bfloat16").key,
        SignalCache(make_llama(rope_parameters=YARN), rows, LAYERS, "float32").key,
    }
    assert len(keys) == 6
    with pytest.raises(ConfigError, match=r"teacher\.dtype='int4'; expected one of"):
        SignalCache(model, rows, LAYERS, "int4")


def test_a_copy_of_the_target_in_another_dtype_has_the_same_cache(tiny_target_folder: Path) -> None:
    """The states are those of the same weights and config, whatever the folder and the dtype are called."""
    copies = [load_target(str(tiny_target_folder), dtype=dtype).model for dtype in ("float32", "bfloat16")]
    keys = {SignalCache(model, rows_of(), LAYERS, "float32").key for model in (make_llama(), *copies)}
    assert len(keys) == 1


DOCUMENTS = [[5], [4, 4], [1, 3, 7], [2, 3, 2]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8"])
def test_normalizers_are_those_of_the_stored_states(dtype: str) -> None:
    """They are of the logits that the lm_head gives for what is read, in every dtype of the states."""
    rows = rows_of()
    cache, teacher = built(rows, dtype, normalizers=True)
    assert cache.missing() == ([], [])
    batch = collate(rows, [7, 0, 9], CPU)
    signals = CachedTeacher(teacher, cache.read).signals(batch)
    logits_BTV = teacher.model.lm_head(signals.hidden_BTH)
    torch.testing.assert_close(seen(signals.log_sum_BT, signals), seen(logits_BTV.logsumexp(-1).double(), signals))
    assert torch.equal(seen(signals.argmax_BT, signals), seen(logits_BTV.argmax(-1), signals))
    plain, _ = built(rows, dtype)
    assert plain.key != cache.key
    assert CachedTeacher(teacher, plain.read).signals(batch).log_sum_BT is None


def packed_rows(documents: list[list[int]]) -> Dataset:
    return rows_of(len(documents)).add_column("documents", documents)


def test_packed_rows_are_cached_as_the_target_sees_them_online() -> None:
    """States of packed documents equal those of single ones; other borders in the same text give another key."""
    rows = packed_rows(DOCUMENTS)
    cache, teacher = built(rows)
    batch = collate(rows, [2, 0, 3, 1], CPU)
    online, cached = teacher.signals(batch), CachedTeacher(teacher, cache.read).signals(batch)
    assert cached.documents_BT is online.documents_BT is batch.documents_BT is not None
    for a, b in ((online.hidden_BTH, cached.hidden_BTH), (online.features_BTF, cached.features_BTF)):
        torch.testing.assert_close(seen(b, cached), seen(a, online), rtol=1e-5, atol=1e-5)
    for row, documents in enumerate(DOCUMENTS):
        ids_T, states_TW = torch.tensor(rows[row]["input_ids"]), cache.read([row])[0][0]
        parts = zip(ids_T.split(documents), states_TW.split(documents), strict=True)
        for ids_T, states_TW in parts:
            alone_TH = final_states(teacher.model, ids_T[None], torch.ones_like(ids_T[None]))[0]
            torch.testing.assert_close(states_TW[:, :32], alone_TH, rtol=1e-4, atol=1e-4)  # fp32, another kernel
    keys = {
        SignalCache(make_llama(), some, LAYERS, "float32", shard_rows=4).key
        for some in (rows, packed_rows([[5], [3, 5], *DOCUMENTS[2:]]), rows.remove_columns("documents"))
    }
    assert cache.key in keys
    assert len(keys) == 3


def test_a_full_disk_keeps_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, teacher = cache_of(rows_of())
    cache.build([0], teacher, lambda: None)

    def full(tensors: dict, path: Path, metadata: dict) -> None:
        path.write_bytes(b"part of it")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(signal_cache, "save_file", full)
        with pytest.raises(DraftsmithError, match=r"shard-00001.* cannot be written \(No space left on device\)"):
            cache.build([1], teacher, lambda: None)
    assert cache.missing() == ([1, 2], [])
    assert not [file for file in cache.folder.iterdir() if "tmp" in file.name]


def test_rows_that_are_read_ahead_have_the_same_states() -> None:
    rows = rows_of()
    cache, teacher = built(rows)
    order = [[7, 0], [3, 1], [9, 2], [5, 5]]
    plain, ahead = CachedTeacher(teacher, cache.read), CachedTeacher(teacher, cache.read)

    def states(teacher: CachedTeacher, indices: list[int]) -> Tensor:
        signals = teacher.signals(collate(rows, indices, CPU))
        assert signals.features_BTF is not None
        return torch.cat([signals.hidden_BTH, signals.features_BTF], -1)

    expected = [states(plain, indices) for indices in order]
    ahead.expect(order)
    for number, indices in enumerate(order):
        if number == 2:  # other rows in between, as in an evaluation, change nothing
            states(ahead, [8, 6])
        assert torch.equal(states(ahead, indices), expected[number])
    ahead.expect([[4, 4]])
    assert torch.equal(states(ahead, [7, 0]), expected[0]), "rows that were not expected are read"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8"])
def test_rows_of_several_shards_come_with_zeros_after_them(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = built(rows_of(), dtype)
    monkeypatch.setattr(torch, "empty", lambda *shape, **kwargs: torch.full(shape, 7.0, **kwargs))
    rows = [6, 0, 9, 3]
    (read_BTW,) = cache.read(rows)
    assert read_BTW.shape[:2] == (4, max(cache.lengths[row] for row in rows))
    for row, states_TW in zip(rows, read_BTW.float(), strict=True):
        length = cache.lengths[row]
        assert torch.equal(states_TW[:length], cache.read([row])[0][0].float())
        assert states_TW[:length].abs().amax(-1).min() > 0
        assert not states_TW[length:].any()


def flip(file: Path, place: int) -> None:
    """Change one bit of a file, whose size and time stay as they are."""
    state, content = file.stat(), bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_no_flipped_bit_is_trained_on(dtype: str) -> None:
    """In any tensor of a row, which is then refused; the next start builds its shard again."""
    rows = rows_of(5)
    cache, teacher = built(rows, dtype, normalizers=True)
    file = cache.folder / "shard-00000.safetensors"
    header, whole = int.from_bytes(file.read_bytes()[:8], "little"), file.read_bytes()
    names = {"states", "log_sums", "argmax"} | ({"scales"} if dtype == "float8" else set())
    described = json.loads(whole[8 : 8 + header])
    assert described.keys() == names | {"__metadata__"}
    for name in names:
        begin, end = described[name]["data_offsets"]
        flip(file, 8 + header + (begin + end) // 2)
        fresh, _ = cache_of(rows, dtype, normalizers=True)
        assert fresh.missing() == ([], []), "size and time are as they were"
        with pytest.raises(DraftsmithError, match=r"shard-00000.*does not match its checksum.*; the same command"):
            fresh.read(range(5))
        fresh.read([4])
        assert fresh.missing()[0] == [0]
        fresh.build([0], teacher, lambda: None, batch=3)
        assert file.read_bytes() == whole


def test_a_shard_that_cannot_be_read_is_built_again() -> None:
    """Once, though the rows that are read ahead are in it, too; states are those before the damage."""
    rows = rows_of()
    cache, teacher = built(rows)
    order, whole = [[7, 0], [7, 1], [4, 7]], {file: file.read_bytes() for file in cache.folder.glob("*.safetensors")}
    (before_BTW,) = cache.read(order[2])
    flip(cache.folder / "shard-00001.safetensors", -9)
    problems = []

    def repair(damaged: signal_cache.DamagedShard) -> None:
        again, _ = cache.missing()
        problems.extend(damaged.problem for _ in again)
        cache.build(again, teacher, lambda: None, batch=3)

    cached = CachedTeacher(teacher, cache.read, repair)
    cached.expect(order)
    found = [cached.signals(collate(rows, indices, CPU)) for indices in order]
    assert torch.equal(found[2].hidden_BTH[:, : before_BTW.shape[1]], before_BTW[..., :32])
    assert len(problems) == 1
    assert {file: file.read_bytes() for file in whole} == whole
    teacher.model.model.norm.weight *= 2  # as where a pass is rounded in another way
    cache.build([1], teacher, lambda: None)
    assert not torch.equal(cache.read(order[2])[0], before_BTW)


def test_a_cache_of_an_earlier_version_is_read() -> None:
    """It has one checksum of a whole shard."""
    cache, _ = built(rows_of(), "float8")
    for number, file in enumerate(sorted(cache.folder.glob("*.safetensors"))):
        note = json.loads(file.with_suffix(".json").read_text())
        del note["rows"]
        note["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
        file.with_suffix(".json").write_text(json.dumps(note))
        if number == 1:
            flip(file, -9)
    fresh, _ = cache_of(rows_of(), "float8")
    problem = "teacher cache: shard-00001.safetensors does not match its checksum; building it again"
    assert fresh.missing() == ([1], [problem])
    assert torch.equal(fresh.read([0, 9])[0], cache.read([0, 9])[0])


@pytest.mark.parametrize("when", ["before the first row", "between two rows"])
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda file: file.unlink(), "No such file"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "it has become shorter"),
        (lambda file: file.write_bytes(b""), ""),
        (lambda file: flip(file, -9), "it does not match its checksum"),
    ],
)
def test_a_shard_that_was_damaged_since_the_start_is_named(
    harm: Callable[[Path], None], reason: str, when: str
) -> None:
    cache, _ = built(rows_of(), "float8")
    file = cache.folder / "shard-00001.safetensors"
    if when == "between two rows":
        cache.read([4, 7])
    harm(file)
    with pytest.raises(DraftsmithError, match=rf"shard-00001.* cannot be read \(.*{reason}.*\); the same command"):
        cache.read([0, 7])
    cache.read([0, 9])
