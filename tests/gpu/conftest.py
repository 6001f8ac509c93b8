"""The device that these tests run on. `DRAFTSMITH_TEST_DEVICE=cpu` runs the same tests on the CPU.

`DRAFTSMITH_TEST_DEVICE=pretended` does, too, and fails where an operator would find tensors of two devices on a GPU.
"""

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from gpu.families import target_model
from transformers import LlamaForCausalLM
from two_places import two_places

UNWATCHED = {
    "compiled": "torch compiles nothing while operators are watched",
    "fused_kernels": "the place of a tensor that is made in a backward pass is not noted",
}
"""Parts of the names of tests, and why they do not run on the pretended device."""


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The GPU, with products in float32 that are not rounded to TF32; without one the test is skipped."""
    name = os.environ.get("DRAFTSMITH_TEST_DEVICE", "cuda")
    wanted = torch.device("cpu" if name == "pretended" else name)
    if wanted.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here; DRAFTSMITH_TEST_DEVICE=cpu runs this test on the CPU")
    reasons = [reason for part, reason in UNWATCHED.items() if part in request.node.name]
    if name == "pretended" and reasons:
        pytest.skip(reasons[0])
    torch.set_float32_matmul_precision("highest")
    with two_places() if name == "pretended" else nullcontext():
        yield wanted


@pytest.fixture
def target(device: torch.device) -> LlamaForCausalLM:
    return target_model().to(device)
