"""Settings that `eval`, `check`, `forecast`, `generate` and the demo share, and what they name: loaded once."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.arguments import capabilities, require_readable
from draftsmith.decode.policies import check_policy
from draftsmith.decode.rules import rule_named
from draftsmith.decode.sampling import Sampling, require_seed
from draftsmith.distill.chat_template import template_text
from draftsmith.distill.load_target import load_processor, load_target, load_tokenizer
from draftsmith.errors import ConfigError
from draftsmith.eval.prompts import Prompt, PromptRows
from draftsmith.heads.base import Drafter
from draftsmith.heads.checkpoint import load_drafter
from draftsmith.heads.configs import is_named, parse_named
from draftsmith.heads.model_config import context_limit
from draftsmith.heads.untrusted import StoredDrafter, local_folder, read_config
from draftsmith.names import DTYPES, EMBEDDED, check_attention, check_target_name
from draftsmith.provenance import model_fingerprints
from draftsmith.terminal import Terminal, stage

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
    invariant: bool = False
    """Run the target by passes of one shape; see `SpeculativeDecoder`."""
    chat_template: str | None = None
    """A file with a chat template, or the name of a shipped one, instead of the tokenizer's."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template in addition to the messages."""
    images: str | None = None
    """Folder of the images that prompts name; None: the folder of their file."""

    @property
    def passes(self) -> dict[str, Any]:
        """How passes run, as arguments of `SpeculativeDecoder`."""
        return {"compile": self.compile, "invariant": self.invariant}

    def sampling(self, temperature: float) -> Sampling:
        """Return the temperature with the cuts that go with it: none for greedy decoding."""
        return Sampling(temperature) if temperature == 0 else Sampling(temperature, self.top_k, self.top_p)

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
) -> None:
    """Raise ConfigError for values out of range, repeated values, and unknown names.

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
    if settings.dtype not in DTYPES:
        raise ConfigError.of("dtype", settings.dtype, f"one of {', '.join(DTYPES)}")
    check_attention("attn_implementation", settings.attn_implementation, settings.dtype)
    if settings.images is not None and not Path(settings.images).is_dir():
        raise ConfigError.of("images", settings.images, "a folder")
    if settings.chat_template is not None:
        template_text(settings.chat_template)
    check_target_name(settings.target)


def require_same_settings(stored: Mapping[str, Any], settings: PairSettings, out: Path, what: str = "run") -> None:
    """Raise ConfigError naming the first setting that differs from the one stored in `out`.

    A setting that an earlier version did not store had its default; one that this version does not have was off.
    """
    now, defaults = _plain(asdict(settings)), _plain(asdict(type(settings)("", {})))
    for key in (*now, *(key for key in stored if key not in now and stored[key])):
        there = stored.get(key, defaults.get(key))
        if there != now.get(key):
            raise ConfigError(
                f"out={out} holds another {what}: {key}={there!r} there, {now.get(key)!r} here; expected another folder"
            )


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values as JSON holds them."""
    return json.loads(json.dumps(values))


@dataclass(frozen=True)
class Session:
    """A loaded target with its drafters, and the prompts as token ids."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafters: dict[str, Drafter]
    """By the names in `PairSettings.drafters`."""
    prompts: list[Prompt]
    """Prompts that fit into the context of the target and of every drafter."""
    processor: Any = None
    """The target's, where prompts have images."""
    notes: list[str] = field(default_factory=list)
    """Which prompts were left out."""


def load_session(
    settings: PairSettings,
    rows: PromptRows | None,
    *,
    trust_remote_code: bool = False,
    progress: bool = True,
    images: bool = False,
    now: datetime | None = None,
) -> Session:
    """Load what validated settings name.

    Args:
        rows: the prompts, from `PromptRows.read`; None for a session without prompts.
        progress: name the stage on stderr.
        images: load the target's processor; done in any case where `rows` have images.
        now: see `PromptRows.encode`.

    Raises:
        ConfigError: for a target or a drafter that cannot be loaded, a policy with branches for a model that reads
            chains only, or prompts that are all too long. Prompts that are too long for the target, and drafters
            that are not there, are refused before its weights are read.
    """

    def encode(tokenizer: PreTrainedTokenizerBase, context: int | None) -> tuple[list[Prompt], list[str]]:
        template, options = settings.chat_template, settings.template_options
        assert rows is not None
        return rows.encode(
            tokenizer,
            count=settings.count,
            context=context,
            chat_template=template,
            template_options=options,
            processor=processor,
            now=now,
        )

    now = now or datetime.now()  # prompts may be encoded twice
    images = images or (rows is not None and rows.images)
    processor = load_processor(settings.target, trust_remote_code=trust_remote_code) if images else None
    prompts, left_out, limit = list[Prompt](), list[str](), None
    if rows is not None:
        tokenizer, config = load_tokenizer(settings.target, trust_remote_code=trust_remote_code)
        limit = context_limit(config)
        prompts, left_out = encode(tokenizer, limit)
    stored = _stored(settings.drafters)
    with stage("loading the target and the drafters", shown=progress):
        loaded = load_target(
            settings.target,
            dtype=settings.dtype,
            attn_implementation=settings.attn_implementation,
            trust_remote_code=trust_remote_code,
            images=images,
        )
        drafters = {
            name: load_drafter(path, loaded.model, loaded.tokenizer) for name, path in settings.drafters.items()
        }
    if (note := loaded.dtype_note("--dtype bfloat16")) is not None:
        Terminal(stderr=True).print(note, markup=False, soft_wrap=True)
    for note in pair_notes(settings, loaded.model, drafters, stored):
        Terminal(stderr=True).print(f"  note: {note}", markup=False, soft_wrap=True)
    _require_readable(settings, loaded.model, drafters)
    limits = [limit, *(drafter.context_limit for drafter in drafters.values())]
    shortest = min((value for value in limits if value is not None), default=None)
    if rows is not None and shortest != limit:
        prompts, left_out = encode(loaded.tokenizer, shortest)
    return Session(loaded.model, loaded.tokenizer, drafters, prompts, processor, left_out)


def _stored(drafters: Mapping[str, str]) -> dict[str, StoredDrafter]:
    """Return the `draftsmith` sections of the drafters that have one, by name.

    Raises:
        ConfigError: for a drafter that cannot be found, before the target's weights are read.
    """
    sections = {}
    for name, path in drafters.items():
        own = parse_named(path)[1].get("drafter") if is_named(path) else path
        if own is not None and not is_named(own):
            sections[name] = read_config(local_folder(own), own)[1]
    return {name: section for name, section in sections.items() if section is not None}


def pair_notes(
    settings: PairSettings,
    target: PreTrainedModel,
    drafters: Mapping[str, Drafter],
    stored: Mapping[str, StoredDrafter],
) -> list[str]:
    """Return a line for each drafter that can be decoded with, and was trained for another target or dtype.

    Heads that were trained on other weights are refused by `load_drafter`; draft models decode with any target of their
    vocabulary.
    """
    notes = []
    for name, section in stored.items():
        made_for, asked = section.target, (section.recipe or {}).get("target", {})
        fingerprints = {made_for.model_fingerprint, made_for.float16_fingerprint}
        if fingerprints.isdisjoint(model_fingerprints(target)):
            notes.append(f"{name} was trained for {made_for.name}, and the weights of {settings.target} are different")
        if (dtype := asked.get("dtype", settings.dtype)) != settings.dtype:
            notes.append(f"{name} was trained on the target in {dtype}, not {settings.dtype} (--dtype {dtype})")
        if (kind := asked.get("quantization")) is not None:
            notes.append(f"{name} was trained on the target in {kind}, which is not quantized here")
    size = target.num_parameters()
    for name, drafter in drafters.items():
        model = drafter.language_model
        if model is not None and model is not target and model.num_parameters() > size:
            larger = f"{model.num_parameters():,} parameters, the target {settings.target} {size:,}"
            notes.append(f"{name} has {larger}; are --target and --drafter swapped?")
    return notes


def _require_readable(settings: PairSettings, target: PreTrainedModel, drafters: dict[str, Drafter]) -> None:
    """Raise ConfigError for a policy whose drafts the target, or the draft model, cannot read."""
    for name, drafter in drafters.items():
        policies = settings.policies_of(name)
        models = capabilities(target, drafter) if policies and not drafter.only_retrieves else []
        for policy in policies:
            require_readable(check_policy(policy), models)
