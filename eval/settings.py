"""Settings of `eval`, `check`, `forecast`, `generate` and the demo: their options, and what Python callers pass."""

import difflib
import os.path
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from draftsmith.config import Count, Distinct, Probability, Section, Seed, Temperature, TemplateVariables, user_name
from draftsmith.decode.policies import POLICIES, check_policy
from draftsmith.distill.data_section import ServerSection, is_address, require_address, server_section
from draftsmith.distill.target_section import TargetSection
from draftsmith.errors import REMOVED, ConfigError, removed
from draftsmith.heads.configs import SETTINGS, is_named, parse_named
from draftsmith.names import (
    EMBEDDED,
    check_attention,
    check_drafter_name,
    check_prompts_name,
    check_target_name,
    check_template_name,
    drafter_of,
    require_cached_prompts,
    require_cached_without_hub,
)
from draftsmith.option_fields import Option, assignments, only
from draftsmith.provenance import first_difference
from draftsmith.reading import specified_name
from draftsmith.storage import require_writable_file

Arm = tuple[str, str]
"""A drafter's name and its policy."""
BASELINE: Arm = ("target alone", "")
if TYPE_CHECKING:
    from draftsmith.decode.sampling import Sampling


def _require_kept(rule: object) -> object:
    """Raise ConfigError for a rule of earlier versions."""
    if f"rule={rule}" in REMOVED:
        raise removed(f"rule={rule}")
    return rule


RuleName = Annotated[Literal["token", "block", "point-mass", "typical"], BeforeValidator(_require_kept)]
"""The keys of `decode.rules.RULES`, which is not imported: settings are checked before torch is."""
Dtype = Literal["float32", "bfloat16", "float16"]
DistinctCounts = Annotated[tuple[Count, ...], Distinct]
UNSTORED = Field(exclude=True)
"""Of settings that results do not depend on: they are not stored with them."""


def named_drafters(drafters: str | list[str], key: str = "--drafter") -> dict[str, str]:
    """Return `name=folder` entries as a dict; a plain `folder` is named after its last part.

    Raises:
        ConfigError: for a repeated name, and for a local folder that does not exist.
    """
    named: dict[str, str] = {}
    for entry in map(os.path.expanduser, [drafters] if isinstance(drafters, str) else drafters):
        name, equals, folder = entry.partition("=")
        # suffix:min_match=3 is a drafter with a setting, runs/lr=0.1/drafter a folder: neither gives a name.
        if not equals or ":" in name or Path(entry).is_dir():
            parts = [part for part in Path(entry).parts if part not in ("drafter", "/")]
            name, folder = (specified_name(entry) if is_named(entry) else parts[-1] if parts else entry), entry
        if name in named:
            raise ConfigError(f"{key}={entry}: the name {name!r} is taken; expected name=folder with another name")
        if not is_named(folder):
            check_drafter_name(folder, key)
        named[name] = os.path.expanduser(drafter_of(folder))
    return named


def _trained(drafters: str | Mapping[str, str]) -> list[str]:
    """Return the folders and Hub ids among drafters, and those inside hybrid drafters."""
    every = [drafters] if isinstance(drafters, str) else drafters.values()
    inside = [parse_named(one)[1].get("drafter") if is_named(one) else one for one in every]
    return [one for one in inside if one is not None and not is_named(one) and not is_address(one)]


def check_drafters(drafters: str | Mapping[str, str], key: str) -> None:
    """Raise ConfigError for a folder that does not exist, and for a name that is nearly that of a named drafter."""
    for one in _trained(drafters):
        close = [] if Path(one).exists() else difflib.get_close_matches(specified_name(one), SETTINGS, 1)
        if close:
            raise ConfigError(f"{key}={one}; did you mean {close[0]}?")
        check_drafter_name(one, key)


def require_cached_drafters(drafters: str | Mapping[str, str], key: str) -> None:
    """Raise ConfigError where the Hub cannot be reached and its cache lacks a drafter."""
    for one in _trained(drafters):
        require_cached_without_hub(one, key)


def _check_folder(name: str, key: str) -> None:
    if not Path(name).is_dir():
        raise ConfigError(f"{key}={name}; expected a folder, and there is none")


def _check_file(file: Path, key: str) -> None:
    if not file.expanduser().is_file():
        raise ConfigError(f"{key}={file}; expected a file, and there is none")


def _check_files(files: Sequence[str], key: str) -> None:
    for file in files:
        _check_file(Path(file), key)


def _check_address(address: str, key: str) -> None:
    require_address(key, address)


def _drafter(kind: Any, help: str) -> Option:
    check, hub = check_drafters, require_cached_drafters
    return Option("--drafter", kind=kind, parse=named_drafters, help=help, check=check, hub=hub)


POLICY_HELP = f"Draft policy: {', '.join(POLICIES)}, with settings as in best-first:size=16,depth=8."
WRITTEN = Option(check=lambda file, key: require_writable_file(key, file))
"""Of files that are written."""
DRAFTER_HELP = (
    "Drafter: a folder or Hub id, optionally with @revision, or without training: prompt-lookup, suffix, "
    "early-exit:layers=N, native-mtp, hybrid:drafter=FOLDER."
)
ONE_DRAFTER = _drafter(str, DRAFTER_HELP)
SEVERAL_DRAFTERS = _drafter(list[str], f"{DRAFTER_HELP} Or name=DRAFTER; repeatable.")


class PairSettings(Section):
    """A target, its drafters, the prompts, and how they are decoded."""

    target: Annotated[str, Option(check=check_target_name, hub=require_cached_without_hub)]
    """'embedded', a local folder, a GGUF file or a Hub id."""
    drafters: Annotated[dict[str, str], SEVERAL_DRAFTERS]
    """Name in tables: folder, Hub id or the name of an untrained drafter."""
    prompts: Annotated[str, Option(check=check_prompts_name, hub=require_cached_prompts)] = EMBEDDED
    """'embedded', a file (JSONL, JSON, Parquet, text) or a Hub data set."""
    count: Count | None = None
    """Most prompts to use."""
    policies: Annotated[
        tuple[str, ...], Distinct, Option("--policy", help=f"{POLICY_HELP} Repeatable; NAME=POLICY is for one drafter.")
    ] = ()
    """How drafts grow, for every drafter or, as NAME=POLICY, for one; a drafter without any has its default policy."""
    temperatures: Annotated[tuple[Temperature, ...], Distinct, Option("--temperature")] = (0.0, 1.0)
    """Repeatable; default: 0 (greedy) and 1."""
    rule: RuleName | None = None
    """Verification rule; default: the best lossless one."""
    top_k: Count | None = None
    """Sample from the k likeliest tokens."""
    top_p: Probability | None = None
    """Sample from the smallest set of probability p."""
    seed: Seed = 0
    """Seed of sampling."""
    chat_template: Annotated[str | None, Option(check=check_template_name)] = None
    """A file, 'vicuna', or 'plain' (texts joined by line breaks); default: the tokenizer's template."""
    template_options: Annotated[TemplateVariables, Option("--template-option", kind=list[str], parse=assignments)] = (
        Field(default_factory=dict)
    )
    """Variable key=value of the chat template; repeatable."""
    dtype: Dtype = "float32"
    """The target's: float32, bfloat16, float16."""
    attn_implementation: str | None = None
    """Attention of the target: sdpa, eager, flash_attention_2, ..."""
    trust_remote_code: Annotated[bool, UNSTORED] = False
    """Run code from the target's repository."""
    compile: bool = False
    """Compile the passes with torch.compile; on CUDA as CUDA graphs."""
    invariant: bool = False
    """Passes of one shape: greedy texts equal the target's bit by bit."""
    images: Annotated[str | None, Option(check=_check_folder)] = None
    """Folder of the images that prompts name; default: that of the prompts."""

    @model_validator(mode="after")
    def _check_names(self, info: ValidationInfo) -> Self:
        for drafter in self.drafters.values():
            if is_named(drafter):
                parse_named(drafter)
        for drafter in self.drafters:
            for policy in self.policies_of(drafter):
                check_policy(policy, user_name(info, "policies"))
        check_attention(user_name(info, "attn_implementation"), self.attn_implementation, self.dtype)
        return self

    def sampling(self, temperature: float) -> "Sampling":
        """Return the temperature with the cuts that go with it: none for greedy decoding."""
        from draftsmith.decode.sampling import Sampling

        return Sampling(temperature) if temperature == 0 else Sampling(temperature, self.top_k, self.top_p)

    @property
    def target_section(self) -> TargetSection:
        """The target, as a recipe names it."""
        how = {"dtype": self.dtype, "attn_implementation": self.attn_implementation}
        return TargetSection(model=self.target, trust_remote_code=self.trust_remote_code, **how)

    @property
    def passes(self) -> dict[str, Any]:
        """How passes run, as arguments of `SpeculativeDecoder`."""
        return {"compile": self.compile, "invariant": self.invariant}

    def policies_of(self, drafter: str) -> tuple[str, ...]:
        """Return the policies of the drafter with this name."""
        named = [self._named(policy) for policy in self.policies]
        return tuple(policy for name, policy in named if name in ("", drafter))

    def _named(self, policy: str) -> Arm:
        """Return the name before a policy, empty for a policy of all drafters, and the policy."""
        name, _, own = policy.partition("=")
        return (name, own) if name in self.drafters else ("", policy)


class Settings(PairSettings):
    """Settings of a measurement; runs with equal settings can be continued and compared."""

    subset: str | None = None
    """Configuration of a Hub data set; of a local folder, a folder inside it."""
    split: str = "train"
    """Split of a Hub data set, or of a local folder whose files name splits; files that name none are of train."""
    max_new_tokens: Count = 96
    """Most new tokens per turn."""
    draft_lengths: Annotated[DistinctCounts, Option("--gamma")] = ()
    """Draft length of a chain, beside the policies; repeatable; default: each drafter's own."""
    batch_sizes: Annotated[DistinctCounts, Option("--batch-size")] = (1,)
    """Prompts decoded together; repeatable; default: 1."""
    repeats: Count = 3
    """Times that every text is generated."""


class ServedSettings(Settings):
    """Settings of a measurement of a server, which stands for its drafter."""

    options = (
        *("url", "target", "prompts", "subset", "split", "count", "max_new_tokens", "repeats", "temperatures", "top_p"),
        *("seed", "chat_template", "template_options", "trust_remote_code", "model", "baseline", "batch_sizes"),
    )
    url: Annotated[str, UNSTORED, Option(argument=True, check=_check_address)]
    """Address of the server with the drafter."""
    model: Annotated[str, UNSTORED]
    """The name under which the server has the target."""
    baseline: Annotated[str | None, UNSTORED] = None
    """Address of a server without a drafter, or an eval.json measured on one."""
    batch_sizes: Annotated[DistinctCounts, Option("--concurrency")] = (1, 2, 4)
    """Requests at a time; repeatable; default: 1, 2 and 4."""

    @model_validator(mode="before")
    @classmethod
    def _name_the_server(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "drafters": {given.get("model", ""): given.get("url", "")}}

    @property
    def server(self) -> ServerSection:
        """The server with the drafter."""
        return server_section(url=self.url, model=self.model, top_p=self.top_p)

    @property
    def addresses(self) -> list[str]:
        """The address of the server, and of the one without a drafter."""
        return [self.url, *([self.baseline] if self.baseline is not None and is_address(self.baseline) else [])]


NOT_SERVED = ("draft_length", "policies", "rule", "images", "compile", "invariant")
"""Settings of decoding on this machine, which a server has from its start."""


class CheckSettings(PairSettings):
    """Settings of a check; runs with equal settings make the same draws."""

    drafters: Annotated[dict[str, str], SEVERAL_DRAFTERS] = Field(default_factory=dict)
    """With a server, its name and address."""
    count: Count | None = 12
    """Most prompts to use."""
    dtype: Dtype = cast(Dtype, None)
    """The target's: float32, bfloat16, float16; default: float32, and for a server bfloat16."""
    draft_length: Annotated[Count | None, Option("--gamma")] = None
    """Draft length; default: each drafter's own."""
    server: Annotated[str | None, UNSTORED, Option(check=_check_address)] = None
    """Address of a running server with speculation; without --drafter."""
    model: Annotated[str | None, UNSTORED] = None
    """The server's name of the target; default: the only one it lists."""
    baseline: Annotated[str | None, Option(check=_check_address)] = None
    """Address of a server without speculation, instead of loading the target."""
    tokens: Annotated[Count, Field(ge=500)] = 10_000
    """Tokens to sample; as many for the control."""

    @model_validator(mode="before")
    @classmethod
    def _name_the_server(cls, given: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        server, drafters = given.get("server"), given.get("drafters")
        if server is not None:
            if drafters:
                both = f"{user_name(info, 'drafters')}={next(iter(drafters.values()))} with {user_name(info, 'server')}"
                raise ConfigError(f"{both}={server}; expected one of the two")
            drafters = {given.get("model") or "server": server}
        dtype = given.get("dtype") or ("float32" if server is None else "bfloat16")
        return {**given, "drafters": drafters or {}, "dtype": dtype}

    @model_validator(mode="after")
    def _check_places(self, info: ValidationInfo) -> Self:
        def named(name: str) -> str:
            return user_name(info, name)

        if not self.drafters:
            raise ConfigError(
                f"{named('drafters')} is missing; expected a drafter, or a running server as {named('server')}"
            )
        if self.draft_length is not None and self.policies:
            raise ConfigError(f"gamma={self.draft_length} and policy={self.policies[0]}; expected one of the two")
        if self.server is not None:
            used = [name for name in NOT_SERVED if getattr(self, name)]
            if used:
                raise ConfigError(f"{named(used[0])} with {named('server')}; expected it at the server's start")
        elif self.model is not None:
            raise ConfigError(f"{named('model')}={self.model} without {named('server')}; expected both")
        return self


class ForecastSettings(PairSettings):
    """Settings of a forecast; `policies` are compared with the chains, by default a few trees."""

    options = (
        *(
            "target",
            "drafters",
            "prompts",
            "count",
            "policies",
            "batch_sizes",
            "max_new_tokens",
            "temperatures",
            "rule",
        ),
        *("top_k", "top_p", "seed", "chat_template", "template_options", "dtype", "attn_implementation"),
        *("trust_remote_code", "max_draft_length", "profile", "save_profile"),
    )
    max_draft_length: Count = 8
    """Longest chain of draft tokens to compare."""
    batch_sizes: Annotated[DistinctCounts, Option("--batch-size")] = (1,)
    """Prompts decoded together; repeatable; default: 1."""
    max_new_tokens: Count = 96
    """Most new tokens per turn."""
    profile: Annotated[Path | None, UNSTORED, Option(check=_check_file)] = None
    """Timings of another machine, see docs/guide/forecast.md."""
    save_profile: Annotated[Path | None, UNSTORED, WRITTEN] = None
    """File for this machine's timings, for --profile."""

    @model_validator(mode="after")
    def _check_profile(self, info: ValidationInfo) -> Self:
        def named(name: str) -> str:
            return user_name(info, name)

        for policy in self.policies:  # compared for every drafter
            check_policy(policy, named("policies"))
        if self.profile is not None and self.save_profile is not None:
            raise ConfigError(
                f"{named('profile')}={self.profile} and {named('save_profile')}={self.save_profile}; expected one of "
                "the two"
            )
        if self.save_profile is not None and len(self.temperatures) > 1:
            expected = "one --temperature: rounds cost more when tokens are drawn"
            raise ConfigError.of(named("save_profile"), str(self.save_profile), expected)
        return self


class PromptSettings(PairSettings):
    """A prompt, and how `draftsmith generate` continues it: with at most one drafter, policy and temperature."""

    options = (
        *("prompt", "target", "drafters", "draft_length", "policies", "temperatures", "rule", "top_k", "top_p", "seed"),
        *("max_new_tokens", "image", "stop"),
        *("dtype", "attn_implementation", "trust_remote_code", "compile", "invariant"),
    )
    prompt: Annotated[str, Option(argument=True)]
    """The text to continue."""
    drafters: Annotated[dict[str, str], ONE_DRAFTER] = Field(default_factory=dict)
    """The drafter by a name."""
    draft_length: Annotated[Count | None, Option("--gamma")] = None
    """Draft length; default: each drafter's own."""
    policies: Annotated[tuple[str, ...], Option("--policy", kind=str, parse=only, help=POLICY_HELP)] = ()
    """The policy."""
    temperatures: Annotated[tuple[Temperature], Option("--temperature", kind=float, parse=only)] = (0.0,)
    """0 is greedy."""
    max_new_tokens: Count = 128
    """Most new tokens per turn."""
    image: Annotated[tuple[str, ...], Option(check=_check_files)] = ()
    """Image before the prompt; repeatable."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """String that ends the text; repeatable."""

    @model_validator(mode="after")
    def _check_drafter(self, info: ValidationInfo) -> Self:
        length, policy = self.draft_length, next(iter(self.policies), None)
        for name, value in {"draft_length": length, "policies": policy}.items():
            if not self.drafters and value is not None:
                missing = user_name(info, "drafters")
                raise ConfigError(f"{user_name(info, name)}={value} without {missing}; expected a drafter")
        if length is not None and policy is not None:
            raise ConfigError(f"gamma={length} and policy={policy}; expected one of the two")
        return self


class DemoSettings(PairSettings):
    """A pair, and the address at which `draftsmith demo` shows it."""

    options = (
        *("target", "drafters", "host", "port", "chat_template", "template_options", "dtype", "attn_implementation"),
        "trust_remote_code",
    )
    drafters: Annotated[dict[str, str], ONE_DRAFTER]
    """The drafter by its name on the page."""
    host: str = "127.0.0.1"
    """Address to listen on; at 0.0.0.0, other machines can open the page."""
    port: Annotated[Count, Field(le=65535)] = 7860
    """Port to listen on."""


ANOTHER = "another folder, or --overwrite"


def require_same_run(
    stored: Mapping[str, Any], settings: PairSettings, out: Path, facts: Mapping[str, Any] = {}, what: str = "run"
) -> None:
    """Raise ConfigError naming the first value in which a run differs from the one stored in `out`.

    A setting that an earlier version did not store had its default; one that this version does not have was off.

    Args:
        stored: the settings of the stored run as `settings`, beside its facts.
        facts: what its results depend on besides the settings, such as fingerprints.
    """
    now = settings.model_dump(mode="json")
    before = stored.get("settings")
    known = {key: value for key, value in before.items() if key in now or value} if isinstance(before, dict) else {}
    defaults = type(settings).model_construct().model_dump(mode="json", warnings=False)
    difference = first_difference({**defaults, **known}, now)
    difference = difference or first_difference({key: stored.get(key) for key in facts}, facts)
    if difference is not None:
        dated = difference.startswith(("prompts=", "now=")) and "now" in facts
        why = f" (the chat template shows the date, here of {facts['now']})" if dated else ""
        raise ConfigError(f"out={out} holds another {what}: {difference}{why}; expected {ANOTHER}")
