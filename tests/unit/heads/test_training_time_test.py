"""The training-time test against a naive version: every (query, step) reads its whole path anew, in fp64."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import make_llama, spread
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftsmith.heads import unrolled_attention
from draftsmith.heads.autoregressive import AutoregressiveDrafter, DraftNetwork
from draftsmith.heads.base import TeacherSignals
from draftsmith.heads.eagle import Hass
from draftsmith.heads.eagle3 import Eagle3, ParallelEagle
from draftsmith.heads.layers import windows_of
from draftsmith.heads.mtp import Mtp

T, STEPS = 7, 4
WINDOWS = {"eagle3, window of 3": 3, "eagle3, window of 2 in one layer": 2, "peagle, window of 3": 3}
EXACT = 1e-12
"""fp64; both sides add up the same few numbers in another order."""


def naive_attention(layer: int, q_BhTd: Tensor, k_BhTd: Tensor, v_BhTd: Tensor, window: int = T) -> Tensor:
    """Each query's full list of keys, its softmax written out."""
    groups = q_BhTd.shape[1] // k_BhTd.shape[1]
    rows = []
    for head in range(q_BhTd.shape[1]):
        keys, values = k_BhTd[0, head // groups], v_BhTd[0, head // groups]
        columns = []
        for query in range(q_BhTd.shape[2]):
            seen = range(max(0, query + 1 - window), query + 1)
            scores = torch.stack([q_BhTd[0, head, query] @ keys[i] for i in seen])
            weights = (scores / keys.shape[-1] ** 0.5 - scores.detach().max() / keys.shape[-1] ** 0.5).exp()
            columns.append(sum(weight * values[i] for weight, i in zip(weights, seen, strict=True)) / weights.sum())
        rows.append(torch.stack(columns))
    return torch.stack(rows)[None]


def naive_steps(
    body: DraftNetwork, ids_T: Tensor, features_TF: Tensor, mask_hidden: Tensor | None, mask_token: int
) -> dict:
    """Return the state of every (query i, step j), from a forward pass over the committed tokens and the path."""
    windows = windows_of(body.config)

    def attend(layer: int, q_BhTd: Tensor, k_BhTd: Tensor, v_BhTd: Tensor) -> Tensor:
        return naive_attention(layer, q_BhTd, k_BhTd, v_BhTd, windows[layer] or T)

    states = {}
    known_TH = body.project(features_TF)
    for i in range(T):
        path_states, path_tokens = list(known_TH[: i + 1]), ids_T[1 : i + 2].tolist()
        for j in range(STEPS):
            if i + j + 1 >= T:
                break
            if j > 0 and mask_hidden is None:
                path_states.append(states[i, j - 1])
                path_tokens.append(int(ids_T[i + j + 1]))
            elif j > 0:
                path_states.append(mask_hidden)
                path_tokens.append(mask_token)
            embeds = body.embed(torch.tensor([path_tokens]))
            rope = body.rotary(embeds, torch.arange(len(path_tokens))[None])
            states[i, j] = body.step(embeds, torch.stack(path_states)[None], rope, attend)[0, -1]
    return states


def drafters() -> dict[str, AutoregressiveDrafter | ParallelEagle]:
    target = make_llama(num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2).requires_grad_(False)
    torch.manual_seed(1)
    made = {
        "hass": Hass.from_target(target, train_steps=STEPS),
        "mtp": Mtp.from_target(target, train_steps=STEPS),
        "eagle3": Eagle3.from_target(target, train_steps=STEPS),
        "eagle3 of two layers": Eagle3.from_target(target, train_steps=STEPS, num_hidden_layers=2, fc_norm=True),
        "eagle3.1": Eagle3.from_target(target, train_steps=STEPS, norm_output=True, norm_before_fc=True),
        "eagle3 normed residual": Eagle3.from_target(target, train_steps=STEPS, norm_before_residual=True),
        "peagle": ParallelEagle.from_target(target, num_tokens=STEPS),
        "eagle3, window of 3": Eagle3.from_target(target, train_steps=STEPS),
        "eagle3, window of 2 in one layer": Eagle3.from_target(target, train_steps=STEPS, num_hidden_layers=2),
        "peagle, window of 3": ParallelEagle.from_target(target, num_tokens=STEPS),
    }
    for name, window in WINDOWS.items():
        body = made[name].body.config
        body.layer_types, body.sliding_window = (
            ["sliding_attention", "full_attention"][: body.num_hidden_layers],
            window,
        )
    target.double()
    for drafter in made.values():
        drafter.double().eval()
        for parameter in drafter.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return made


@pytest.mark.parametrize("name", drafters())
def test_states_and_gradients_are_those_of_the_full_paths(name: str) -> None:
    drafter = drafters()[name]
    torch.manual_seed(2)
    ids_1T = torch.randint(2, 64, (1, T))
    width = 32 * len(drafter.needs.layers)
    features = torch.randn(1, T, width, dtype=torch.float64, requires_grad=True)
    mask_1T = torch.ones(1, T, dtype=torch.bool)
    signals = TeacherSignals(ids_1T, torch.ones_like(ids_1T), features[..., :32], mask_1T, features)
    unrolled = drafter.unroll(signals)
    masks = getattr(drafter, "mask_hidden", None)
    naive = naive_steps(drafter.body, ids_1T[0], features[0], masks, getattr(drafter, "mask_token", 0))
    weights = {key: torch.randn(32, dtype=torch.float64) for key in naive}
    for (i, j), state_H in naive.items():
        assert torch.allclose(unrolled[j].states_ND[i], state_H, rtol=0, atol=EXACT), (i, j)
    inputs = [features, *(p for n, p in drafter.named_parameters() if "lm_head" not in n and n != "body.norm.weight")]
    ours = sum((weights[i, j] * unrolled[j].states_ND[i]).sum() for i, j in naive)
    theirs = sum((weights[key] * state_H).sum() for key, state_H in naive.items())
    pairs = zip(
        torch.autograd.grad(ours, inputs, allow_unused=True),
        torch.autograd.grad(theirs, inputs, allow_unused=True),
        strict=True,
    )
    for mine, other in pairs:
        assert (mine is None) == (other is None)
        assert mine is None or torch.allclose(mine, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["eagle3", "eagle3, window of 3", "peagle, window of 3"])
def test_attention_without_a_fused_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are attended in parts of `QUERIES`; states and gradients stay the same."""
    drafter = drafters()[name]
    ids_1T = torch.randint(2, 64, (1, 11))
    features = torch.randn(1, 11, 96, dtype=torch.float64)
    mask_1T = torch.ones(1, 11, dtype=torch.bool)

    def run() -> tuple[Tensor, Tensor]:
        signals = TeacherSignals(ids_1T, torch.ones_like(ids_1T), features[..., :32], mask_1T, features)
        total = sum(entry.states_ND.sin().sum() for entry in drafter.unroll(signals))
        (gradient,) = torch.autograd.grad(total, [drafter.body.fc.weight])
        return total, gradient

    whole = run()
    monkeypatch.setattr("draftsmith.heads.unrolled_attention._fused", lambda *_: False)
    for queries in (512, 4):
        monkeypatch.setattr("draftsmith.heads.unrolled_attention.QUERIES", queries)
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(whole, run(), strict=True))


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        result = operation(*arguments, **(options or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_a_kernel_that_does_not_agree_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU its signature is that of the installed torch: measured here with the kernel for the CPU."""
    arguments = (torch.device("cpu"), torch.float32, 8, 2)
    kernel_agrees = unrolled_attention._kernel_agrees.__wrapped__
    assert kernel_agrees(*arguments)

    def of_another_scale(q: Tensor, k: Tensor, v: Tensor, **_: bool) -> tuple[Tensor, Tensor]:
        out, lse = unrolled_attention._text_in_parts(2 * q, k, v, None)
        return out, lse

    def of_another_release(*_: Tensor, **__: bool) -> tuple[Tensor, Tensor]:
        raise RuntimeError("expected at most 3 arguments")

    for reason, kernel in (("differs", of_another_scale), ("at most 3 arguments", of_another_release)):
        monkeypatch.setattr(unrolled_attention, "_fused_text", kernel)
        with pytest.warns(UserWarning, match=reason):
            assert not kernel_agrees(*arguments)


def by_its_address(x: Tensor) -> Tensor:
    """Return the values that a kernel reads which takes `x` for contiguous."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset())


class FlashAttention2(TorchDispatchMode):
    """Lets the backward kernel read the log-sum-exp by its address, as torch's kernel for CUDA does."""

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        if operation is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            arguments = *arguments[:5], by_its_address(arguments[5]), *arguments[6:]
        return operation(*arguments, **(options or {}))


@pytest.mark.parametrize("name", ["hass", "mtp", "eagle3", "peagle"])
def test_gradients_of_rows_with_prompts_by_a_kernel_that_reads_no_strides(name: str) -> None:
    """Runs of a flat row are parts of its log-sum-exp."""
    drafter = drafters()[name]
    ids_BT = torch.randint(2, 64, (2, T))
    features = torch.randn(2, T, 32 * len(drafter.needs.layers), dtype=torch.float64)
    mask_BT = torch.arange(T).expand(2, T) > 2
    signals = TeacherSignals(ids_BT, torch.ones_like(ids_BT), features[..., :32], mask_BT, features)

    def gradients() -> Sequence[Tensor]:
        total = sum(entry.states_ND.sin().sum() for entry in drafter.unroll(signals))
        return torch.autograd.grad(total, [p for p in drafter.parameters() if p.requires_grad], allow_unused=True)

    expected = gradients()
    with FlashAttention2():
        found = gradients()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("window", "documents"), spread([None, 8], [1, 2]))
def test_memory_is_linear_in_the_length(window: int | None, documents: int) -> None:
    """Count saved elements and the largest tensor, of forward and backward pass, at two lengths."""
    drafter = drafters()["eagle3"].float()
    body = drafter.body.config
    body.layer_types, body.sliding_window = [f"{'full' if window is None else 'sliding'}_attention"], window

    def measure(length: int) -> tuple[int, int]:
        ids_1T = torch.zeros(1, length, dtype=torch.long)
        features = torch.randn(1, length, 96)
        documents_1T = torch.arange(length)[None] * documents // length
        signals = TeacherSignals(ids_1T, ids_1T + 1, features[..., :32], ids_1T == 0, features)
        signals = signals if documents == 1 else replace(signals, documents_BT=documents_1T)
        saved: list[int] = []
        with Largest() as largest:
            with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x):
                total = sum(entry.states_ND.sin().sum() for entry in drafter.unroll(signals))
            torch.autograd.grad(total, [drafter.body.fc.weight])
        return sum(saved), largest.elements

    (saved, largest), (longer_saved, longer_largest) = measure(1200), measure(2400)
    assert longer_saved < 2.1 * saved
    assert longer_largest < 2.1 * largest
    assert longer_largest < 1200 * 1200, "fewer than the scores of one document"
