"""The device that these tests run on. `DRAFTSMITH_TEST_DEVICE=cpu` runs the same tests on the CPU."""

import os

import pytest
import torch
from gpu.families import target_model
from transformers import LlamaForCausalLM


@pytest.fixture(autouse=True)
def device() -> torch.device:
    """The GPU, with products in float32 that are not rounded to TF32; without one the test is skipped."""
    wanted = torch.device(os.environ.get("DRAFTSMITH_TEST_DEVICE", "cuda"))
    if wanted.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here; DRAFTSMITH_TEST_DEVICE=cpu runs this test on the CPU")
    torch.set_float32_matmul_precision("highest")
    return wanted


@pytest.fixture
def target(device: torch.device) -> LlamaForCausalLM:
    return target_model().to(device)
