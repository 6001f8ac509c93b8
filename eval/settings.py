"""What measurements, checks and forecasts are asked in common, looked at before anything is loaded.

What a run measures, and what its arms are called.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from draftsmith.decode.policies import check_policy
from draftsmith.decode.sampling import Sampling, require_seed
from draftsmith.decode.verification import rule_named
from draftsmith.distill.chat_template import template_text
from draftsmith.distill.load_target import DTYPES, check_target_name
from draftsmith.errors import ConfigError
from draftsmith.heads.checkpoint import is_named, parse_named
from draftsmith.storage import require_apart


class Request(Protocol):
    """The settings of `draftsmith eval`, `check` and `forecast` have these."""

    target: str
    drafters: dict[str, str]
    temperatures: tuple[float, ...]
    policies: tuple[str, ...]
    rule: str | None
    top_k: int | None
    top_p: float | None
    dtype: str
    chat_template: str | None
    seed: int


def require_valid(
    request: Request,
    counts: Mapping[str, Sequence[int | None]],
    repeatable: Mapping[str, Sequence[Any]],
    out: Path | None,
) -> None:
    """ConfigError for values out of range, twice the same, names of nothing, or an `out` in a folder that is read.

    Args:
        counts: by option, numbers of which each is at least 1, or None.
        repeatable: by option, values of which each may stand only once; temperatures need not be among them.
    """
    if not request.drafters:
        raise ConfigError("drafter is missing; expected at least one")
    for temperature in request.temperatures:
        Sampling(temperature, request.top_k, request.top_p)
    require_seed("seed", request.seed)
    for key, values in counts.items():
        for value in values:
            if value is not None and value < 1:
                raise ConfigError.of(key, value, ">= 1")
    for key, values in {"temperature": request.temperatures, **repeatable}.items():
        if len(set(values)) < len(values):
            raise ConfigError.of(key, list(values), "each only once")
    for policy in request.policies:
        check_policy(policy)
    if request.rule is not None:
        rule_named(request.rule)
    for drafter in request.drafters.values():
        if is_named(drafter):
            parse_named(drafter)
    for source in (request.target, *request.drafters.values()):
        if out is not None and Path(source).expanduser().is_dir():
            require_apart("out", out, Path(source), may_contain=True)
    if request.dtype not in DTYPES:
        raise ConfigError.of("dtype", request.dtype, f"one of {', '.join(DTYPES)}")
    if request.chat_template is not None:
        template_text(request.chat_template)
    check_target_name(request.target)


Variant = tuple[str, str]
"""A drafter's name and how its drafts grow."""
BASELINE: Variant = ("target alone", "")


@dataclass(frozen=True)
class Settings:
    """What a run measures; two runs with equal settings are the same measurement made again."""

    target: str
    drafters: dict[str, str]
    """Name in the table: folder or Hub id."""
    prompts: str
    subset: str | None = None
    """Configuration of a Hub data set."""
    split: str = "train"
    """Of a Hub data set."""
    count: int | None = None
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_new_tokens: int = 96
    draft_lengths: tuple[int, ...] = ()
    """Chains of these lengths (gamma), each measured with each drafter."""
    policies: tuple[str, ...] = ()
    """Other ways in which drafts grow. Without any, and without draft lengths, every drafter's own chain."""
    batch_sizes: tuple[int, ...] = (1,)
    """Prompts that are decoded together, in both arms."""
    rule: str | None = None
    """The verification rule of sampled decoding; without one, the best lossless for each draft."""
    top_k: int | None = None
    top_p: float | None = None
    repeats: int = 3
    seed: int = 0
    dtype: str = "float32"
    chat_template: str | None = None
    """A file with a chat template, or the name of a shipped one, instead of the tokenizer's."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """What the chat template is given beside the messages."""
