"""The section `target` of a recipe, and how its model, config and tokenizer are loaded."""

from typing import TYPE_CHECKING, Any, Literal

from draftsmith.config import Section

if TYPE_CHECKING:  # recipes are read without torch
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from draftsmith.distill.load_target import LoadedTarget


class TargetSection(Section):
    model: str = "embedded"
    """'embedded', a local folder, a GGUF file or a Hub id."""
    revision: str | None = None
    """A branch, tag or commit of the Hub repository."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the frozen target; the drafter is always trained in float32."""
    attn_implementation: str | None = None
    """'sdpa', 'eager', 'flash_attention_2', 'flash_attention_3' or a flash attention of 'kernels-community'; by default
    transformers chooses. Flash attention requires a dtype of 16 bits."""
    trust_remote_code: bool = False
    """Run code from the target's repository."""
    offload: bool = False
    """Keep the layers in host memory, and copy each to the accelerator while it computes."""
    sharded: bool = False
    """Shard the layers over all processes; by default every process holds the whole target."""
    quantization: Literal["int8", "float8"] | None = None
    """Round the matrices of the layers to this type (torchao), for all that the run does with the target. 'float8'
    rounds activations too; it requires dtype 'bfloat16' and a GPU of CUDA capability 8.9."""

    head_from: str | None = None
    """With teacher.kind='server': another checkpoint of the same model, for its embeddings and lm_head where those of
    `model` are quantized."""

    def load_without_layers(self, *, device: "torch.device | str", modules: bool = False) -> "LoadedTarget":
        """Load what is outside of the target's layers, see distill/layerless.py."""
        from draftsmith.distill.layerless import load_without_layers

        how: dict[str, Any] = {"revision": self.revision, "dtype": self.dtype, "head_from": self.head_from}
        return load_without_layers(self.model, device=device, modules=modules, **how)

    def load(self, *, device: "torch.device | str | None" = None, images: bool = False) -> "LoadedTarget":
        """Load and freeze the target, whole; arguments and errors as for `load_target`. A placement distributes it."""
        from draftsmith.distill.load_target import load_target

        how: dict[str, Any] = {"dtype": self.dtype, "attn_implementation": self.attn_implementation}
        return load_target(self.model, device=device, images=images, **how, **self._where)

    def load_tokenizer(self) -> "tuple[PreTrainedTokenizerBase, PreTrainedConfig]":
        """Return the tokenizer and the config of the target, without its weights."""
        from draftsmith.distill.load_target import load_tokenizer

        return load_tokenizer(self.model, **self._where)

    def load_ends(self) -> frozenset[int]:
        """Return the tokens that end the target's answers, without its weights."""
        from draftsmith.distill.load_target import load_ends

        return load_ends(self.model, **self._where)

    def load_processor(self) -> Any:
        """Return the processor of a target that reads images."""
        from draftsmith.distill.load_target import load_processor

        return load_processor(self.model, **self._where)

    @property
    def _where(self) -> dict[str, Any]:
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}
