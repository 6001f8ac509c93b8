"""Drafter checkpoints: `config.json` with a `draftsmith` section and `model.safetensors`, without code.

A draft model is saved as a plain transformers checkpoint, which also loads as `assistant_model` in transformers.

Drafters without a checkpoint are built by name: `suffix`, `suffix:min_match=3`, `early-exit:layers=2`, `native-mtp`,
`hybrid:…`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads import HEADS
from draftsmith.heads.base import Drafter, Needs, TeacherSignals, TrainableDrafter
from draftsmith.heads.configs import is_named, parse_named
from draftsmith.heads.draft_model import DraftModel, EarlyExit
from draftsmith.heads.lm_head import DraftVocabulary
from draftsmith.heads.lora import merged_state
from draftsmith.heads.model_config import known_tokens, plain_model, text_config, with_older_names
from draftsmith.heads.untrusted import (
    LONGEST_DRAFT,
    StoredDrafter,
    bounded,
    load_all_weights,
    local_folder,
    read_config,
    require_finite,
    require_same_tokens,
    require_sizes,
    require_whole_model,
    shapes_in,
    shared_vocabulary,
    without_warnings,
)
from draftsmith.provenance import model_fingerprints, outside_fingerprints, tokenizer_fingerprint
from draftsmith.storage import apply_umask, write_json


def drafter_named(text: str, target: PreTrainedModel, load: Callable[[str], Drafter]) -> Drafter:
    """Return the drafter that `text` names; `load` reads the checkpoint of a hybrid."""
    # Imported here, like other drafters: training loads none of them.
    from draftsmith.heads.retrieval import Hybrid, PromptLookup, SuffixRetrieval

    name, values = parse_named(text)
    if name == "prompt-lookup":
        return PromptLookup(**values)
    if name == "early-exit":
        return EarlyExit(target, **values)
    if name == "native-mtp":
        from draftsmith.heads.mtp import Mtp

        weight = next(target.parameters())
        drafter = Mtp.from_target(target, init="native").to(device=weight.device, dtype=weight.dtype)
        return drafter.eval().requires_grad_(False)
    trained = values.pop("drafter", None)
    return SuffixRetrieval(**values) if trained is None else Hybrid(load(trained), SuffixRetrieval(), **values)


WEIGHTS = "model.safetensors"
FORMAT = 1
UNREADABLE = (SafetensorError, StrictDataclassError, OSError, ImportError, MemoryError, RuntimeError, ValueError)
UNREADABLE += (TypeError, AttributeError, LookupError, ArithmeticError, AssertionError)
"""Errors that constructors and readers raise for damaged files and for invalid values in a config."""


def describe_target(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str, revision: str | None = None
) -> dict[str, Any]:
    """Return the description by which a checkpoint recognises its target."""
    model = plain_model(model)
    config = text_config(model)
    own, in_float16 = model_fingerprints(model)
    return {
        "name": name,
        "revision": revision,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "model_fingerprint": own,
        "float16_fingerprint": in_float16,
        "outside_fingerprint": outside_fingerprints(model)[0],
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer) if tokenizer is not None else None,
    }


def save_drafter(
    drafter: TrainableDrafter,
    folder: Path,
    *,
    target: dict[str, Any],
    recipe: dict[str, Any] | None,
    draft_length: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write the drafter into `folder`, which is created if missing. Use `atomic_folder` for an atomic write."""
    folder.mkdir(parents=True, exist_ok=True)
    section = {
        "format": FORMAT,
        "type": drafter.type,
        "drafter": drafter.config(),
        "draft_length": draft_length,
        "target": target,
        "recipe": recipe,
    }
    if drafter.shared_tensors:
        section["shared_tensors"] = list(drafter.shared_tensors)
    if drafter.draft_vocabulary is not None:
        section["draft_vocabulary"] = drafter.draft_vocabulary.fingerprint()
    config: dict[str, Any] = {}
    if isinstance(drafter, DraftModel):
        drafter.model.save_pretrained(folder, state_dict=merged_state(drafter.model))
        config = with_older_names(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    else:
        tensors = {name: value.detach().cpu().contiguous() for name, value in drafter.state_dict().items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    for file in folder.glob("*.safetensors"):
        apply_umask(file)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    write_json(folder / "config.json", {**config, "draftsmith": section})


def load_drafter(
    path_or_repo: str | Path,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    revision: str | None = None,
    unstated: bool = False,
) -> Drafter:
    """Load a drafter and check that it fits `target`.

    No code of the drafter runs: only data is downloaded, only safetensors weights are read, and the sizes in the config
    are compared with the weights before memory is allocated.

    Args:
        path_or_repo: a local folder or a Hub id of a draftsmith checkpoint, a plain transformers causal LM or
            encoder-decoder model, or a drafter published by another project, see heads/formats/. Or the name of a
            drafter without a checkpoint, such as `suffix`.
        target: the target model; the drafter is moved to its device and dtype.
        tokenizer: the target's tokenizer; if given, its vocabulary is compared with the drafter's.
        revision: a branch, tag or commit of the Hub repository; `user/name@revision` is equivalent.
        unstated: also load a drafter with `Drafter.unstated` keys, which its caller has to settle.

    Raises:
        ConfigError: for a missing folder, a damaged file, or a drafter of another target.
    """
    target = plain_model(target)
    if is_named(str(path_or_repo)) and not Path(path_or_repo).is_dir():
        drafter = drafter_named(str(path_or_repo), target, lambda path: load_drafter(path, target, tokenizer))
        if tokenizer is not None:
            drafter.limit_vocabulary(known_tokens(tokenizer))
        return drafter
    folder = local_folder(str(path_or_repo), revision)
    config, stored = read_config(folder, path_or_repo)
    if stored is not None:
        _require_shapes(stored, path_or_repo, target, tokenizer)
        _require_weights(stored, path_or_repo, target)
    drafter = _read(folder, stored, config, target)
    if not unstated:
        _require_stated(drafter, path_or_repo)
    require_finite(path_or_repo, drafter.state_dict().items())
    drafter.attach(target)
    _compare_vocabulary(drafter, stored, folder, path_or_repo, target, tokenizer)
    if tokenizer is not None:
        drafter.limit_vocabulary(known_tokens(tokenizer))
    parameter = next(target.parameters())
    drafter.draft_length_hint = stored.draft_length if stored else drafter.draft_length_hint
    if (drafter.draft_length_hint or 1) > LONGEST_DRAFT:
        length = drafter.draft_length_hint
        raise ConfigError(
            f"drafter={path_or_repo} asks for drafts of {length} tokens; expected at most {LONGEST_DRAFT}"
        )
    drafter.target_quality = stored.target.quality if stored else None
    drafter.shared_tensors = tuple(stored.shared_tensors) if stored else drafter.shared_tensors
    drafter = drafter.to(device=parameter.device, dtype=parameter.dtype).eval().requires_grad_(False)
    if drafter.needs != Needs():
        _require_runs(drafter, path_or_repo, target)
    return drafter


def unattached_drafter(
    path_or_repo: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> TrainableDrafter:
    """Return the drafter of a folder or repository as it is stored, not attached to a target.

    `target` may be on torch's meta device: then its weights are taken for those that the drafter shares. `tokenizer`:
    the target's; without it, a draft model with another vocabulary size is taken for one with other padding.
    """
    folder = local_folder(path_or_repo)
    config, stored = read_config(folder, path_or_repo)
    if stored is not None:
        _require_shapes(stored, path_or_repo, target, tokenizer)
    drafter = _read(folder, stored, config, target)
    if tokenizer is None and isinstance(drafter, DraftModel):
        drafter.shared_vocabulary = min(drafter.vocab_size, text_config(target).vocab_size)
    _compare_vocabulary(drafter, stored, folder, path_or_repo, target, tokenizer)
    _require_stated(drafter, path_or_repo)
    return drafter


def _compare_vocabulary(
    drafter: Drafter,
    stored: StoredDrafter | None,
    folder: Path,
    name: str | Path,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Set the tokens that a draft model of another project shares with the target; ConfigError for other tokens."""
    wanted = text_config(target).vocab_size
    foreign = stored is None or drafter.vocab_size != wanted  # imported drafters keep their own padding
    if foreign and isinstance(drafter, DraftModel) and tokenizer is not None:
        drafter.shared_vocabulary = shared_vocabulary(folder, name, tokenizer)
    elif stored is None and tokenizer is not None:
        require_same_tokens(folder, name, tokenizer)
    shared, own = drafter.shared_vocabulary, drafter.vocab_size
    if own != wanted and (shared is None or (own is not None and shared > own)):
        raise ConfigError(
            f"drafter={name} has a vocabulary of {drafter.vocab_size}; expected the target's {wanted}, or "
            "the target's tokenizer to show that only the padding differs"
        )


def _require_stated(drafter: Drafter, name: str | Path) -> None:
    """Raise ConfigError for a missing key that engines replace by different values."""
    for key in drafter.unstated:
        raise ConfigError(
            f"drafter={name}: {key} is missing in config.json, and engines replace it by different values; expected "
            "true or false there, or `draftsmith import`, whose self-test finds out which"
        )


def _read(
    folder: Path, stored: StoredDrafter | None, config: dict[str, Any], target: PreTrainedModel
) -> TrainableDrafter:
    """Build the drafter and load its weights."""
    try:
        packed, held = config.get("quantization_config") is not None, shapes_in(folder)
        require_sizes(folder, config if stored is None else stored.drafter, held, text_config(target).vocab_size)
        with bounded(folder, held, packed=packed):
            if stored is None:
                return _published(folder, config, target) or DraftModel(_language_model(folder))
            if stored.type == DraftModel.type:
                return DraftModel(_language_model(folder))
            drafter = HEADS[stored.type].from_config(stored.drafter)
        drafter.load_state_dict(load_file(folder / WEIGHTS))
        _require_vocabulary(drafter.draft_vocabulary, stored, folder)
    except ConfigError:
        raise
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"drafter={folder} cannot be read ({reason_of(error, whole=True)}); expected whole safetensors weights"
        ) from error
    except UNREADABLE as error:
        why = f"no key {error}" if isinstance(error, KeyError) else reason_of(error, whole=True)
        raise ConfigError(
            f"drafter={folder} cannot be read (config.json or its weights: {why}); expected a config.json with every "
            "key of its drafter, numbers without quotes, and weights of these sizes"
        ) from error
    return drafter


def _published(folder: Path, config: dict[str, Any], target: PreTrainedModel) -> TrainableDrafter | None:
    """Return the drafter of a folder in another project's format, None for other folders."""
    from draftsmith.heads.formats.readers import read_published

    return read_published(folder, config, target)


@torch.no_grad()
def _require_runs(drafter: TrainableDrafter, name: str | Path, target: PreTrainedModel) -> None:
    """Raise ConfigError for a config whose sizes fit the weights, but with which a forward pass fails."""
    weight = next(drafter.parameters())
    hidden = text_config(target).hidden_size
    ids_BT = torch.zeros(1, 4, dtype=torch.long, device=weight.device)
    states_BTH = weight.new_zeros(1, 4, hidden)
    features_BTF = weight.new_zeros(1, 4, hidden * len(drafter.needs.layers))
    signals = TeacherSignals(ids_BT, torch.ones_like(ids_BT), states_BTH, torch.ones_like(ids_BT).bool(), features_BTF)
    try:
        with torch.random.fork_rng(devices=[]):
            for unrolled in drafter.unroll(signals):
                unrolled.head(unrolled.states_ND[-1:])
    except UNREADABLE as error:
        why = reason_of(error, whole=True)
        raise ConfigError(f"drafter={name} cannot compute with its config.json ({why}); expected another") from error


def _require_vocabulary(vocabulary: DraftVocabulary | None, stored: StoredDrafter, folder: Path) -> None:
    """Raise ConfigError unless the map of draft tokens is the one that the drafter was trained with."""
    if vocabulary is None:
        return
    vocabulary.require_consistent(folder)
    if stored.draft_vocabulary != vocabulary.fingerprint():
        raise ConfigError(
            f"drafter={folder} has a draft vocabulary with fingerprint {vocabulary.fingerprint()}; expected "
            f"{stored.draft_vocabulary}, which it was trained with: the map is stale"
        )


def _language_model(folder: Path) -> PreTrainedModel:
    """Load the causal LM or encoder-decoder model of a folder, which must hold all of its weights."""
    require_whole_model("drafter", str(folder))
    with without_warnings():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return load_all_weights("drafter", folder, auto, trust_remote_code=False)


def _require_shapes(
    stored: StoredDrafter, name: str | Path, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Raise ConfigError unless the checkpoint was trained for the target's shapes and tokenizer."""
    if stored.type not in HEADS:
        raise ConfigError(f"drafter={name} is of type {stored.type!r}; expected one of {sorted(HEADS)}")
    made_for, reads_states = stored.target, HEADS[stored.type].needs != Needs()
    config = text_config(target)
    for key in ("vocab_size", "hidden_size") if reads_states else ("vocab_size",):
        if getattr(made_for, key) != getattr(config, key):
            raise ConfigError(
                f"drafter={name} was trained for {made_for.name} with {key}={getattr(made_for, key)}; "
                f"expected the target's {getattr(config, key)}"
            )
    recorded = made_for.tokenizer_fingerprint
    if tokenizer is not None and recorded is not None and recorded != tokenizer_fingerprint(tokenizer):
        raise ConfigError(f"drafter={name} was trained for {made_for.name} with another tokenizer; expected the same")


def _require_weights(stored: StoredDrafter, name: str | Path, target: PreTrainedModel) -> None:
    """Raise ConfigError unless a checkpoint that reads hidden states was trained for the target's weights."""
    made_for, reads_states = stored.target, HEADS[stored.type].needs != Needs()
    fingerprints = {made_for.model_fingerprint, made_for.float16_fingerprint}
    if getattr(target, "draftsmith_layerless", False):
        fingerprints.add(made_for.outside_fingerprint)
    if reads_states and fingerprints.isdisjoint([*model_fingerprints(target), *outside_fingerprints(target)]):
        raise ConfigError(
            f"drafter={name} reads the hidden states of {made_for.name}, and the target's weights are different; "
            "expected the target that it was trained on"
        )
