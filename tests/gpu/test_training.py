"""A training step of every family on one GPU: the CPU's loss in float32, and in bf16 a loss that falls."""

import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from gpu.families import FAMILIES, make_drafter, target_model
from transformers import LlamaForCausalLM

from draftsmith.distill.hidden_state_cache import CachedTeacher, SignalCache
from draftsmith.distill.objective import Objective
from draftsmith.distill.quantization import quantize
from draftsmith.distill.teacher import Batch, OnlineTeacher
from draftsmith.heads.base import FINAL
from draftsmith.train.progress import MemoryMeter
from draftsmith.train.step import AgreementStep, Last, collate

pytestmark = pytest.mark.gpu
OBJECTIVES = {
    "kl": Objective(),
    "accepted_length": Objective("accepted_length", draft_length=3),
    "lk_lambda": Objective("lk_lambda", temperature=0.7),
}


def batch_on(device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(2, 64, (length,), generator=generator).tolist() for length in (24, 17, 24, 9)]
    rows = Dataset.from_list([{"input_ids": text, "spans": [[4, len(text)]]} for text in texts])
    return collate(rows, list(range(len(texts))), device)


def step_of(name: str, target: LlamaForCausalLM, objective: Objective) -> AgreementStep:
    drafter = make_drafter(name, target, noise=0.1).train()
    return AgreementStep(drafter, objective, OnlineTeacher(target, drafter.needs.layers))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_is_the_cpus(name: str, objective: str, target: LlamaForCausalLM, device: torch.device) -> None:
    """In float32, with its gradient; order of addition alone differs.

    Sums over some hundred tokens of logits that go through up to ten products of width 64 and less: relative errors of
    eps sqrt(n) are below 1e-5, of which the tolerance is ten times as much.
    """
    found = []
    for model, where in ((target, device), (target_model(), torch.device("cpu"))):
        step = step_of(name, model, OBJECTIVES[objective])
        loss, alpha_K, match_K, count_K, _ = step(batch_on(where), 0.5, Last([0.4] * 8))
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in step.parameters() if p.grad is not None]).norm()
        found.append([loss.detach().cpu(), alpha_K.cpu(), norm.cpu(), match_K.cpu(), count_K.cpu()])
    for ours, cpus in zip(*found, strict=True):
        torch.testing.assert_close(ours, cpus, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_few_steps_in_bf16(name: str, objective: str, target: LlamaForCausalLM, device: torch.device) -> None:
    """Weights that an objective reads first without gradient, as accepted_length does, still get one."""
    step = step_of(name, target, OBJECTIVES[objective])
    trained = {key: weight for key, weight in step.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=3e-3, weight_decay=0.0)
    batch, losses = batch_on(device), []
    for number in range(8):
        with torch.autocast(device.type, torch.bfloat16):
            loss = step(batch, 0.5, Last([0.4] * 8))[0]
        loss.backward()
        if number == 0:
            assert [key for key, weight in trained.items() if weight.grad is None or not weight.grad.any()] == []
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_by_fused_kernels(
    name: str, target: LlamaForCausalLM, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, those of the scores written out.

    On a CPU they differ by up to 0.8 %, a sixth of the tolerance; with another log-sum-exp by 36 % and more.
    """
    found = []
    for _ in range(2):
        step = step_of(name, target, Objective())
        with torch.autocast(device.type, torch.bfloat16):
            loss = step(batch_on(device), 0.5, Last([0.4] * 8))[0]
        loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in step.parameters() if p.grad is not None]))
        monkeypatch.setattr("draftsmith.heads.unrolled_attention._fused", lambda *_: False)
    assert (found[0] - found[1]).norm() < 0.05 * found[1].norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_heads_in_float32_learn_from_a_target_in_half_precision(
    dtype: torch.dtype, target: LlamaForCausalLM, device: torch.device
) -> None:
    step = step_of("eagle3", target, Objective())
    target.to(dtype)
    exact = step_of("eagle3", target_model().to(device), Objective())
    with torch.autocast(device.type, torch.bfloat16):
        loss, *_, count_K, _ = step(batch_on(device), 0.5, Last())
        expected = exact(batch_on(device), 0.5, Last())[0]
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in step.parameters() if p.requires_grad)
    assert loss.item() == pytest.approx(expected.item(), rel=0.05)
    assert count_K.sum() > 0


def test_the_meter_reads_the_allocators_peak(device: torch.device) -> None:
    """On a GPU torch's own number, which stays when memory is freed; on a CPU at least the pages that were written."""
    size = 256 * 2**20
    meter = MemoryMeter(device)
    taken = torch.ones(size, dtype=torch.uint8, device=device)
    assert meter.peak() >= 0.9 * size
    if device.type == "cuda":
        assert meter.peak() == torch.cuda.max_memory_allocated(device)
        del taken
        assert meter.peak() >= size
        assert MemoryMeter(device).peak() < size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8"])
def test_cached_states_arrive_while_the_next_are_read(
    dtype: str, target: LlamaForCausalLM, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies to the device are not waited for, and the reader does not write to memory that is still copied."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(2, 64, (60,), generator=generator).tolist() for _ in range(40)]
    rows = Dataset.from_list([{"input_ids": text, "spans": [[4, len(text)]]} for text in texts])
    teacher = OnlineTeacher(target, (1, FINAL))
    cache = SignalCache(target, rows, teacher.layers, dtype, shard_rows=16)
    cache.build(cache.missing()[0], teacher, lambda: None)
    cached, order = CachedTeacher(teacher, cache.read), [[row, 39 - row, row // 2] for row in range(40)]
    cached.expect(order)
    found = [cached.signals(collate(rows, some, device)).hidden_BTH for some in order]
    for some, hidden_BTH in zip(order, found, strict=True):
        expected_BTH = cache.read(some)[..., : hidden_BTH.shape[-1]].to(device, hidden_BTH.dtype)
        assert torch.equal(hidden_BTH[:, : expected_BTH.shape[1]], expected_BTH)


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_a_quantized_target_agrees_with_itself(kind: str, device: torch.device) -> None:
    """In bf16, as float8 requires; random weights of this size overlap by more than 0.9 in int8 on the CPU."""
    pytest.importorskip("torchao")
    if kind == "float8" and (device.type != "cuda" or torch.cuda.get_device_capability() < (8, 9)):
        pytest.skip("no GPU that multiplies float8")
    whole, model = (target_model().to(torch.bfloat16).requires_grad_(False) for _ in range(2))
    quantize(model, kind, device)
    ids_BT = batch_on(device).input_ids_BT
    p_BTV, other_BTV = (it.to(device)(ids_BT).logits.float().softmax(-1) for it in (model, whole))
    assert 0.8 < torch.minimum(p_BTV, other_BTV).sum(-1).mean() < 1
