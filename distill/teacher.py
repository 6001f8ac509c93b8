"""The online teacher: the target's final hidden states, from which p is computed chunk by chunk."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.errors import ConfigError
from draftsmith.heads.base import FINAL, TeacherSignals
from draftsmith.heads.flat_rows import is_measured, padded_reads, read_flat
from draftsmith.heads.hidden_states import (
    Features,
    ProcessorInputs,
    SequencesApart,
    document_numbers,
    final_states,
    sequences_apart,
)
from draftsmith.heads.lm_head import logits_head
from draftsmith.heads.model_config import has_data

NEAR = 0.1
"""Limit of the difference of states between two kernels in 16 bits, relative to their norm, as a median over tokens: at
most 0.045 for 36 random layers, and 0.15 to 1 where documents are not separated."""

# Shapes: B batch, T positions, H hidden size.


class TargetHead(Protocol):
    """The target's map from final states [N, H] to logits [N, V]."""

    @property
    def weight(self) -> Tensor:
        """[V, H]"""
        ...

    def __call__(self, states_NH: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Batch:
    """Padded texts. `mask_BT` marks positions whose next token is trained."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    mask_BT: Tensor
    source_BS: Tensor | None = None
    """Input of an encoder; the input ids are then the decoder's."""
    source_mask_BS: Tensor | None = None
    rows: Sequence[int] = ()
    """Indices of its rows in the data."""
    documents_BT: Tensor | None = None
    """For packed rows, the number of each position's document; see `TeacherSignals`."""
    inputs: Sequence[ProcessorInputs | None] = ()
    """The processor's tensors of each row, where one of them begins with images."""


class TargetOutside(Protocol):
    """The parts of a target outside of its layers, and the layers that a drafter reads, see `Needs.layers`."""

    model: PreTrainedModel
    lm_head: TargetHead
    layers: tuple[int, ...]


class OnlineTeacher:
    """Run the frozen target without its lm_head: H values a token instead of a row of logits.

    `layers`: layers whose outputs are returned as features, see `Needs.layers`.
    """

    def __init__(self, model: PreTrainedModel, layers: tuple[int, ...] = ()) -> None:
        self.model, self.layers = model, layers
        self._features = Features(model, layers) if layers else None
        self.lm_head = cast(TargetHead, logits_head(model))  # modules are typed loosely
        measure_flat_rows(model)

    def signals(self, batch: Batch, *, gradient: bool = False) -> TeacherSignals:
        """Return the target's signals for a batch; see `TeacherSignals` for mask, source and documents.

        `gradient`: keep the target's graph, since its adapters are trained with the drafter. Rows that begin with
        images are read one after another, as the processor's tensors cannot be joined in general.
        """
        if any(batch.inputs):
            return self._with_images(batch)
        text, source = (batch.input_ids_BT, batch.attention_mask_BT), (batch.source_BS, batch.source_mask_BS)
        apart = None if batch.source_BS is not None else sequences_apart(self.model, text[1], batch.documents_BT)
        with torch.set_grad_enabled(gradient):
            if apart is None:
                hidden_BTH = final_states(self.model, *text, *source, batch.documents_BT)
                features_BTF = None if self._features is None else self._features.take()
            else:
                hidden_BTH, features_BTF = self._apart(apart, batch.input_ids_BT)
        return TeacherSignals(*text, hidden_BTH, batch.mask_BT, features_BTF, *source, batch.documents_BT)

    def _apart(self, apart: SequencesApart, input_ids_BT: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return final states and features of texts that are read in several passes."""
        hidden: list[Tensor] = []
        features: list[Tensor] = []
        for ids_bT, seen_bT in apart.batches(input_ids_BT):
            hidden.append(final_states(self.model, ids_bT, seen_bT))
            if self._features is not None:
                features.append(self._features.take())
        return apart.rows(hidden), apart.rows(features) if features else None

    @torch.no_grad()
    def _with_images(self, batch: Batch) -> TeacherSignals:
        """Return the signals of rows read one after another; padding has states of zero."""
        hidden: list[Tensor] = []
        features: list[Tensor] = []
        text = (batch.input_ids_BT, batch.attention_mask_BT)
        for ids_T, kept_T, given in zip(*text, batch.inputs, strict=True):
            ids_1T = ids_T[None, : int(kept_T.sum())]
            hidden.append(final_states(self.model, ids_1T, torch.ones_like(ids_1T), inputs=given)[0])
            if self._features is not None:
                features.append(self._features.take()[0])
        width = text[0].shape[1]

        def padded(states: list[Tensor]) -> Tensor:
            rows = [nn.functional.pad(state_TX, (0, 0, 0, width - len(state_TX))) for state_TX in states]
            return torch.stack(rows)

        return TeacherSignals(*text, padded(hidden), batch.mask_BT, padded(features) if features else None)


@torch.no_grad()
def require_packable(model: PreTrainedModel, role: str = "target") -> None:
    """Check that `model` reads documents packed into one row as it reads them alone (`data.pack`); else ConfigError.

    transformers separates documents by positions that restart. Recurrent layers, ALiBi and some attention kernels do
    not, and no config says so; therefore two rows of two documents are compared with the documents alone.
    """
    refusal = f"data.pack=True with a {role} of model_type={model.config.model_type!r}"
    if model.config.is_encoder_decoder:
        raise ConfigError(f"{refusal}, an encoder-decoder; expected data.pack=false")
    if not has_data(model):
        return  # only its memory is estimated
    device, training = next(model.parameters()).device, model.training
    texts = [[1, 2, 3, 4, 5], [6, 7, 8, 9], [9, 8, 7], [6, 5, 4, 3, 2, 1]]  # two rows: some kernels only support one
    ids_BT = torch.tensor([texts[0] + texts[1], texts[2] + texts[3]], device=device)
    changed_BT = torch.tensor([[9, 9, 8, 8, 7, *texts[1]], [1, 2, 1, *texts[3]]], device=device)
    documents_BT = document_numbers([[5, 4], [3, 6]], 9).to(device)
    model.eval()
    try:
        with padded_reads(model):
            packed_BTH, other_BTH = (
                final_states(model, row_BT, torch.ones_like(ids_BT), documents_BT=documents_BT)
                for row_BT in (ids_BT, changed_BT)
            )
        texts_1T = [torch.tensor([text], device=device) for text in texts]
        alone_NH = torch.cat([final_states(model, text_1T, torch.ones_like(text_1T))[0] for text_1T in texts_1T])
    except (TypeError, ValueError) as error:
        reason = f"it does not accept position ids ({' '.join(str(error).split())})"
        raise ConfigError(f"{refusal}: {reason}; expected data.pack=false") from error
    finally:
        model.train(training)
    if not _separates(alone_NH, packed_BTH.flatten(0, 1), other_BTH.flatten(0, 1), documents_BT.flatten() > 0):
        raise ConfigError(f"{refusal}: it does not separate the documents of one row; expected data.pack=false")


def _separates(alone_NH: Tensor, packed_NH: Tensor, other_NH: Tensor, second_N: Tensor) -> bool:
    """Return whether packed documents have the states that they have alone.

    In 16 bits the kernels of the two round deep models differently. There it is enough that other tokens in the first
    documents of the rows (`other_NH`) leave the states of the second ones as they are, and that most of these are near
    those of the documents alone.
    """
    if _equal(packed_NH, alone_NH):
        return True
    if alone_NH.dtype.itemsize > 2:
        return False
    off_N = (packed_NH - alone_NH).float().norm(dim=-1) / alone_NH.float().norm(dim=-1)
    return bool(off_N[second_N].median() <= NEAR) and _equal(other_NH[second_N], packed_NH[second_N])


@torch.no_grad()
def measure_flat_rows(model: PreTrainedModel) -> None:
    """Let `model` read flat rows from now on, if its states are those of separate rows; measured once.

    Like `logits_map` it runs the model, so it is called while no engine has divided it.
    """
    if is_measured(model) or not has_data(model) or not read_flat(model):
        return
    device, training = next(model.parameters()).device, model.training
    ids_BT = torch.tensor([[1, 2, 3, 4, 0, 0], [5, 6, 7, 8, 9, 1], [9, 8, 7, 6, 0, 0], [2, 0, 0, 0, 0, 0]]).to(device)
    seen_BT = (ids_BT > 0).long()
    model.eval()
    try:
        with padded_reads(model):
            rows_NH = final_states(model, ids_BT, seen_BT)[seen_BT.bool()]
        # As documents, since a GPU reads no other rows flat.
        flat_NH = final_states(model, ids_BT, seen_BT, documents_BT=torch.zeros_like(ids_BT))[seen_BT.bool()]
        fits = _equal(flat_NH, rows_NH)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError):
        fits = False
    finally:
        model.train(training)
    read_flat(model, fits)


def _equal(states_NH: Tensor, expected_NH: Tensor) -> bool:
    """Return whether two computations gave the same states, up to rounding.

    Limit of the difference, relative to the largest number: 0.01 %, in 16 bits 1 %, since bf16 keeps 8 bits of each.
    """
    room = 1e-2 if expected_NH.dtype.itemsize == 2 else 1e-4
    return bool((states_NH - expected_NH).abs().max() <= room * expected_NH.abs().max())


def stored_layers(layers: tuple[int, ...]) -> tuple[int, ...]:
    """Return the layers that cached teachers store beside the final states."""
    return tuple(layer for layer in layers if layer != FINAL)
