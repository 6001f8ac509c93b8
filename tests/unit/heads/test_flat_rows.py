"""Flat rows: states and gradients of each text read alone, and the operations of attention within texts."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from conftest import make_llama
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, PreTrainedModel, T5Config, T5ForConditionalGeneration
from unit.heads.test_packing import LEAKING, PACKABLE, small

from draftsmith.distill.teacher import Batch, OnlineTeacher, measure_flat_rows
from draftsmith.heads.base import FINAL
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.flat_rows import MULTIPLE, NAME, flat_rows, read_flat, reading_rows, recompute_activations
from draftsmith.heads.hidden_states import document_numbers, final_states
from draftsmith.train.bootstrap import compile_drafter
from draftsmith.train.fake_run import Operations

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
    with reading_rows(model):
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
    with reading_rows(teacher.model):
        rows = teacher.signals(Batch(*arguments))
    kept_BT = seen_BT.bool()
    assert flat.features_BTF is not None
    assert rows.features_BTF is not None
    for ours, theirs in ((flat.hidden_BTH, rows.hidden_BTH), (flat.features_BTF, rows.features_BTF)):
        torch.testing.assert_close(ours[kept_BT], theirs[kept_BT], rtol=1e-5, atol=1e-6)  # norms compute in fp32


class Pairs(TorchFunctionMode):
    """Counts pairs of queries and keys, over all rows and heads, and the calls; records whether heads are expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.calls, self.heads = 0, 0, set()

    def __torch_function__(self, function: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        if function is scaled_dot_product_attention:
            query, key = arguments[:2]
            self.count += query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
            self.calls += 1
            self.heads.add(key.shape[1])
        return function(*arguments, **(options or {}))


def test_attention_is_the_sum_over_documents() -> None:
    model = double("llama")
    measure_flat_rows(model)
    ids_BT, seen_BT, documents_BT = batch()
    documents = [length for row in LENGTHS for length in row]
    with torch.no_grad():
        for given, lengths in ((documents_BT, documents), (None, [sum(row) for row in LENGTHS])):
            with Pairs() as pairs:
                final_states(model, ids_BT, seen_BT, documents_BT=given)
            layers, heads = 2, 4
            assert pairs.count == layers * heads * sum(length**2 for length in lengths)
            assert pairs.calls == layers * len(set(lengths)), "texts of equal length are attended in one call"
            assert pairs.heads == {2}, "shared key heads are not expanded"
        with Operations() as flat:
            final_states(model, ids_BT, seen_BT, documents_BT=documents_BT)
        with reading_rows(model), Operations() as dense:
            final_states(model, ids_BT, seen_BT, documents_BT=documents_BT)
    # 93 tokens, filled up to 128 positions, instead of 256; attention counts its texts only.
    assert flat.total < dense.total * 128 / 256


class AttentionGradients(TorchDispatchMode):
    """Records the dtypes in which gradients of attention are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        if operation is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            self.dtypes.add(arguments[0].dtype)
        return operation(*arguments, **(options or {}))


def test_gradients_in_bf16_are_computed_in_float32_on_a_cpu() -> None:
    """The kernel for bf16 takes longer, and memory for each length."""
    model = make_llama().requires_grad_(True)
    ids_BT, seen_BT, _ = batch()
    measure_flat_rows(model)
    exact = gradients(model, final_states(model, ids_BT, seen_BT)[seen_BT.bool()])
    with torch.autocast("cpu", torch.bfloat16):
        states_NH = final_states(model, ids_BT, seen_BT)[seen_BT.bool()]
    with AttentionGradients() as used:
        found = gradients(model, states_NH)
    assert used.dtypes == {torch.float32}
    for one, other in zip(found, exact, strict=True):
        assert (one - other).norm() < 0.05 * other.norm()


def test_what_is_read_flat() -> None:
    model = double("llama")
    ids_BT, seen_BT, documents_BT = batch()
    assert flat_rows(model, seen_BT, documents_BT) is None, "not measured"
    measure_flat_rows(model)
    flat = flat_rows(model, seen_BT, documents_BT)
    assert flat is not None
    assert flat.groups == [(40, 1), (16, 1), (12, 2), (9, 1), (3, 1), (1, 1)]
    assert (flat.width, flat.width % MULTIPLE) == (128, 0)
    inputs = flat.arguments(ids_BT)
    assert inputs["position_ids"][0, :60].tolist() == [*range(40), *range(16), *range(4)]
    assert not inputs["position_ids"][0, 93:].any(), "padding needs no more learned positions than the texts"
    assert flat_rows(model, torch.ones(2, 50), None) is None, "without padding there is nothing to leave out"
    assert flat_rows(model, torch.tensor([[1] * 50, [1] * 20 + [0] * 30]), None) is None, "nor less than filling"
    full = flat_rows(model, torch.ones(2, 50), torch.zeros(2, 50, dtype=torch.long))
    assert full is not None
    assert full.width == 100, "packed rows are not filled beyond their own size"
    assert flat_rows(model, seen_BT.to("meta"), None) is None, "padded rows are read flat on a CPU only"


def test_models_that_read_rows() -> None:
    """Soft caps, position biases, recurrent layers, encoders; and attention that does not do what it should."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=64, **sizes, decoder_start_token_id=0))
    others = [small(kind, LEAKING[kind]) for kind in ("bloom", "recurrent_gemma")]
    for model in (t5, small("gemma2", PACKABLE["gemma2"]), *others):
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


def test_compiled_draft_models_read_rows() -> None:
    """They would be compiled again for each combination of lengths."""
    drafter = DraftModel(make_llama())
    measure_flat_rows(drafter.model)
    compile_drafter(drafter)
    measure_flat_rows(drafter.model)
    assert flat_rows(drafter.model, *batch()[1:]) is None
