"""Packed weights: the same products, in the layers that gain, and a model that is otherwise unchanged."""

import copy
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_llama
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.passes.packed_weights import LEAST, PackedLinear, pack_weights
from draftsmith.eval.session import load_session
from draftsmith.eval.settings import PairSettings
from draftsmith.heads import DraftModel
from draftsmith.heads.retrieval import Hybrid

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available(),
    reason="oneDNN on x86",
)
WIDTH = 512
SIZES: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "initializer_range": 0.05}


class Other(nn.Linear):
    """A linear layer of another kind, as adapters and quantization have."""


def layers() -> Any:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "plain": nn.Linear(WIDTH, WIDTH, bias=False),
            "bias": nn.Linear(WIDTH, 2 * WIDTH),
            "small": nn.Linear(WIDTH, LEAST // WIDTH - 1),
            "other": Other(WIDTH, WIDTH),
            "in_bfloat16": nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16),
        }
    )


def product(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return layer(x)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 17), (2, 300)], ids=str)
def test_products_are_those_of_linear_layers(shape: tuple[int, int]) -> None:
    plain, packed = layers(), layers()
    names = {name: value.data_ptr() for name, value in packed.state_dict(keep_vars=True).items()}
    assert pack_weights(packed) == 4 * (WIDTH * WIDTH + 2 * WIDTH * WIDTH)
    assert [name for name, layer in packed.items() if isinstance(layer, PackedLinear)] == ["plain", "bias"]
    assert {name: value.data_ptr() for name, value in packed.state_dict(keep_vars=True).items()} == names
    assert pack_weights(packed) == 0, "once"
    x = torch.randn(*shape, WIDTH)
    for name in ("plain", "bias"):
        torch.testing.assert_close(product(packed[name], x), product(plain[name], x), rtol=1e-4, atol=1e-5)
    # The layer in use is the packed one: it follows no later change.
    with torch.no_grad():
        packed["plain"].weight.zero_()
    torch.testing.assert_close(product(packed["plain"], x), product(plain["plain"], x), rtol=1e-4, atol=1e-5)


def test_gradients_copies_and_casts_compute_with_the_weight_itself() -> None:
    packed = layers()
    pack_weights(packed)
    x = torch.randn(4, WIDTH)
    packed["bias"](x).sum().backward()
    torch.testing.assert_close(packed["bias"].weight.grad, x.sum(0).expand(2 * WIDTH, WIDTH))
    for changed in (copy.deepcopy(packed["bias"]), packed["bias"]):
        changed.double()
        with torch.no_grad():
            changed.weight.fill_(1.0)
            changed.bias.zero_()
        torch.testing.assert_close(product(changed, x.double()), x.double().sum(1, keepdim=True).expand(4, 2 * WIDTH))
    whole = copy.deepcopy(packed["plain"])
    with torch.no_grad():
        whole.weight.fill_(1.0)
    torch.testing.assert_close(product(whole, x), x.sum(1, keepdim=True).expand(4, WIDTH), rtol=1e-4, atol=1e-4)


def test_too_little_memory_for_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    few = type("Memory", (), {"available": 2 * 4 * 3 * WIDTH * WIDTH - 1})
    monkeypatch.setattr("psutil.virtual_memory", lambda: few)
    packed = layers()
    assert pack_weights(packed) == 0
    assert not any(isinstance(layer, PackedLinear) for layer in packed.values())


def test_a_session_packs_what_it_decodes_with(tmp_path: Path, tiny_target_folder: Path) -> None:
    """Greedy texts are those of transformers; passes of one shape, and compiled ones, keep the layers."""
    vocab = AutoConfig.from_pretrained(tiny_target_folder).vocab_size
    target: Any = make_llama(vocab_size=vocab, **SIZES)
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_folder)
    for model, name in ((target, "target"), (DraftModel.from_target(target, num_hidden_layers=1).model, "drafter")):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    named = {"own": str(tmp_path / "drafter"), "hybrid": f"hybrid:drafter={tmp_path / 'drafter'}"}
    settings = PairSettings(target=str(tmp_path / "target"), drafters=named)
    session = load_session(settings, None, progress=False)
    hybrid = session.drafters["hybrid"]
    assert isinstance(hybrid, Hybrid)
    for model in (session.target, session.drafters["own"], hybrid.drafter):
        assert sum(isinstance(module, PackedLinear) for module in model.modules()) >= 7
    prompt = [3, 5, 2]
    expected = target.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    for drafter in (None, *session.drafters.values()):
        made = SpeculativeDecoder(session.target, drafter).generate(prompt, max_new_tokens=24, eos_token_id=None)
        assert made.tokens == expected[0, len(prompt) :].tolist()
    for kept in ("invariant", "compile"):
        session = load_session(settings.model_copy(update={kept: True}), None, progress=False)
        assert not any(isinstance(module, PackedLinear) for module in session.target.modules())
