"""The run's teacher: the target in the loop, its states from the cache, which is completed first, or a file."""

from contextlib import ExitStack

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from torch import nn

from draftsmith.distill.logprobs import LogprobTeacher, require_reads_text_alone
from draftsmith.distill.objectives import Objective
from draftsmith.distill.signal_cache import CachedTeacher, SignalCache
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS
from draftsmith.heads.drafter import Drafter
from draftsmith.locks import hold_cache
from draftsmith.train.console import Console
from draftsmith.train.launching import autocast
from draftsmith.train.placement import Placement
from draftsmith.train.recipe import Recipe
from draftsmith.train.step import Teacher


def check_teacher(recipe: Recipe) -> None:
    """ConfigError for a teacher that the rest of the recipe cannot be taught by, before anything is loaded."""
    settings = recipe.teacher
    if settings.kind != "logprobs":
        if settings.file is not None:
            raise ConfigError(f"teacher.file={settings.file} with teacher.kind={settings.kind!r}; expected 'logprobs'")
        return
    if settings.file is None:
        raise ConfigError("teacher.kind='logprobs' without teacher.file; expected a file of answers with logprobs")
    if recipe.cotrain is not None:
        raise ConfigError("teacher.kind='logprobs' with cotrain; expected 'online': the target changes")
    require_reads_text_alone(HEADS[recipe.drafter.type])
    Objective(**recipe.objective_options(draft_length=1)).require_usable(settings.kind)


def make_teacher(
    recipe: Recipe,
    target: nn.Module,
    drafter: Drafter,
    rows: Dataset,
    accelerator: Accelerator,
    placement: Placement,
    console: Console,
) -> Teacher:
    """Every process builds its share of the shards that are missing; the others wait for it."""
    if recipe.teacher.kind == "logprobs":
        require_reads_text_alone(drafter)
        return LogprobTeacher(target, rows)
    online, settings = OnlineTeacher(target, drafter.needs.layers), recipe.teacher
    if settings.kind == "online":
        return online
    cache = SignalCache(target, rows, drafter.needs.layers, settings.dtype, shard_rows=settings.shard_rows)
    with ExitStack() as held:
        missing, problems = cache.missing() if accelerator.is_main_process else ([], [])
        if missing:
            held.enter_context(hold_cache(cache.folder))
            missing, problems = cache.missing()  # another run may have built some since
        for problem in problems:
            console.say(problem)
        missing = broadcast_object_list([missing])[0]
        share = missing[accelerator.process_index :: accelerator.num_processes]
        if missing:
            with console.bar("teacher cache", len(share), 0) as advance, autocast(recipe, accelerator.device):
                cache.build(share, online, lambda: advance({}))
        placement.meet()
    console.say(
        f"teacher cache: {sum(cache.lengths)} tokens at {cache.bytes_a_token():.0f} bytes each in {cache.folder}; "
        f"{len(missing)} of {cache.shards} shards were built now"
    )
    return CachedTeacher(online, cache)
