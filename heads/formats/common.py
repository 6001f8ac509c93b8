"""What every layout is written from, and what a writer hands back.

How vLLM and SGLang are started with a drafter that was exported for them: what exports and cards print.
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.errors import ConfigError
from draftsmith.heads.base import TrainableDrafter
from draftsmith.storage import write_json

VLLM: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model"},
    "medusa": {"method": "medusa"},
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
    "dflash": {"method": "dflash"},
    "dspark": {"method": "dspark"},
    "mtp": {"method": "mtp"},
}
"""By type of drafter (DSpark's options make a dflash drafter one), what `--speculative-config` says of it."""
UNSERVED = ("mtp",)
"""Written for vLLM, and not served by it as it is: see docs/serving.md."""
SGLANG = {"draft_model": "STANDALONE", "eagle": "EAGLE", "hass": "EAGLE", "eagle3": "EAGLE3"}
"""By type of drafter, `--speculative-algorithm`."""


def vllm_type(kind: str, drafter: dict[str, Any]) -> str:
    """A key of `VLLM`, or a type that it has no method for; `drafter` is what the checkpoint's config says of it."""
    return "dspark" if kind == "dflash" and (drafter.get("markov_rank") or drafter.get("confidence_head")) else kind


def vllm_command(target: str, plan: dict[str, Any], folder: str, draft_length: int) -> str:
    plan = {**plan, "model": folder, "num_speculative_tokens": draft_length}
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(plan))}"


def sglang_command(target: str, algorithm: str, folder: str, draft_length: int, dtype: str | None = None) -> str:
    """A chain: SGLang counts the last committed token among the draft tokens."""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm {algorithm} \\\n"
        f"  --speculative-draft-model-path {folder} --speculative-num-steps {draft_length} \\\n"
        f"  --speculative-eagle-topk 1 --speculative-num-draft-tokens {draft_length + 1}"
        + ("" if dtype is None else f" --dtype {dtype}")
    )


WEIGHTS = "model.safetensors"
COPIED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
COPIED += ("head_dim", "vocab_size", "max_position_embeddings", "hidden_act", "rms_norm_eps", "attention_bias")
COPIED += ("mlp_bias",)


D = TypeVar("D", bound=TrainableDrafter, covariant=True)


@dataclass(frozen=True)
class Source(Generic[D]):
    """A drafter of type `D` to be exported into the empty `folder`, and the target that it drafts for."""

    drafter: D
    target: PreTrainedModel
    folder: Path
    target_name: str
    draft_length: int
    dtype: torch.dtype
    checkpoint: dict[str, Any]
    """What `describe_target` said of the target."""
    tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def text(self) -> Any:
        """The target's text config."""
        return self.target.config.get_text_config(decoder=True)

    @property
    def target_architectures(self) -> list[str]:
        return list(self.target.config.architectures or [type(self.target).__name__])

    def require(self, fits: bool, found: str, expected: str) -> None:
        """ConfigError in one line unless `fits`: the layout cannot say what `found` names."""
        if not fits:
            raise ConfigError(f"drafter of type {self.drafter.type}: {found}; expected {expected}")

    def stored(self, tensor: Tensor) -> Tensor:
        """`tensor` as it is written: on the CPU, floats in the export's dtype, with storage of its own."""
        tensor = tensor.detach().cpu()
        return (tensor.to(self.dtype) if tensor.is_floating_point() else tensor).clone().contiguous()

    def weights(self, module: nn.Module, rename: Callable[[str], str] = str) -> dict[str, Tensor]:
        return {rename(name): self.stored(value) for name, value in module.state_dict().items()}

    def write(self, config: dict[str, Any], tensors: dict[str, Tensor], file: str = WEIGHTS) -> None:
        save_file(tensors, self.folder / file, metadata={"format": "pt"})
        write_json(self.folder / "config.json", config)


@dataclass(frozen=True)
class Serving:
    """How to start what was written, and what is to be known about it."""

    engine: str
    usage: str
    """Shell or Python, `language` says which; `{folder}` stands for the export's folder or repository."""
    language: str = "sh"
    notes: list[str] = field(default_factory=list)


def llama_fields(body: LlamaConfig, **changes: Any) -> dict[str, Any]:
    """A Llama config in full. Rotary positions in the keys of transformers 5 and in those before."""
    rope = dict(body.rope_parameters)
    fields = {"model_type": "llama", **{key: getattr(body, key) for key in COPIED}}
    fields |= {"rope_parameters": rope, "rope_theta": rope["rope_theta"], "tie_word_embeddings": False}
    if rope["rope_type"] != "default":
        fields["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {**fields, "use_cache": True, "attention_dropout": 0.0, "initializer_range": 0.02, **changes}


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16`"""
    return str(dtype).removeprefix("torch.")


def with_output_biases(tensors: dict[str, Tensor], body: LlamaConfig) -> dict[str, Tensor]:
    """Where a config says `attention_bias`, engines expect a bias behind attention too, and leave it as allocated."""
    if not body.attention_bias:
        return tensors
    zeros = {name: value for name, value in tensors.items() if name.endswith("self_attn.o_proj.weight")}
    return tensors | {
        name.replace("o_proj.weight", "o_proj.bias"): value.new_zeros(value.shape[0]) for name, value in zeros.items()
    }
