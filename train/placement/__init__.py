"""Where the frozen target's weights are stored while a run trains, samples, caches and evaluates.

plain      the whole target on the device of each process
offloaded  layers in host memory, each copied to the device while it computes (`target.offload`)
quantized  matrices with one byte a number (`target.quantization`)
sharded    a shard of each layer on each process (`target.sharded`)
"""

from accelerate import Accelerator

from draftsmith.train.placement.offloaded import Offloaded
from draftsmith.train.placement.plain import Plain
from draftsmith.train.placement.quantized import Quantized
from draftsmith.train.placement.sharded import Sharded
from draftsmith.train.recipe_sections import TargetSection


def placement_of(settings: TargetSection, accelerator: Accelerator) -> Plain:
    """Return the placement that the recipe's section `target` asks for, which names at most one."""
    if settings.offload:
        return Offloaded(accelerator)
    if settings.quantization is not None:
        return Quantized(accelerator, settings.quantization)
    if settings.sharded and accelerator.num_processes > 1:
        return Sharded(accelerator)
    return Plain(accelerator)
