"""Joint training of drafter and target: LoRA adapters make the target easier to draft for, within a KL bound.

This changes p: decoding is then lossless with respect to the *adapted* target. So the KL from the original target is
part of the loss, is measured on held-out text, and a drafter whose target exceeds the bound is not saved as the best.
With Medusa heads this is Medusa-2 (Cai et al. 2024, arXiv:2401.10774, section 2.2.2), distilled from the target itself.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.distill.draft_probabilities import LmHead, at_least_float32
from draftsmith.distill.losses import forward_kl
from draftsmith.distill.objective import Part, summed_loss
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.hidden_states import final_states
from draftsmith.heads.lm_head import logits_head
from draftsmith.heads.lora import ALPHA, add_lora, without_lora
from draftsmith.heads.untrusted import first_of
from draftsmith.provenance import fingerprint, model_fingerprints
from draftsmith.reading import read_json
from draftsmith.storage import write_json

MERGE = "or merge the adapter into its base model (peft: merge_and_unload, then save_pretrained) and name that folder"
LORA: dict[str, tuple] = {
    "peft_type": ("LORA",),
    "init_lora_weights": (True, False, None),
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora"), (False, None)),
    **dict.fromkeys(("megatron_config", "layer_replication", "modules_to_save", "trainable_token_indices"), (None,)),
    **dict.fromkeys(("rank_pattern", "loftq_config"), (None,)),
}
"""Keys of an adapter's config with their allowed values, which need nothing but the adapter weights; empty: None."""
CONFIG, WEIGHTS, QUALITY = "adapter_config.json", "adapter_model.safetensors", "quality.json"

# Shapes: B texts, T positions, N tokens, H hidden size, V vocabulary.


@dataclass(frozen=True)
class Adapters:
    """The LoRA adapters that a run trains on its target; sizes as in the recipe's section `cotrain`."""

    model: PreTrainedModel
    rank: int
    modules: list[str] | None

    @classmethod
    def on(cls, model: PreTrainedModel, *, rank: int, modules: list[str] | None) -> "Adapters":
        """Add float32 adapters to `model`, whose other weights stay frozen."""
        add_lora(model, rank=rank, modules=modules)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return cls(model, rank, modules)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name."""
        return {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}

    def tensors(self) -> dict[str, Tensor]:
        """Return the adapters' tensors under the names that peft uses."""
        return {
            "base_model.model." + name.replace(".default.", "."): weight.detach().cpu().contiguous()
            for name, weight in self.parameters.items()
        }

    def save(self, folder: Path, base: str, quality: dict[str, Any]) -> None:
        """Save a peft adapter of `base`, which `load_target` and peft can load, and the adapted target's `quality`."""
        folder.mkdir(parents=True, exist_ok=True)
        suffixes = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in self.parameters})
        config = LoraConfig(
            r=self.rank, lora_alpha=ALPHA, target_modules=suffixes, task_type="CAUSAL_LM", inference_mode=True
        )
        config.base_model_name_or_path = base
        config.save_pretrained(str(folder))
        save_file(self.tensors(), folder / WEIGHTS, metadata={"format": "pt"})
        write_json(folder / QUALITY, quality)


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def adapter_base(folder: Path) -> str:
    """Return the target that an adapter was trained on: 'embedded', a folder or a Hub id."""
    try:
        base = read_json(folder / CONFIG)["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / CONFIG} names no base_model_name_or_path ({error}); expected one") from error
    if not isinstance(base, str):
        raise ConfigError(f"{folder / CONFIG}: base_model_name_or_path={base!r}; expected a name")
    return base


def with_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return `model` with the adapter merged into its weights, and with the fingerprints of the adapted target."""
    _require_lora(folder)
    tensors = load_file(folder / WEIGHTS)
    known = [adapted_fingerprint(base, tensors) for base in model_fingerprints(model)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about a call from peft to transformers
        merged = _adapted(model, folder).merge_and_unload()
    merged.draftsmith_fingerprints = known
    return merged


def _adapted(model: PreTrainedModel, folder: Path) -> Any:
    """Return peft's model with the adapter; ConfigError where an adapter has no tensor, or a tensor no layer.

    `PeftModel.from_pretrained` would leave the base model's layers as they are, after a warning.
    """
    names: dict[str, str] = getattr(model, "_checkpoint_conversion_mapping", {})
    try:
        config = LoraConfig.from_pretrained(str(folder), inference_mode=True)
        for key in ("rank_pattern", "alpha_pattern", "loftq_config"):
            setattr(config, key, getattr(config, key) or {})  # peft reads their keys
        adapted = PeftModel(model, config)
        read = adapted.load_adapter(str(folder), "default", key_mapping=names)
    except Exception as error:  # peft raises errors without a common base
        expected = f"expected an adapter of {type(model).__name__}"
        raise ConfigError(
            f"target={folder}: its adapter does not fit the base model ({reason_of(error, whole=True)}); {expected}"
        ) from error
    for problem, keys in (
        ("holds no tensor", read.missing_keys),
        ("holds, for no layer of the base model,", read.unexpected_keys),
    ):
        if keys:
            listed = first_of(sorted(key.replace(".default.", ".") for key in keys))
            raise ConfigError(
                f"target={folder}: {WEIGHTS} {problem} {listed}; expected an adapter of {type(model).__name__}"
            )
    return adapted


def _require_lora(folder: Path) -> None:
    """Check that the folder holds LoRA adapters in safetensors, of the rank in its config; raise ConfigError otherwise.

    peft would read pickled weights, import a module that the config names, and allocate memory for any rank.
    """
    config, file = read_json(folder / CONFIG), folder / WEIGHTS
    for key, allowed in LORA.items():
        value = config.get(key)
        if (None if value in ([], {}) else value) not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise ConfigError(f"target={folder}: {key}={value!r} in {CONFIG}; expected {expected}, {MERGE}")
    if not file.is_file():
        raise ConfigError(
            f"target={folder} holds no {WEIGHTS}; expected adapters in safetensors (pickled are not read), {MERGE}"
        )
    rank = config.get("r")
    try:
        with safe_open(file, framework="pt") as tensors:
            shapes = {name: tensors.get_slice(name).get_shape() for name in list(tensors.keys())}
    except SafetensorError as error:
        raise ConfigError(f"{file} cannot be read ({error}); expected whole safetensors weights") from error
    for name, shape in shapes.items():
        side = 0 if ".lora_A." in name else 1 if ".lora_B." in name else None
        if side is None or len(shape) != 2 or shape[side] != rank:
            expected = f"expected a LoRA of rank r={rank} in {CONFIG}, on linear layers"
            raise ConfigError(f"target={folder}: tensor {name} {shape}; {expected}, {MERGE}")


def adapted_fingerprint(base: str, tensors: dict[str, Tensor]) -> str:
    """Return a fingerprint of target and adapter that does not depend on the dtype in which they are merged."""
    sums = {
        name: [float(weight.double().sum()), float(weight.double().abs().sum())] for name, weight in tensors.items()
    }
    return fingerprint([base, {name: [f"{value:.6e}" for value in pair] for name, pair in sums.items()}])


def quality_kl(lm_head: LmHead, original_NH: Tensor, adapted_NH: Tensor, chunk_tokens: int) -> Tensor:
    """Return the summed KL(original || adapted) in nats, computed in chunks; the gradient flows to `adapted_NH`."""

    def parts() -> Iterator[Part]:
        for start in range(0, adapted_NH.shape[0], chunk_tokens):
            place = slice(start, start + chunk_tokens)
            original_nV = _log_p(lm_head, original_NH[place])
            yield Part(0, place, lambda adapted_nH, p=original_nV: forward_kl(p, _log_p(lm_head, adapted_nH)).sum())

    return summed_loss(parts(), [adapted_NH], ())


def _log_p(lm_head: LmHead, states_nH: Tensor) -> Tensor:
    return at_least_float32(lm_head(states_nH)).log_softmax(-1)


@torch.inference_mode()
def measure_quality(model: PreTrainedModel, texts: list[list[int]]) -> dict[str, float]:
    """Compare the adapted target with the original on `texts`: KL and losses in nats a token, equal argmaxes."""
    lm_head = logits_head(model)
    sums: dict[str, float] = dict.fromkeys(("kl", "nll_original", "nll_adapted", "top1_agreement"), 0.0)
    count = 0
    for tokens in texts:
        ids_1T = torch.tensor([tokens], device=next(model.parameters()).device)
        with without_lora(model):
            p_TV = _log_p(lm_head, final_states(model, ids_1T, torch.ones_like(ids_1T))[0])
        q_TV = _log_p(lm_head, final_states(model, ids_1T, torch.ones_like(ids_1T))[0])
        sums["kl"] += max(0.0, float(forward_kl(p_TV[:-1], q_TV[:-1]).sum()))  # rounding may make it negative
        sums["top1_agreement"] += float((p_TV.argmax(-1) == q_TV.argmax(-1))[:-1].sum())
        for name, logits_TV in (("nll_original", p_TV), ("nll_adapted", q_TV)):
            sums[name] += float(nn.functional.cross_entropy(logits_TV[:-1], ids_1T[0, 1:], reduction="sum"))
        count += len(tokens) - 1
    return {name: value / max(1, count) for name, value in sums.items()}
