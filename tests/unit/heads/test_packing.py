"""Packed rows: drafters, targets and objectives give the documents of a row the results of separate rows.

Whatever leaks over a border, or is trained beyond one, changes a sum or a gradient.
"""

from itertools import chain
from typing import Any

import pytest
import torch
from conftest import make_t5, spread
from datasets import Dataset
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from unit.heads.test_families import FAMILIES, make, target_model

from draftsmith.distill.objective import AgreementSums, Objective
from draftsmith.distill.teacher import OnlineTeacher, measure_flat_rows, require_packable
from draftsmith.errors import ConfigError
from draftsmith.heads.base import TeacherSignals, TrainableDrafter
from draftsmith.heads.flat_rows import flat_rows
from draftsmith.heads.hidden_states import document_numbers, document_positions, final_states
from draftsmith.heads.read_positions import ReadPositions
from draftsmith.train.step import collate

Document = tuple[int, list[list[int]]]
ROWS: list[list[Document]] = [
    [(7, [[3, 7]]), (2, [[1, 2]]), (9, [[1, 4], [6, 9]]), (1, [])],
    [(3, [[1, 3]]), (6, [[4, 6]]), (4, [[2, 3]])],
]
"""Length and trained spans of each document. Some are shorter than a draft, or trained from their border to the end."""
OBJECTIVES = {
    "kl": Objective(kind="kl", feature_weight=0.5),
    "accepted_length": Objective(kind="accepted_length"),
    "lk_lambda": Objective(kind="lk_lambda"),
}
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
"""fp64, but Llama's norms and rotary embeddings compute in fp32 (24 bits); a leak is thousands of times larger."""


def row_of(documents: list[Document], tokens: list[list[int]]) -> dict[str, Any]:
    spans, begin = [], 0
    for length, of_document in documents:
        spans += [[begin + start, begin + end] for start, end in of_document]
        begin += length
    lengths = [length for length, _ in documents]
    return {"input_ids": [token for text in tokens for token in text], "spans": spans, "documents": lengths}


def packed_and_apart(teacher: OnlineTeacher) -> tuple[TeacherSignals, TeacherSignals]:
    torch.manual_seed(7)
    tokens = [[torch.randint(2, 64, (length,)).tolist() for length, _ in row] for row in ROWS]
    packed = [row_of(*row) for row in zip(ROWS, tokens, strict=True)]
    texts = zip(chain(*ROWS), chain(*tokens), strict=True)
    apart = Dataset.from_list([row_of([document], [text]) for document, text in texts]).remove_columns("documents")
    ours, theirs = (
        teacher.signals(collate(rows, list(range(len(rows))), torch.device("cpu")))
        for rows in (Dataset.from_list(packed), apart)
    )
    assert theirs.documents_BT is None
    return ours, theirs


def sums_and_gradients(
    drafter: TrainableDrafter, signals: TeacherSignals, lm_head: torch.nn.Module, objective: Objective
) -> tuple[AgreementSums, dict[str, Tensor]]:
    drafter.zero_grad()
    unrolled = drafter.unroll(signals)
    sums = objective(unrolled, signals, lm_head, last_alpha=[0.4] * len(unrolled))
    sums.loss.backward()
    return sums, {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


def require_same(name: str, objective: Objective) -> None:
    target = target_model()
    drafter = make(name, target).double()
    target.double()
    teacher = OnlineTeacher(target, drafter.needs.layers)
    (ours, our_gradients), (theirs, their_gradients) = (
        sums_and_gradients(drafter, signals, teacher.lm_head, objective) for signals in packed_and_apart(teacher)
    )
    assert ours.count_K.tolist() == theirs.count_K.tolist()
    assert ours.match_K.tolist() == theirs.match_K.tolist()
    torch.testing.assert_close(ours.alpha_K, theirs.alpha_K, **CLOSE)
    torch.testing.assert_close(ours.loss, theirs.loss, **CLOSE)
    assert our_gradients.keys() == their_gradients.keys()
    for key, gradient in our_gradients.items():
        torch.testing.assert_close(gradient, their_gradients[key], **CLOSE, msg=lambda text, key=key: f"{key}: {text}")
    assert any(gradient.abs().max() > 1e-3 for gradient in our_gradients.values())


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "kl") for name in FAMILIES), *(("eagle3, 32 tokens", kind) for kind in OBJECTIVES)]
)
def test_a_packed_row_trains_as_its_documents_do(name: str, kind: str) -> None:
    """DFlash's random anchors are comparable because all positions are drawn: it has more anchors than a row tokens."""
    require_same(name, OBJECTIVES[kind])


@pytest.mark.parametrize("name", ["hass", "eagle3, 32 tokens", "mtp", "peagle"])
def test_long_rows_are_attended_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.heads.unrolled_attention._fused", lambda *_: False)
    monkeypatch.setattr("draftsmith.heads.unrolled_attention.QUERIES", 4)
    require_same(name, OBJECTIVES["kl"])


LONG = {"input_ids": [5, 9, 33, 2, 11, 9, 8, 23, 60], "spans": [[2, 9]]}
SHORT = {
    "two tokens": {"input_ids": [7, 30], "spans": [[1, 2]]},
    "three tokens": {"input_ids": [7, 30, 4], "spans": [[1, 3]]},
    "one token, nothing to learn": {"input_ids": [7], "spans": []},
    "two tokens, nothing to learn": {"input_ids": [7, 30], "spans": []},
}
"""Shorter than a draft: late draft positions train nothing."""
BATCHED = ("draft_model", "medusa", "eagle", "hass", "eagle3", "eagle3, 32 tokens", "mtp", "mtp of 3 modules", "peagle")


@pytest.mark.parametrize(("name", "row"), spread([*BATCHED, "dflash", "dspark"], SHORT))
def test_parts_of_a_batch_add_up(name: str, row: str) -> None:
    """A short and a long text in separate batches give the sums of one padded batch, at every draft position."""
    target = target_model()
    drafter = make(name, target).double()
    teacher = OnlineTeacher(target.double(), drafter.needs.layers)

    def trained(objective: Objective, *rows: dict[str, Any]) -> tuple[AgreementSums, dict[str, Tensor]]:
        batch = collate(Dataset.from_list([*rows]), [*range(len(rows))], torch.device("cpu"))
        return sums_and_gradients(drafter, teacher.signals(batch), teacher.lm_head, objective)

    for objective in OBJECTIVES.values():
        (short, of_short), (long, of_long) = trained(objective, SHORT[row]), trained(objective, LONG)
        both, of_both = trained(objective, SHORT[row], LONG)
        names = {name for name, weight in drafter.named_parameters() if weight.requires_grad}
        assert of_short.keys() == of_both.keys() == names, "no process may wait for a gradient"
        for key in ("loss", "alpha_K", "match_K", "count_K"):
            parts = [getattr(sums, key).double() for sums in (short, long, both)]
            torch.testing.assert_close(parts[0] + parts[1], parts[2], **CLOSE)
        for key, gradient in of_both.items():
            torch.testing.assert_close(of_short[key] + of_long[key], gradient, **CLOSE)
        assert all(count <= max(0, len(SHORT[row]["input_ids"]) - 1) for count in short.count_K.tolist())
        if not SHORT[row]["spans"]:
            assert not any(gradient.any() for gradient in of_short.values())


@pytest.mark.parametrize("name", ["hass", "eagle3", "mtp", "peagle", "dflash"])
def test_a_drafters_positions_restart(name: str) -> None:
    """Rotary embeddings scaled for long texts depend on absolute positions, so errors of positions change the sums."""
    target = target_model()
    drafter = make(name, target)
    signals, _ = packed_and_apart(OnlineTeacher(target, drafter.needs.layers))
    seen: list[Tensor] = []
    drafter.body.rotary.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1]))
    drafter.unroll(signals)
    positions_BT = document_positions(signals.documents_BT)
    if name == "dflash":
        assert torch.equal(seen[0], positions_BT)
        assert seen[1].max() < positions_BT.max() + drafter.block_size
        return
    read = ReadPositions(signals, len(seen))
    for k, at_step_1X in enumerate(seen):
        assert torch.equal(at_step_1X[0], positions_BT.flatten()[read.queries_N if k else read.first_X] + k)


def test_few_anchors_are_drawn_where_something_stands_before_them() -> None:
    """No anchor is the first token of a document, and a block ends with its document."""
    target = target_model()
    drafter = make("dflash", target)
    signals, _ = packed_and_apart(OnlineTeacher(target, drafter.needs.layers))
    drafter.anchors = 5
    positions_BT = document_positions(signals.documents_BT)
    documents_X = (signals.documents_BT + 100 * torch.arange(len(ROWS))[:, None]).flatten()
    for seed in range(20):
        torch.manual_seed(seed)
        first, *rest = drafter.unroll(signals)
        assert (positions_BT.flatten()[first.places_N[first.places_N >= 0]] > 0).all()
        for entry in rest:
            kept_N = entry.places_N >= 0
            assert torch.equal(documents_X[entry.places_N[kept_N]], documents_X[first.places_N[kept_N]])


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "max_position_embeddings": 16, "initializer_range": 0.2, "bos_token_id": 1}
SMALL |= {"eos_token_id": 1, "pad_token_id": 0}
PACKABLE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 16},
    "gemma2": {"head_dim": 8, "sliding_window": 3},
    "gemma3_text": {"head_dim": 8, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
}
LEAKING: dict[str, dict[str, Any]] = {
    "bloom": {"n_head": 4, "n_layer": 2},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "num_hidden_layers": 3},
}


def small(kind: str, options: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **options})).requires_grad_(False)


@pytest.mark.parametrize("kind", PACKABLE)
def test_targets_that_keep_documents_apart(kind: str) -> None:
    """In windows too, and with more padding than there are learned positions."""
    require_packable(small(kind, PACKABLE[kind]).bfloat16())
    model = small(kind, PACKABLE[kind])
    require_packable(model)
    assert model.training, "as it was, whatever dropout the probe had to leave out"
    ids_BT = torch.randint(2, 64, (2, 40))
    lengths = [[9, 1, 12], [16, 3]]
    documents_BT = document_numbers(lengths, 40)
    seen_BT = torch.tensor([[1] * sum(row) + [0] * (40 - sum(row)) for row in lengths])
    packed_BTH = final_states(model.eval(), ids_BT, seen_BT, documents_BT=documents_BT)
    for row, counts in enumerate(lengths):
        parts = [*counts, 40 - sum(counts)]
        *documents, _ = zip(ids_BT[row].split(parts), packed_BTH[row].split(parts), strict=True)
        for text_T, states_TH in documents:
            alone_1TH = final_states(model, text_T[None], torch.ones_like(text_T[None]))
            torch.testing.assert_close(states_TH, alone_1TH[0], rtol=1e-4, atol=1e-5)  # fp32, other kernels


DEEP: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 36, "head_dim": 8},
    "qwen3_moe": {
        "num_hidden_layers": 24,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}


@pytest.mark.parametrize("kind", DEEP)
def test_rounding_in_16_bits_is_not_taken_for_another_text(kind: str) -> None:
    """The states of deep models differ by several percent between two kernels."""
    model = small(kind, DEEP[kind]).bfloat16()
    require_packable(model)
    measure_flat_rows(model)
    row_1T = torch.ones(1, 3, dtype=torch.long)
    assert flat_rows(model, row_1T, 0 * row_1T) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.001, 0.06])
def test_a_small_part_of_another_document_is_not_taken_for_rounding(share: float, dtype: torch.dtype) -> None:
    """Each state contains a part of the row's first one: 6 % are less than the rounding of deep models may be."""
    model = small("llama", {}).to(dtype)
    model.model.norm.register_forward_hook(lambda norm, arguments, states_BTH: states_BTH + share * states_BTH[:, :1])
    if share < 0.01 and dtype != torch.float32:
        require_packable(model)
    else:
        with pytest.raises(ConfigError, match="does not separate the documents"):
            require_packable(model)


@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 0.01), (torch.bfloat16, 0.3)])
def test_positions_that_do_not_restart_are_refused(dtype: torch.dtype, step: float) -> None:
    """No document sees another one, but each state depends on its place in the row."""
    model = small("llama", {}).to(dtype)
    model.model.norm.register_forward_hook(
        lambda norm, arguments, states_BTH: (
            states_BTH + step * torch.arange(states_BTH.shape[1], dtype=dtype)[:, None] * torch.ones(32, dtype=dtype)
        )
    )
    with pytest.raises(ConfigError, match="does not separate the documents"):
        require_packable(model)


@pytest.mark.parametrize("kind", [*PACKABLE, *LEAKING])
def test_padding_changes_no_state(kind: str) -> None:
    """No token sees the padding on its right, in any family: states are those of each text alone."""
    model = small(kind, {**PACKABLE, **LEAKING}[kind]).eval()
    lengths = [13, 5, 9]
    ids_BT = torch.randint(2, 64, (3, 13))
    seen_BT = (torch.arange(13) < torch.tensor(lengths)[:, None]).long()
    padded_BTH = final_states(model, ids_BT * seen_BT, seen_BT)
    for row, length in enumerate(lengths):
        text_1T = ids_BT[row : row + 1, :length]
        alone_1TH = final_states(model, text_1T, torch.ones_like(text_1T))
        torch.testing.assert_close(padded_BTH[row, :length], alone_1TH[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", LEAKING)
def test_targets_that_do_not_are_refused(kind: str) -> None:
    message = rf"data\.pack=True with a target of model_type='{kind}': .*; expected data\.pack=false"
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ConfigError, match=message):
            require_packable(small(kind, LEAKING[kind]).to(dtype))


def test_encoder_decoders_are_refused() -> None:
    model = make_t5(2)
    with pytest.raises(ConfigError, match=r"model_type='t5', an encoder-decoder; expected data\.pack=false"):
        require_packable(model)
    ids_BT = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"data\.pack=True with an encoder-decoder"):
        final_states(model, ids_BT, ids_BT, ids_BT, documents_BT=torch.zeros_like(ids_BT))
