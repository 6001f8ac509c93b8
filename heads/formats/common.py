"""Input and output of the export writers, and the commands that start vLLM and SGLang with an export."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.errors import ConfigError
from draftsmith.heads.base import TrainableDrafter
from draftsmith.heads.lm_head import weight_of
from draftsmith.heads.model_config import text_config, with_older_names
from draftsmith.storage import write_json

SAMPLED: dict[str, Any] = {"draft_sample_method": "probabilistic"}
"""Makes vLLM draw draft tokens from q at the request's temperature; by default it drafts the most likely ones."""
VLLM: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model", **SAMPLED},
    "medusa": {"method": "medusa"},
    "eagle3": {"method": "eagle3", **SAMPLED},
    "peagle": {"method": "eagle3", "parallel_drafting": True, **SAMPLED},
    "dflash": {"method": "dflash", **SAMPLED},
    "dspark": {"method": "dspark", **SAMPLED},
}
"""Values of `--speculative-config` by type of drafter; dflash with DSpark's options is `dspark`."""
SGLANG = {"draft_model": "STANDALONE", "eagle": "EAGLE", "hass": "EAGLE", "eagle3": "EAGLE3"}
SGLANG |= {"dflash": "DFLASH"}
"""Values of `--speculative-algorithm` by type of drafter."""
RARE_IN_SGLANG = ("dflash",)
"""Types whose drafters SGLang's layout can rarely hold, since their masks are trained; model cards do not name it."""


def vllm_type(kind: str, drafter: dict[str, Any]) -> str:
    """Return the key of `VLLM` for a type, or the type; `drafter` is the section of the checkpoint's config."""
    return "dspark" if kind == "dflash" and (drafter.get("markov_rank") or drafter.get("confidence_head")) else kind


def vllm_command(target: str, plan: dict[str, Any], folder: str, draft_length: int) -> str:
    """Return the shell command that serves `target` with the drafter in `folder`."""
    plan = {**plan, "model": folder, "num_speculative_tokens": draft_length}
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(plan))}"


def sglang_command(target: str, algorithm: str, folder: str, draft_length: int, dtype: str | None = None) -> str:
    """Return the shell command that serves chains; SGLang counts the last committed token as a draft token."""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm {algorithm} \\\n"
        f"  --speculative-draft-model-path {folder} --speculative-num-steps {draft_length} \\\n"
        f"  --speculative-eagle-topk 1 --speculative-num-draft-tokens {draft_length + 1} --enable-metrics"
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
    """The result of `describe_target`."""
    tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def text(self) -> PreTrainedConfig:
        """The target's text config."""
        return text_config(self.target)

    @property
    def target_architectures(self) -> list[str]:
        """The class names of the target's model."""
        return list(self.target.config.architectures or [type(self.target).__name__])

    def require(self, fits: bool, value: str, expected: str) -> None:
        """Raise ConfigError unless `fits`: the layout cannot express `value`."""
        if not fits:
            raise ConfigError(f"drafter of type {self.drafter.type}: {value}; expected {expected}")

    def require_plain_embeddings(self, expected: str) -> None:
        """Raise ConfigError for a target that scales its embeddings, in a layout whose engines read plain rows."""
        self.require(not scales_embeddings(self.target), "a target that scales its embeddings", expected)

    def stored(self, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor` on the CPU, floats in the export's dtype."""
        tensor = tensor.detach().cpu()
        return (tensor.to(self.dtype) if tensor.is_floating_point() else tensor).clone().contiguous()

    def weights(self, module: nn.Module, rename: Callable[[str], str] = str) -> dict[str, Tensor]:
        """Return the module's tensors as they are stored, under the names that `rename` gives them."""
        return {rename(name): self.stored(value) for name, value in module.state_dict().items()}

    def write(self, config: dict[str, Any], tensors: dict[str, Tensor], file: str = WEIGHTS) -> None:
        """Write config.json and the tensors."""
        save_file(tensors, self.folder / file, metadata={"format": "pt"})
        self.write_config(config)

    def write_config(self, config: dict[str, Any]) -> None:
        """Write config.json with the export's dtype and `with_older_names`."""
        write_json(self.folder / "config.json", with_older_names({**config, "dtype": name_of(self.dtype)}))


@dataclass(frozen=True)
class Serving:
    """How to use an export, and notes about it."""

    engine: str
    usage: str
    """Code in the language `language`; `{folder}` stands for the export's folder or repository."""
    language: str = "sh"
    notes: list[str] = field(default_factory=list)
    port: int | None = None
    """The port on which `usage` starts a server; None where it starts none."""
    model: str = ""
    """The name under which this server has the target."""

    def usage_of(self, folder: str) -> str:
        """Return the code for an export in `folder`, whose name may have spaces and quotes."""
        inside = json.dumps(folder, ensure_ascii=False)[1:-1]
        if self.language != "sh":
            return self.usage.replace("{folder}", inside)
        quoted = inside.replace("'", "'\"'\"'")  # JSON within single quotes
        return self.usage.replace('"{folder}"', f'"{quoted}"').replace("{folder}", shlex.quote(folder))


def scales_embeddings(target: PreTrainedModel) -> bool:
    """Return whether the embeddings of `target` are scaled rows of their weight (Gemma 3), measured on the largest."""
    embeddings = target.get_input_embeddings()
    if weight_of(embeddings).is_meta:
        return False
    token = weight_of(embeddings).abs().sum(-1).argmax()  # the row of a padding token may be zero
    return not torch.equal(embeddings(token), weight_of(embeddings)[token])


def llama_fields(body: LlamaConfig, **changes: Any) -> dict[str, Any]:
    """Return a complete Llama config."""
    fields = {"model_type": "llama", **{key: getattr(body, key) for key in COPIED}}
    fields |= {"rope_parameters": {**(body.rope_parameters or {})}, "tie_word_embeddings": False}
    return {**fields, "use_cache": True, "attention_dropout": 0.0, "initializer_range": 0.02, **changes}


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def with_output_biases(tensors: dict[str, Tensor], body: LlamaConfig) -> dict[str, Tensor]:
    """Return the tensors with zero output biases of attention for layers with `attention_bias`.

    Engines expect these biases too, and leave them uninitialised where they are missing.
    """
    if not body.attention_bias:
        return tensors
    zeros = {name: value for name, value in tensors.items() if name.endswith("self_attn.o_proj.weight")}
    return tensors | {
        name.replace("o_proj.weight", "o_proj.bias"): value.new_zeros(value.shape[0]) for name, value in zeros.items()
    }


def full_lm_head(source: Source[Any]) -> list[str]:
    """Return a note that engines use the target's full lm_head, of which the drafter uses rows; none without any.

    SGLang has `--speculative-token-map`, whose file is a pickle; such files are not written.
    """
    if (vocabulary := source.drafter.draft_vocabulary) is None:
        return []
    return [
        f"The engine drafts from the target's full lm_head: the draft vocabulary of {len(vocabulary):,} tokens is not "
        "written, and the logits of its tokens are the same."
    ]


def on_vllm(source: Source[Any], kind: str, notes: list[str]) -> Serving:
    """Return the serving instructions for vLLM; `kind` is a key of `VLLM`."""
    usage = vllm_command(source.target_name, VLLM[kind], "{folder}", source.draft_length)
    return Serving("vLLM", usage, notes=notes, port=8000, model=source.target_name)


def on_sglang(source: Source[Any], notes: list[str], usage: str | None = None) -> Serving:
    """Return the serving instructions for SGLang; `usage`: the command for other drafts than chains."""
    if usage is None:
        algorithm, dtype = SGLANG[source.drafter.type], name_of(source.dtype)
        usage = sglang_command(source.target_name, algorithm, "{folder}", source.draft_length, dtype)
    return Serving("SGLang", usage, notes=notes, port=30000, model=source.target_name)
