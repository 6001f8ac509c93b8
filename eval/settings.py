"""Settings that `draftsmith eval`, `check`, `forecast` and `generate` share, and their validation before loading."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.decode.policies import check_policy
from draftsmith.decode.sampling import Sampling, require_seed
from draftsmith.decode.verification import rule_named
from draftsmith.distill.chat_template import template_text
from draftsmith.distill.load_target import DTYPES, check_attention
from draftsmith.errors import ConfigError
from draftsmith.heads.configs import is_named, parse_named
from draftsmith.names import EMBEDDED, check_target_name
from draftsmith.storage import require_apart

Variant = tuple[str, str]
"""A drafter's name and its policy."""
BASELINE: Variant = ("target alone", "")


@dataclass(frozen=True)
class PairSettings:
    """A target, its drafters, the prompts, and how they are decoded."""

    target: str
    drafters: dict[str, str]
    """Name in tables: folder, Hub id or the name of an untrained drafter."""
    prompts: str = EMBEDDED
    count: int | None = None
    """The highest number of prompts."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    policies: tuple[str, ...] = ()
    """How drafts grow, for every drafter or, as NAME=POLICY, for one; a drafter without any has its default policy."""
    rule: str | None = None
    """The verification rule of sampled decoding; None: the best lossless rule for each draft."""
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    dtype: str = "float32"
    attn_implementation: str | None = None
    """The target's attention; None: what transformers chooses."""
    compile: bool = False
    """Compile the passes of the target and of the drafters; see `SpeculativeDecoder`."""
    chat_template: str | None = None
    """A file with a chat template, or the name of a shipped one, instead of the tokenizer's."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template in addition to the messages."""
    images: str | None = None
    """Folder of the images that prompts name; None: the folder of their file."""

    def policies_of(self, drafter: str) -> tuple[str, ...]:
        """Return the policies of the drafter with this name."""
        named = [self._named(policy) for policy in self.policies]
        return tuple(policy for name, policy in named if name in ("", drafter))

    def _named(self, policy: str) -> Variant:
        """Return the name before a policy, empty for a policy of all drafters, and the policy."""
        name, _, own = policy.partition("=")
        return (name, own) if name in self.drafters else ("", policy)


@dataclass(frozen=True)
class Settings(PairSettings):
    """Settings of a measurement; runs with equal settings can be continued and compared."""

    subset: str | None = None
    """Configuration of a Hub data set."""
    split: str = "train"
    """Split of a Hub data set."""
    max_new_tokens: int = 96
    draft_lengths: tuple[int, ...] = ()
    """Chains of these lengths (gamma), each measured with each drafter, in addition to `policies`."""
    batch_sizes: tuple[int, ...] = (1,)
    """Prompts that are decoded together, with and without a drafter."""
    repeats: int = 3


def require_valid(
    settings: PairSettings,
    *,
    counts: Mapping[str, Sequence[int | None]],
    unique: Mapping[str, Sequence[Any]] | None = None,
    out: Path | None = None,
) -> None:
    """Raise ConfigError for values out of range, repeated values, unknown names, or an `out` inside an input folder.

    Args:
        counts: by option, numbers that have to be at least 1, or None.
        unique: by option, values of which each may be given once; temperatures are always among them.
    """
    for temperature in settings.temperatures:
        Sampling(temperature, settings.top_k, settings.top_p)
    require_seed("seed", settings.seed)
    for key, values in counts.items():
        for value in values:
            if value is not None and value < 1:
                raise ConfigError.of(key, value, ">= 1")
    for key, values in {"temperature": settings.temperatures, **(unique or {})}.items():
        if len(set(values)) < len(values):
            raise ConfigError.of(key, list(values), "each only once")
    for drafter in settings.drafters:
        for policy in settings.policies_of(drafter):
            check_policy(policy)
    if settings.rule is not None:
        rule_named(settings.rule)
    for drafter in settings.drafters.values():
        if is_named(drafter):
            parse_named(drafter)
    for source in (settings.target, *settings.drafters.values()):
        if out is not None and Path(source).expanduser().is_dir():
            require_apart("out", out, Path(source), may_contain=True)
    if settings.dtype not in DTYPES:
        raise ConfigError.of("dtype", settings.dtype, f"one of {', '.join(DTYPES)}")
    check_attention("attn_implementation", settings.attn_implementation, settings.dtype)
    if settings.images is not None and not Path(settings.images).is_dir():
        raise ConfigError.of("images", settings.images, "a folder")
    if settings.chat_template is not None:
        template_text(settings.chat_template)
    check_target_name(settings.target)
