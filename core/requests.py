"""What measurements, checks and forecasts are asked in common, looked at before anything is loaded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from draftsmith.decode.chance import require_seed
from draftsmith.decode.policies import check_policy
from draftsmith.decode.processors import Sampling
from draftsmith.decode.verify import rule_named
from draftsmith.distill.chat import template_text
from draftsmith.distill.targets import DTYPES, check_target_name
from draftsmith.errors import ConfigError
from draftsmith.heads.named import is_named, parse_named
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
