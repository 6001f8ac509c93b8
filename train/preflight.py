"""Checks of this machine before any work: the files, packages and tools that a recipe names."""

from importlib.util import find_spec
from pathlib import Path

from draftsmith.distill.chat_template import template_text
from draftsmith.distill.conversation import EmptyConversation, conversation, require_most
from draftsmith.distill.data_section import SELF, require_client, sources_of
from draftsmith.distill.sources import read_source
from draftsmith.errors import ConfigError
from draftsmith.names import EMBEDDED, prompts_look_local
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
    recipe.require_paths()
    if recipe.target.quantization is not None:
        from draftsmith.distill.quantization import require_quantization

        require_quantization(recipe.target.quantization, recipe.target.dtype)
    if recipe.data.chat_template is not None:
        template_text(recipe.data.chat_template)
    for source in (*recipe.data.sources, *sources_of(recipe.evaluation.prompts)):
        if source.prompts not in (EMBEDDED, SELF):
            _require_readable(str(source.prompts), source.subset, source.split)


def _require_tracker(tracker: str) -> None:
    """Raise ConfigError when the tracker's package is not installed."""
    if tracker != "none" and find_spec(tracker) is None:
        raise ConfigError(f"tracker={tracker} is not installed; expected none, or: pip install '.[{tracker}]'")


def _require_compiler(recipe: Recipe) -> None:
    """Raise ConfigError where torch.compile would fail in the first step for want of a C++ compiler."""
    if recipe.train.compile and not has_cxx_compiler():
        raise ConfigError(
            "train.compile=True without a C++ compiler; expected one (g++ or CXX), or train.compile=false"
        )


def _require_readable(source: str, subset: str | None, split: str) -> None:
    """Read every row of a local file of prompts; data sets on the Hub are checked when they are downloaded."""
    if Path(source).expanduser().exists() or prompts_look_local(source):
        rows, faulty, last = 0, 0, None
        for place, row in read_source(source, subset, split):
            rows += 1
            try:
                conversation(place, row)
            except EmptyConversation:  # left out, and counted, when the data are read
                pass
            except ConfigError as error:
                faulty, last = faulty + 1, error
        require_most(rows, faulty, last)
