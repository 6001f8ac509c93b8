"""The run's teacher: the target in the loop, or its states from the cache, which is completed first."""

from accelerate import Accelerator
from datasets import Dataset
from torch import nn

from draftsmith.distill.signal_cache import CachedTeacher, SignalCache
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.heads.drafter import Drafter
from draftsmith.train.console import Console
from draftsmith.train.recipe import Recipe


def make_teacher(
    recipe: Recipe, target: nn.Module, drafter: Drafter, rows: Dataset, accelerator: Accelerator, console: Console
) -> OnlineTeacher | CachedTeacher:
    """Every process builds its share of the shards that are missing; the others wait for it."""
    online, settings = OnlineTeacher(target, drafter.needs.layers), recipe.teacher
    if settings.kind == "online":
        return online
    cache = SignalCache(target, rows, drafter.needs.layers, settings.dtype, shard_rows=settings.shard_rows)
    missing, problems = cache.missing()
    for problem in problems:
        console.say(problem)
    accelerator.wait_for_everyone()  # all have seen the same shards before the first one writes
    share = missing[accelerator.process_index :: accelerator.num_processes]
    if missing:
        with console.bar("teacher cache", len(share), 0) as advance, accelerator.autocast():
            cache.build(share, online, lambda: advance({}))
    accelerator.wait_for_everyone()
    console.say(
        f"teacher cache: {sum(cache.lengths)} tokens at {cache.bytes_a_token():.0f} bytes each in {cache.folder}; "
        f"{len(missing)} of {cache.shards} shards were built now"
    )
    return CachedTeacher(online, cache)
