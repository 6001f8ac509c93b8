"""A loaded target with its drafters and prompts, from the settings that name them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.arguments import capabilities, require_readable
from draftsmith.decode.policies import check_policy
from draftsmith.eval.prompts import Prompt, PromptRows, prompts_fingerprint, time_of
from draftsmith.eval.settings import PairSettings
from draftsmith.heads.base import Drafter
from draftsmith.heads.checkpoint import load_drafter
from draftsmith.heads.configs import is_named, parse_named
from draftsmith.heads.model_config import decoding_limit, vocabulary_of
from draftsmith.heads.untrusted import StoredDrafter, local_folder, read_config
from draftsmith.provenance import model_fingerprint, model_fingerprints
from draftsmith.terminal import Terminal, stage


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

    def encode(
        tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, context: int | None
    ) -> tuple[list[Prompt], list[str]]:
        template, options = settings.chat_template, settings.template_options
        assert rows is not None
        return rows.encode(
            tokenizer,
            count=settings.count,
            context=context,
            vocab_size=vocabulary_of(config),
            chat_template=template,
            template_options=options,
            processor=processor,
            now=now,
            encodes=config.is_encoder_decoder,
        )

    now = now or datetime.now()  # prompts may be encoded twice
    images = images or (rows is not None and rows.images)
    processor = settings.target_section.load_processor() if images else None
    prompts, left_out, limit = list[Prompt](), list[str](), None
    if rows is not None:
        tokenizer, config = settings.target_section.load_tokenizer()
        limit = decoding_limit(config)
        prompts, left_out = encode(tokenizer, config, limit)
    stored = _stored(settings.drafters)
    with stage("loading the target and the drafters", shown=progress):
        loaded = settings.target_section.load(images=images)
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
        prompts, left_out = encode(loaded.tokenizer, loaded.model.config, shortest)
    return Session(loaded.model, loaded.tokenizer, drafters, prompts, processor, left_out)


def fingerprints(target: PreTrainedModel, drafters: Mapping[str, Drafter], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return the fingerprints of models and prompts; only a run with equal ones continues another."""
    return {
        "target": model_fingerprint(target),
        "drafters": {name: model_fingerprint(drafter) for name, drafter in drafters.items()},
        "prompts": prompts_fingerprint(prompts),
        **time_of(prompts),
    }


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
