"""Flat rows: states and gradients of each text read alone, and the operations of attention within texts."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from conftest import make_llama, make_t5
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel
from unit.heads.test_packing import LEAKING, PACKABLE, small

from draftsmith.distill.teacher import Batch, OnlineTeacher, measure_flat_rows
from draftsmith.heads.base import FINAL
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.flat_rows import NAME, flat_rows, padded_reads, read_flat, recompute_activations
from draftsmith.heads.hidden_states import document_numbers, final_states
from draftsmith.train.estimate.fake_run import Operations

LENGTHS = [[9, 1, 12], [16, 3], [12], [40]]
"""Of the documents of each row, some as long as others."""
WIDTH = 64
KINDS: dict[str, dict[str, Any]] = {
    **{kind: options for kind, options in PACKABLE.items() if kind != "gemma2"},
    "mistral": {"head_dim": 8, "sliding_window": 5},
    "starcoder2": {"sliding_window": None},
    "llama4_text": {  # chunks of 5 tokens, and queries that are scaled by position where nothing is rotated
        "attention_chunk_size": 5,
        "no_rope_layers": [1, 0],
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 64,
        "floor_scale": 4,
        "attn_scale": 1.0,
    },
}
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


class Float64(TorchFunctionMode):
    """Norms and rotary embeddings, which compute in float32, compute in float64."""

    def __torch_function__(self, function: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        if function is Tensor.float or (function is Tensor.to and torch.float32 in arguments):
            return arguments[0].double()
        out = function(*arguments, **(options or {}))
        return out.double() if isinstance(out, Tensor) and out.dtype == torch.float32 else out


def double(kind: str) -> PreTrainedModel:
    return small(kind, {"max_position_embeddings": 64, "n_positions": 64, **KINDS[kind]}).double().eval()


def batch(lengths: list[list[int]] = LENGTHS) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, attention mask and documents."""
    torch.manual_seed(1)
    seen_BT = torch.tensor([[1] * sum(row) + [0] * (WIDTH - sum(row)) for row in lengths])
    return torch.randint(2, 64, seen_BT.shape) * seen_BT, seen_BT, document_numbers(lengths, WIDTH)


def alone(model: PreTrainedModel, ids_BT: Tensor, lengths: list[list[int]]) -> list[Tensor]:
    """Return the final states [T, H] of each text, read by itself."""
    states = []
    with padded_reads(model):
        for ids_T, row in zip(ids_BT, lengths, strict=True):
            for end, length in zip(accumulate(row), row, strict=True):
                text_1T = ids_T[None, end - length : end]
                states.append(final_states(model, text_1T, torch.ones_like(text_1T))[0])
    return states


def gradients(model: PreTrainedModel, states_NH: Tensor) -> list[Tensor]:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    torch.manual_seed(2)
    loss = (states_NH * torch.randn_like(states_NH)).sum()
    return [gradient for gradient in torch.autograd.grad(loss, weights, allow_unused=True) if gradient is not None]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_have_the_states_and_gradients_of_each_alone(kind: str, packed: bool) -> None:
    """In windows that are shorter than the texts, too."""
    model = double(kind).requires_grad_()
    measure_flat_rows(model)
    lengths = LENGTHS if packed else [[sum(row)] for row in LENGTHS]
    ids_BT, seen_BT, documents_BT = batch(lengths)
    given = documents_BT if packed else None
    assert flat_rows(model, seen_BT, given) is not None
    with Float64():
        flat_BTH = final_states(model, ids_BT, seen_BT, documents_BT=given)
        wanted_NH = torch.cat(alone(model, ids_BT, lengths))
        torch.testing.assert_close(flat_BTH[seen_BT.bool()], wanted_NH, **CLOSE)
        for ours, theirs in zip(gradients(model, flat_BTH[seen_BT.bool()]), gradients(model, wanted_NH), strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE)
    assert not flat_BTH[seen_BT == 0].any()
    assert {config._attn_implementation for config in (model.config, model.base_model.config)} == {"sdpa"}


@pytest.mark.parametrize("packed", [True, False])
def test_features_are_in_rows(packed: bool) -> None:
    teacher = OnlineTeacher(double("llama"), (1, FINAL))
    ids_BT, seen_BT, documents_BT = batch()
    arguments = (ids_BT, seen_BT, seen_BT.bool(), None, None, (), documents_BT if packed else None)
    flat = teacher.signals(Batch(*arguments))
    with padded_reads(teacher.model):
        rows = teacher.signals(Batch(*arguments))
    kept_BT = seen_BT.bool()
    assert flat.features_BTF is not None
    assert rows.features_BTF is not None
    for ours, theirs in ((flat.hidden_BTH, rows.hidden_BTH), (flat.features_BTF, rows.features_BTF)):
        torch.testing.assert_close(ours[kept_BT], theirs[kept_BT], rtol=1e-5, atol=1e-6)  # norms compute in fp32


def test_padding_and_other_documents_cost_nothing() -> None:
    model = double("llama")
    measure_flat_rows(model)
    ids_BT, seen_BT, documents_BT = batch()
    with torch.no_grad():
        with Operations() as flat:
            final_states(model, ids_BT, seen_BT, documents_BT=documents_BT)
        with padded_reads(model), Operations() as dense:
            final_states(model, ids_BT, seen_BT, documents_BT=documents_BT)
    # 93 tokens, filled up to 128 positions, instead of 256; attention counts its texts only.
    assert flat.total < dense.total * 128 / 256
    assert flat_rows(model, torch.ones(2, 50), None) is None, "without padding there is nothing to leave out"


def test_models_that_read_rows() -> None:
    """Soft caps, position biases, recurrent layers, encoders; and attention that does not do what it should."""
    others = [small(kind, LEAKING[kind]) for kind in ("bloom", "recurrent_gemma")]
    for model in (make_t5(2), small("gemma2", PACKABLE["gemma2"]), *others):
        before = model.training
        measure_flat_rows(model)
        assert flat_rows(model, torch.tensor([[1] * 200, [1] + [0] * 199]), None) is None
        assert model.training == before


@pytest.mark.parametrize("error", [None, ValueError("no such layer")])
def test_attention_that_fails_the_measurement_is_not_used(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = AttentionInterface._global_mapping[NAME]

    def wrong(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        if error is not None:
            raise error
        return own(*args, **kwargs)[0] * 1.1, None

    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, wrong)
    model = make_llama().train()
    measure_flat_rows(model)
    assert model.training
    assert flat_rows(model, *batch()[1:]) is None
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("special", ["position_bias", "softcap", "s_aux", "is_causal"])
def test_layers_with_more_than_causal_softmax_are_refused(special: str) -> None:
    model = make_llama()
    read_flat(model)
    flat = flat_rows(model, *batch()[1:])
    assert flat is not None
    states = torch.randn(1, 2, flat.width, 8)
    attend, module = AttentionInterface._global_mapping[NAME], torch.nn.Module()
    value = False if special == "is_causal" else torch.zeros(1)
    with flat.reading():
        attend(module, states, states, states, None, is_causal=True, softcap=None)
        with pytest.raises(ValueError, match="more than a causal softmax"):
            attend(module, states, states, states, None, **{special: value})
        with pytest.raises(ValueError, match="other positions"):
            attend(module, states, states[:, :, 1:], states[:, :, 1:], None)


def test_recomputed_layers_know_the_flat_row() -> None:
    """The backward pass repeats a layer when the flat row has been read."""
    plain, drafter = double("llama").requires_grad_(), DraftModel(double("llama").requires_grad_())
    for model in (plain, drafter.model):
        measure_flat_rows(model)
    recompute_activations(drafter.trained_blocks())
    ids_BT, seen_BT, documents_BT = batch()
    ours, theirs = (
        gradients(model, final_states(model, ids_BT, seen_BT, documents_BT=documents_BT))
        for model in (drafter.model, plain)
    )
    for gradient, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(gradient, wanted)
