"""Checks of the machine before a run loads anything; a recipe's own values are checked when it is parsed."""

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from draftsmith.distill.chat_template import template_text
from draftsmith.distill.load_target import EMBEDDED, check_target_name
from draftsmith.distill.server.settings import require_client
from draftsmith.distill.sources import EmptyConversation, conversation, looks_local, read_source
from draftsmith.errors import ConfigError
from draftsmith.provenance import has_cxx_compiler
from draftsmith.train.recipe import Recipe


def preflight(recipe: Recipe, *, training: bool) -> None:
    """Check that this machine has the files, packages and tools that the recipe names.

    `training`: also what only the training loop uses, the tracker and a compiler.

    Raises:
        ConfigError: for a package or compiler that is missing, and for a missing or malformed file.
    """
    if training:
        _require_tracker(recipe.tracker)
        _require_compiler(recipe)
    if recipe.data.server is not None:
        require_client()
    check_target_name(recipe.target.model)
    if recipe.target.quantization is not None:
        from draftsmith.distill.quantization import require_quantization

        require_quantization(recipe.target.quantization, recipe.target.dtype)
    if recipe.data.chat_template is not None:
        template_text(recipe.data.chat_template)
    if recipe.teacher.kind == "files" and not Path(recipe.teacher.file or "").expanduser().is_dir():
        raise ConfigError.of("teacher.file", recipe.teacher.file, "a folder of hidden states")
    for source in (recipe.data.prompts if recipe.teacher.kind != "logprobs" else None, recipe.evaluation.prompts):
        if source is not None and source != EMBEDDED:
            _require_readable(source)


def require_divisible(recipe: Recipe, processes: int) -> None:
    """Raise ConfigError for a batch or processes that the recipe cannot divide evenly."""
    together = {
        "target.tensor_parallel": recipe.target.tensor_parallel,
        "train.sequence_parallel": recipe.train.sequence_parallel,
    }
    for key, size in together.items():
        if processes % size:
            raise ConfigError(f"{key}={size} with processes={processes}; expected a divisor of the number of processes")
    shares = processes // recipe.train.sequence_parallel
    parts = shares * recipe.train.gradient_accumulation
    if recipe.train.batch_size % parts:
        of = "" if shares == processes else f" / sequence_parallel={recipe.train.sequence_parallel}"
        raise ConfigError(
            f"train.batch_size={recipe.train.batch_size}; expected a multiple of {parts} = {processes} processes{of} x "
            f"gradient_accumulation={recipe.train.gradient_accumulation}"
        )


def _require_tracker(tracker: str) -> None:
    """Raise ConfigError when the tracker's package is not installed."""
    if tracker != "none" and find_spec(tracker) is None:
        raise ConfigError(f"tracker={tracker} is not installed; expected none, or: pip install 'draftsmith[{tracker}]'")


def _require_compiler(recipe: Recipe) -> None:
    """Raise ConfigError where torch.compile would fail in the first step for want of a C++ compiler."""
    if recipe.train.compile and not has_cxx_compiler():
        raise ConfigError(
            "train.compile=True without a C++ compiler; expected one (g++ or CXX), or train.compile=false"
        )


def _require_readable(source: str) -> None:
    """Read every row of a local file of prompts; data sets on the Hub are checked when they are downloaded."""
    if Path(source).expanduser().exists() or looks_local(source):
        for place, row in read_source(source):
            with suppress(EmptyConversation):  # left out, and counted, when the data are read
                conversation(place, row)
