"""The target's matrices divided among the processes of a group, which compute together (tensor parallelism)."""

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from draftsmith.distill.regeneration import Share
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.distill.tensor_parallel import GroupTeacher, group_of, require_same_input
from draftsmith.train.placement.plain import Plain


class Divided(Plain):
    """A group samples, caches and evaluates as one: all its processes do the same, and its first one writes."""

    _group: dist.ProcessGroup
    """Set by `place`."""

    def __init__(self, accelerator: Accelerator, size: int) -> None:
        super().__init__(accelerator)
        self._size = size

    def place(self, model: PreTrainedModel) -> None:
        """Add a check of inputs; the target was loaded in parts."""
        self._group = group_of(model)
        model.base_model.register_forward_pre_hook(self._require_same_input, with_kwargs=True)

    @property
    def share(self) -> Share:
        group, place = divmod(self._accelerator.process_index, self._size)
        return Share(group, self._accelerator.num_processes // self._size, self.meet, writes=place == 0)

    def any(self, flag: bool) -> bool:
        count = torch.tensor(float(flag), device=self._device)
        dist.all_reduce(count, group=self._group)
        return bool(count)

    def teacher(self, online: OnlineTeacher) -> GroupTeacher:
        return GroupTeacher(online, self._group)

    def _require_same_input(self, _: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        read = arguments[0] if arguments else options.get("input_ids")
        require_same_input(options["inputs_embeds"] if read is None else read, self._group)
