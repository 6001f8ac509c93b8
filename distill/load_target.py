"""Load a target by name: the embedded one, a local folder, a GGUF file, or a Hub id."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils.logging import disable_progress_bar

from draftsmith.distill import gguf_target
from draftsmith.distill.cotraining import adapter_base, is_adapter, with_adapter
from draftsmith.distill.embedded import embedded_target
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.model_config import eos_tokens
from draftsmith.heads.untrusted import load_all_weights, require_whole_model
from draftsmith.names import EMBEDDED, check_attention, check_target_name

TOKENIZER_CONFIG = "tokenizer_config.json"
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedTarget:
    """A frozen target in eval mode, with its tokenizer, name and revision."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    revision: str | None
    processor: Any = None
    """The processor of a target that reads images; see `load_processor`."""
    stored: torch.dtype | None = None
    """The dtype of its files, as its config says."""

    def dtype_note(self, option: str) -> str | None:
        """Return a line on a target that is stored in bfloat16, computed in float32, and faster in bfloat16 here.

        `option`: how the user sets bfloat16.
        """
        slow = self.stored == torch.bfloat16 and self.model.dtype == torch.float32
        if not slow or not bf16_is_fast(self.model.device):
            return None
        return f"  target: stored in bfloat16, computed in float32; {option} is faster on this machine"


def bf16_is_fast(device: torch.device) -> bool:
    """Return True if bf16 matrix products run in hardware; emulated, they are slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(supported and supported())


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig]:
    """Return the tokenizer and the config of a target; arguments and errors as for `load_target`."""
    check_target_name(name)
    folder = Path(name).expanduser()
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if is_adapter(folder):
        tokenizer, config = load_tokenizer(adapter_base(folder), **options)
        return adapter_tokenizer(folder, tokenizer, config, trust_remote_code=trust_remote_code), config
    try:
        gguf = gguf_target.gguf_file(name, revision)
        source = str(gguf_target.description(gguf)) if gguf else source_of(name)
        return AutoTokenizer.from_pretrained(source, **options), AutoConfig.from_pretrained(source, **options)
    except ConfigError:
        raise
    except Exception as error:  # tokenizers, configs and weights raise errors without a common base
        raise unreadable(name, None, error) from error


def load_ends(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> frozenset[int]:
    """Return the tokens that end a target's answers, as the loaded target has them; no weights are loaded."""
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    tokenizer, config = load_tokenizer(name, **options)
    folder = Path(name).expanduser()
    if is_adapter(folder):
        base = adapter_base(folder)
        return _with_end(load_ends(base, **options), tokenizer, load_tokenizer(base, **options)[0])
    try:
        gguf = gguf_target.gguf_file(name, revision)
        source = str(gguf_target.description(gguf)) if gguf else source_of(name)
        at: dict[str, Any] = {} if revision is None else {"revision": revision}
        return eos_tokens(config, GenerationConfig.from_pretrained(source, **at))
    except OSError:  # there is no such file
        return eos_tokens(config)


def adapter_tokenizer(
    folder: Path, base: PreTrainedTokenizerBase, config: PreTrainedConfig, *, trust_remote_code: bool
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that was saved with an adapter, with its chat template; `base` where there is none.

    Raises:
        ConfigError: for one that cannot be read, and for one with tokens that the base model does not have.
    """
    if not (folder / TOKENIZER_CONFIG).is_file():
        return base
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raise errors without a common base
        raise ConfigError(f"target={folder}: its tokenizer cannot be read ({reason_of(error)})") from error
    known = max(len(base), getattr(config.get_text_config(decoder=True), "vocab_size", 0))
    if len(tokenizer) > known:
        raise ConfigError(f"target={folder}: its tokenizer has {len(tokenizer)} tokens; expected at most {known}")
    return tokenizer


def _with_end(
    ends: frozenset[int], tokenizer: PreTrainedTokenizerBase, base: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Return the ends of the base model and the EOS of an adapter's tokenizer where it is another than the base's."""
    own = tokenizer.eos_token_id
    return ends | {own} if isinstance(own, int) and own != base.eos_token_id else ends


def load_processor(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Return the processor of a target that reads images; ConfigError where it has none, or a package is missing."""
    folder = Path(name).expanduser()
    if is_adapter(folder) and not any((folder / file).is_file() for file in PROCESSOR_FILES):
        options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        processor = load_processor(adapter_base(folder), **options)
        if (folder / TOKENIZER_CONFIG).is_file():
            processor.chat_template = load_tokenizer(name, **options)[0].chat_template or processor.chat_template
        return processor
    refusal = f"target={name} cannot read images"
    try:
        processor = AutoProcessor.from_pretrained(str(folder), revision=revision, trust_remote_code=trust_remote_code)
    except ImportError as error:
        reason = reason_of(error).partition(". ")[0]
        needed = "pip install '.[images]' installs what processors need"
        raise ConfigError(f"{refusal} here: {reason}; {needed}") from error
    except Exception as error:  # processors raise errors without a common base
        raise ConfigError(f"{refusal} ({reason_of(error)}); expected a target with a processor") from error
    if getattr(processor, "image_processor", None) is None:
        raise ConfigError(f"{refusal}: it has a tokenizer only; expected a target with a processor of images")
    return processor


def source_of(name: str) -> str:
    """Return the folder or the Hub id from which transformers reads a target that is no GGUF file."""
    return str(embedded_target()) if name == EMBEDDED else str(Path(name).expanduser())


def load_target(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    device: torch.device | str | None = None,
    images: bool = False,
) -> LoadedTarget:
    """Load and freeze a target.

    Args:
        name: "embedded", a local folder, a GGUF file, or a Hub id; a folder may hold a peft adapter, with the tokenizer
            that was saved with it, and a folder or a Hub repository a GGUF file. The revision of such a target is the
            file's hash.
        dtype: one of float32, bfloat16, float16.
        attn_implementation: sdpa, eager or a flash attention, see `check_attention`; default: transformers chooses.
        trust_remote_code: run code from the repository.
        device: by default the accelerator, if there is one.
        images: load the class that reads images, where transformers has another one for text alone.

    Raises:
        ConfigError: if the target is not found or cannot be read.
    """
    disable_progress_bar()  # transformers shows one for reading a file
    if dtype not in DTYPES:
        raise ConfigError.of("target.dtype", dtype, f"one of {', '.join(DTYPES)}")
    check_attention("target.attn_implementation", attn_implementation, dtype)
    check_target_name(name)
    folder = Path(name).expanduser()
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if is_adapter(folder):
        kind: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation, "images": images}
        base = load_target(adapter_base(folder), device=device, **kind, **options)
        model = with_adapter(base.model, folder).eval().requires_grad_(False)
        trust = {"trust_remote_code": trust_remote_code}
        tokenizer = adapter_tokenizer(folder, base.tokenizer, model.config, **trust)
        ends = eos_tokens(model.config, model.generation_config)
        model.generation_config.eos_token_id = sorted(_with_end(ends, tokenizer, base.tokenizer)) or None
        return LoadedTarget(model, tokenizer, name, revision, stored=base.stored)
    try:
        gguf = gguf_target.gguf_file(name, revision)
        source = str(gguf_target.model(gguf, DTYPES[dtype])) if gguf else source_of(name)
        require_whole_model("target", source, revision)
        model, tokenizer, stored = _read(source, dtype, attn_implementation, images, options)
    except ConfigError:
        raise
    except Exception as error:  # tokenizers, configs and weights raise errors without a common base
        raise unreadable(name, attn_implementation, error) from error
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    _freeze(model, device)
    revision = f"sha256:{gguf_target.sha256_of(gguf)}" if gguf else revision
    return LoadedTarget(model, tokenizer, name, revision, stored=None if gguf else stored)


def _read(
    source: str,
    dtype: str,
    attn_implementation: str | None,
    images: bool,
    options: dict[str, Any],
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, torch.dtype | None]:
    """Return the model and the tokenizer of `source`, and the dtype of its weights there."""
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    config = AutoConfig.from_pretrained(source, **options)
    stored = config.dtype or config.get_text_config().dtype
    stored = stored if isinstance(stored, torch.dtype) else None
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else decoder_class(config, images)
    attention = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    options = {**options, **attention, "dtype": DTYPES[dtype]}
    return load_all_weights("target", source, auto, **options), tokenizer, stored


def decoder_class(config: PreTrainedConfig, images: bool) -> Any:
    """Return the class for a decoder-only target: one for text alone where there is one, unless images are wanted."""
    reads_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    text_alone = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or not reads_images
    return AutoModelForCausalLM if text_alone and not (images and reads_images) else AutoModelForImageTextToText


def unreadable(name: str, attn_implementation: str | None, error: Exception) -> ConfigError:
    """Return the error for a target that cannot be loaded."""
    if attn_implementation is not None and isinstance(error, (ImportError, ValueError)):
        return ConfigError(
            f"target.attn_implementation={attn_implementation}; expected one that target={name} can use here, such "
            f"as eager ({reason_of(error)})"
        )
    return ConfigError(
        f"target={name}; expected 'embedded', a local folder, a GGUF file or a Hub id ({reason_of(error)})"
    )


def _freeze(model: nn.Module, device: torch.device | str) -> None:
    model.to(device).eval().requires_grad_(False)
