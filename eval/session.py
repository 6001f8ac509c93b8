"""Loading for `draftsmith eval`, `check`, `forecast` and `generate`: the target, its drafters and the prompts, once."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.fitting import capabilities, require_readable
from draftsmith.decode.policies import check_policy
from draftsmith.distill.load_target import load_processor, load_target, load_tokenizer
from draftsmith.eval.prompts import Prompt, PromptRows
from draftsmith.eval.settings import PairSettings
from draftsmith.eval.stages import stage
from draftsmith.heads.base import Drafter
from draftsmith.heads.checkpoint import load_drafter
from draftsmith.heads.configs import is_named, parse_named
from draftsmith.heads.model_config import context_limit
from draftsmith.heads.untrusted import local_folder, read_config
from draftsmith.safe_text import Terminal


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


def load_session(
    settings: PairSettings,
    rows: PromptRows | None,
    *,
    trust_remote_code: bool = False,
    progress: bool = True,
    images: bool = False,
) -> Session:
    """Load what validated settings name.

    Args:
        rows: the prompts, from `PromptRows.read`; None for a session without prompts.
        progress: name the stage on stderr.
        images: load the target's processor; done in any case where `rows` have images.

    Raises:
        ConfigError: for a target or a drafter that cannot be loaded, a policy with branches for a model that reads
            chains only, or a prompt that is too long. Prompts that are too long for the target, and drafters that
            are not there, are refused before its weights are read.
    """

    def encode(tokenizer: PreTrainedTokenizerBase, context: int | None) -> list[Prompt]:
        template, options = settings.chat_template, settings.template_options
        assert rows is not None
        return rows.encode(
            tokenizer,
            count=settings.count,
            context=context,
            chat_template=template,
            template_options=options,
            processor=processor,
        )

    images = images or (rows is not None and rows.images)
    processor = load_processor(settings.target, trust_remote_code=trust_remote_code) if images else None
    prompts, limit = [], None
    if rows is not None:
        tokenizer, config = load_tokenizer(settings.target, trust_remote_code=trust_remote_code)
        limit = context_limit(config)
        prompts = encode(tokenizer, limit)
    _require_there(settings.drafters.values())
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
    _require_readable(settings, loaded.model, drafters)
    limits = [limit, *(drafter.context_limit for drafter in drafters.values())]
    shortest = min((value for value in limits if value is not None), default=None)
    if rows is not None and shortest != limit:
        prompts = encode(loaded.tokenizer, shortest)
    return Session(loaded.model, loaded.tokenizer, drafters, prompts, processor)


def _require_there(drafters: Iterable[str]) -> None:
    """Raise ConfigError for a drafter that cannot be found, before the target's weights are read."""
    for path in drafters:
        own = parse_named(path)[1].get("drafter") if is_named(path) else path
        if own is not None and not is_named(own):
            read_config(local_folder(own), own)


def _require_readable(settings: PairSettings, target: PreTrainedModel, drafters: dict[str, Drafter]) -> None:
    """Raise ConfigError for a policy whose drafts the target, or the draft model, cannot read."""
    for name, drafter in drafters.items():
        policies = settings.policies_of(name)
        models = capabilities(target, drafter) if policies and not drafter.only_retrieves else []
        for policy in policies:
            require_readable(check_policy(policy), models)
