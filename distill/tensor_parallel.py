"""Tensor-parallel targets: a group of processes holds the target's layers in parts and computes them together.

transformers shards each matrix as it is read, as the model's own plan says (arXiv:1909.08053), and experts as its
plan of expert parallelism says. Embeddings and lm_head, which drafters read, stay whole.
"""

from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.distill.teacher import Batch, OnlineTeacher
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.base import TeacherSignals
from draftsmith.heads.hidden_states import layer_lists
from draftsmith.heads.model_config import EXPERTS, layer_value

# Shapes: B sequences, T positions.

KEY = "target.tensor_parallel"
HEADS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
"""Numbers of heads in configs, each of which is divided among the processes."""
UNREADABLE = ("hrm_text",)
"""Families whose fused matrices transformers 5.23 divides before it splits them, so that their parts are wrong."""


def load_in_parts(
    auto: Any, source: str, config: PreTrainedConfig, size: int, options: dict[str, Any]
) -> PreTrainedModel:
    """Return this process's part of a target; all processes call it together, and every `size` of them are a group.

    Args:
        auto: the class that builds the target.
        options: other keyword arguments of `from_pretrained`.

    Raises:
        ConfigError: for a target that cannot be divided, mostly before its weights are read.
    """
    if not is_supported():
        raise ConfigError(f"{KEY}={size} with this version of transformers; expected transformers>=5.23")
    empty = whole_without_weights(auto, config, size, trust_remote_code=options["trust_remote_code"])
    model = auto.from_pretrained(source, distributed_config=_groups(empty, size), **options)
    del model.config.distributed_config  # drafters copy the config
    require_same_layers(model, empty)
    return model


def is_supported() -> bool:
    """Return whether this version of transformers can divide targets among groups of processes."""
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"dp_replicate_size", "ep_size"} <= {field.name for field in fields(DistributedConfig)}


def whole_without_weights(
    auto: Any, config: PreTrainedConfig, size: int, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Return the whole target on the meta device; ConfigError if it cannot be divided among `size` processes."""
    refusal, kind = f"{KEY}={size} with a target of model_type={config.model_type!r}", config.model_type
    if config.is_encoder_decoder or getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"{refusal}; expected a decoder-only model with floating-point weights")
    if kind in UNREADABLE:
        raise ConfigError(f"{refusal}: transformers divides its fused matrices wrongly; expected target.sharded")
    with torch.device("meta"):
        empty = auto.from_config(config, trust_remote_code=trust_remote_code)
    if not empty.tp_plan.keys() - _ends(empty).keys():
        raise ConfigError(f"{refusal}: {type(empty).__name__} has no tensor-parallel plan; expected target.sharded")
    text = config.get_text_config(decoder=True)
    for layer in range(text.num_hidden_layers):
        for name in HEADS + (EXPERTS if empty.ep_plan else ()):
            count = layer_value(text, name, layer)
            if isinstance(count, int) and count % size:
                raise ConfigError(f"{refusal}: its {name}={count}; expected a divisor of {count}")
    return empty


def _ends(model: PreTrainedModel) -> dict[str, str]:
    """Return the plan of embeddings and lm_head: they stay whole."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return {name: "replicate" for name, module in model.named_modules() if any(module is end for end in ends)}


def _groups(empty: PreTrainedModel, size: int) -> Any:
    """Return transformers' description of the groups."""
    from transformers.distributed.configuration_utils import DistributedConfig

    class Groups(DistributedConfig):
        """Several groups, each with the whole target, that exchange nothing: frozen weights have no gradients."""

        @property
        def dp_size(self) -> int:  # otherwise transformers would shard the weights over the groups too
            return 1

    return Groups(
        tp_size=size,
        tp_plan=_ends(empty),
        dp_replicate_size=dist.get_world_size() // size,
        ep_size=size if empty.ep_plan else 1,
    )


@torch.no_grad()
def require_same_layers(model: PreTrainedModel, empty: PreTrainedModel) -> None:
    """Check that each layer computes in parts what it computes as a whole on a short text; else ConfigError.

    Plans are data that transformers does not check against the model's code: a statistic over a divided dimension, as
    in Gemma 3n's sparse activations, is wrong without an error. One layer is whole at a time.

    Args:
        empty: the whole model on the meta device.
    """
    refusal = f"{KEY} with {type(model).__name__}"
    if not any(isinstance(weight, DTensor) for weight in model.parameters()):
        raise ConfigError(f"{refusal}: its plan divides nothing; expected target.sharded")
    empty.eval().set_attn_implementation(model.config._attn_implementation or "eager")
    lists = [(name, model.get_submodule(name)) for name in layer_lists(model)]
    names = {layer: f"{name}.{place}" for name, layers in lists for place, layer in layers.named_children()}
    wrong: list[str] = []

    def compare(layer: nn.Module, arguments: Any, options: dict[str, Any], output: Any) -> None:
        held = [*layer.named_parameters(), *layer.named_buffers()]
        weights = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in held}
        whole = functional_call(empty.get_submodule(names[layer]), weights, arguments, options)
        wanted, got = (value[0] if isinstance(value, tuple) else value for value in (whole, output))
        room = (1e-2 if got.dtype.itemsize == 2 else 1e-4) * wanted.abs().max()  # of sums in another order
        if not (got - wanted).abs().max() <= room:
            wrong.append(names[layer])

    handles = [layer.register_forward_hook(compare, with_kwargs=True) for layer in names]
    try:
        model(input_ids=torch.arange(1, 9, device=model.device)[None], use_cache=False)
    except Exception as error:  # any error of the model's code
        raise ConfigError(f"{refusal} fails ({reason_of(error)}); expected target.sharded") from error
    finally:
        for handle in handles:
            handle.remove()
    if wrong:
        raise ConfigError(
            f"{refusal}: {wrong[0]} does not compute in parts what it computes as a whole; expected target.sharded"
        )


def group_of(model: PreTrainedModel) -> dist.ProcessGroup:
    """Return the processes that compute a tensor-parallel model together."""
    shard = next(weight for weight in model.parameters() if isinstance(weight, DTensor))
    return shard.device_mesh.get_group()


def require_same_input(read: Tensor, group: dist.ProcessGroup) -> None:
    """Raise RuntimeError unless all processes of the group are about to read the same tensor."""
    values = read.detach().flatten().double()
    places = torch.arange(1, len(values) + 1, device=values.device, dtype=torch.float64)
    sums = torch.stack([values.new_tensor(float(len(values))), values.sum(), values @ places])
    bounds = torch.cat([sums, -sums])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    if not torch.equal(bounds[:3], -bounds[3:]):
        raise RuntimeError(f"{KEY}: the processes of a group are about to read different tokens")


class GroupTeacher:
    """The online teacher of a tensor-parallel target: the group reads the rows of each of its processes in turn.

    One process's rows are read at a time, so that a pass takes no more memory than with the whole target.
    """

    def __init__(self, teacher: OnlineTeacher, group: dist.ProcessGroup) -> None:
        self.model, self.lm_head = teacher.model, teacher.lm_head
        self._teacher, self._group = teacher, group

    def signals(self, batch: Batch) -> TeacherSignals:
        """Return the signals of this process's batch; all processes of the group must call it."""
        own, given = dist.get_rank(self._group), [batch.input_ids_BT, batch.attention_mask_BT, batch.mask_BT]
        packed = [] if batch.documents_BT is None else [batch.documents_BT]  # for all processes or for none
        text_SBT = torch.stack([part.long() for part in (*given, *packed)])
        kept: TeacherSignals | None = None
        for turn in range(dist.get_world_size(self._group)):
            shape = torch.tensor(text_SBT.shape, device=text_SBT.device)
            dist.broadcast(shape, group_src=turn, group=self._group)
            read_SBT = text_SBT if turn == own else text_SBT.new_empty(shape.tolist())
            dist.broadcast(read_SBT, group_src=turn, group=self._group)
            ids_BT, seen_BT, trained_BT, *documents = read_SBT
            documents_BT = documents[0] if documents else None
            signals = self._teacher.signals(Batch(ids_BT, seen_BT, trained_BT.bool(), documents_BT=documents_BT))
            kept = signals if turn == own else kept
        assert kept is not None, "every process has a turn"
        return kept
