"""The target on the device of each process, its matrices quantized."""

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from draftsmith.distill.quantization import quantize
from draftsmith.heads.hidden_states import layers_of
from draftsmith.train.placement.plain import Plain, move_the_rest


class Quantized(Plain):
    """The layers are loaded to host memory, and quantized one by one on the device."""

    def __init__(self, accelerator: Accelerator, kind: str) -> None:
        super().__init__(accelerator)
        self._kind = kind

    @property
    def load_to(self) -> torch.device:
        return torch.device("cpu")

    def place(self, model: PreTrainedModel) -> None:
        quantize(model, self._kind, self._device)
        move_the_rest(model, layers_of(model), self._device)
