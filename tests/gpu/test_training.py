"""A training step of every family on one GPU: the CPU's loss in float32, and in bf16 a loss that falls."""

import math

import pytest
import torch
from datasets import Dataset
from gpu.families import FAMILIES, make_drafter, target_model
from transformers import LlamaForCausalLM

from draftsmith.distill.objective import Objective
from draftsmith.distill.quantization import quantize
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.train.batch import Batch, collate
from draftsmith.train.progress import MemoryMeter
from draftsmith.train.quantized_target import agreement
from draftsmith.train.step import AgreementStep, Last

pytestmark = pytest.mark.gpu
OBJECTIVES = {
    "kl": Objective(),
    "kl, dpace": Objective(dpace=0.5),
    "accepted_length": Objective("accepted_length", draft_length=3),
    "lk_lambda": Objective("lk_lambda", temperatures=(1.0, 0.7)),
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
    """Weights that an objective reads first without gradient, as D-PACE does, still get one."""
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


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_a_quantized_target_agrees_with_itself(kind: str, device: torch.device) -> None:
    """In bf16, as float8 requires; random weights of this size overlap by more than 0.9 in int8 on the CPU."""
    pytest.importorskip("torchao")
    if kind == "float8" and (device.type != "cuda" or torch.cuda.get_device_capability() < (8, 9)):
        pytest.skip("no GPU that multiplies float8")
    whole, model = (target_model().to(torch.bfloat16).requires_grad_(False) for _ in range(2))
    quantize(model, kind, device)
    found = agreement(OnlineTeacher(model.to(device)), OnlineTeacher(whole.to(device)), [batch_on(device)])
    assert 0.8 < found.overlap < 1
