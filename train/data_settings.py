"""Settings of `draftsmith data preview` and `data regenerate`: keys of recipes with other defaults."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ValidationInfo, model_validator

from draftsmith.config import Section, Seed
from draftsmith.distill.data_section import SELF, DataSection, for_each_source, read_sources_option
from draftsmith.distill.target_section import TargetSection
from draftsmith.errors import ConfigError
from draftsmith.eval.settings import WRITTEN, check_drafters, require_cached_drafters
from draftsmith.names import (
    check_attention,
    check_prompts_name,
    check_target_name,
    check_template_name,
    require_cached_prompts,
    require_cached_without_hub,
)
from draftsmith.option_fields import Option, Options, assignments
from draftsmith.reading import parse_json

TARGET = Option("--target", required=True, check=check_target_name, hub=require_cached_without_hub)
PROMPTS = Option(
    argument=True,
    required=True,
    help="A file or folder (JSONL, JSON, Parquet, text), a Hub data set, 'self' (the target writes prompts), or a "
    "recipe's list of sources with shares.",
    parse=read_sources_option,
    check=for_each_source(check_prompts_name),
    hub=for_each_source(require_cached_prompts),
)
TEXTS: dict[str, Option | Options] = {
    "prompts": PROMPTS,
    "subset": Option(),
    "split": Option(),
    "count": Option(),
    "prompt_tokens": Option(),
    "response_tokens": Option(also=("--max-tokens",)),
    "chat_template": Option(check=check_template_name),
    "template_options": Option("--template-option", kind=list[str], parse=assignments),
}


def _json(text: str, key: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ConfigError(f'{key}={text} is not JSON ({error}); expected an object such as {{"top_k": 20}}') from error


SERVER = Options(
    url=Option("--server"),
    model=Option(),
    route=Option(),
    top_p=Option(),
    thinking=Option(),
    extra_body=Option(kind=str, parse=_json),
    concurrency=Option(),
    timeout_seconds=Option("--timeout"),
    failures=Option(),
)


class Preview(Section):
    """The samples that `draftsmith data preview` shows."""

    target: Annotated[TargetSection, Options(model=TARGET, trust_remote_code=Option())]
    data: Annotated[DataSection, Options(**TEXTS)] = DataSection(count=10_000, prompt_tokens=2048, response_tokens=8192)
    response: Literal["target", "text"] | None = None
    """'text' (the file's) or 'target' (only prompts); default: by the first row."""
    show: int = 3
    """Samples to print."""


class Regeneration(Section):
    """The responses that `draftsmith data regenerate` samples."""

    target: Annotated[TargetSection, Options("dtype", "attn_implementation", "trust_remote_code", model=TARGET)]
    data: Annotated[DataSection, Options("turns", "responses", "temperature", "batch_size", **TEXTS, server=SERVER)] = (
        DataSection(count=1_000_000, prompt_tokens=2048, response_tokens=1024)
    )
    out: Annotated[Path, WRITTEN]
    """JSONL file to write."""
    drafter: Annotated[str | None, Option(check=check_drafters, hub=require_cached_drafters)] = None
    """Speeds up sampling losslessly."""
    seed: Seed = 0
    """Seed of sampling."""

    @model_validator(mode="after")
    def _check_combinations(self, info: ValidationInfo) -> Self:
        data, target = self.data, self.target
        if data.responses > 1 and data.temperature == 0:
            raise ConfigError(
                f"--responses {data.responses} with --temperature 0, which gives the same text again; expected 1"
            )
        if any(source.prompts == SELF for source in data.sources):
            if data.server is not None:
                raise ConfigError(f"prompts={SELF} with --server; expected a file, which the command without it writes")
            if data.count == type(self).model_fields["data"].default.count:
                raise ConfigError(f"prompts={SELF} without --count; expected the number of prompts to write")
        if data.server is not None and self.drafter is not None:
            raise ConfigError(f"--drafter {self.drafter} with --server; expected one of the two")
        check_attention("--attn-implementation", target.attn_implementation, target.dtype)
        return self
