"""Provenance of measurements and checkpoints: versions, machine, command, and fingerprints of models and data."""

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from draftsmith.errors import ConfigError

PACKAGES = ("draftsmith", "torch", "transformers", "accelerate", "datasets", "tokenizers")
NOT_COMPUTED = (
    *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache"),
    *("return_dict", "output_attentions", "output_hidden_states", "id2label", "label2id", "problem_type"),
)
"""Keys of a model's config that do not change its logits, or, as the dtype, only by rounding."""


def fingerprint(value: Any) -> str:
    """Return the first 16 hex digits of the SHA-256 of `value` as canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a fingerprint that is equal for two tokenizers if every token string has the same id in both."""
    return fingerprint(tokenizer.get_vocab())


def encoding_fingerprint(tokenizer: Any) -> str:
    """Return a fingerprint of what a tokenizer makes of a text: its rules and its special tokens.

    A tokenizer that is written in Python does not describe its rules; its vocabulary stands for them.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = {"vocabulary": tokenizer.get_vocab()} if backend is None else json.loads(backend.to_str())
    lasting = {key: value for key, value in rules.items() if key not in ("version", "truncation", "padding")}
    return fingerprint([lasting, tokenizer.special_tokens_map])


IN_LAYER = re.compile(r"\.\d+\.")
"""Part of the name of a tensor of a layer, an expert or a module for multi-token prediction."""


def outside_fingerprints(model: Any) -> list[str]:
    """Return `model_fingerprints` of the weights outside of the layers, as of a target that is loaded without them."""
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not IN_LAYER.search(name)}
    return [weights_fingerprint(tensors), weights_fingerprint(tensors, float16=True)]


def model_fingerprint(model: Any) -> str:
    """Return a fingerprint of the weights.

    Up to 1,024 evenly spaced numbers of every parameter are hashed, rounded to bfloat16, so that a checkpoint has the
    same fingerprint in float32 and in bfloat16.
    """
    return model_fingerprints(model)[0]


def model_fingerprints(model: Any) -> list[str]:
    """Return `model_fingerprint` of the weights as they are and as rounded to float16.

    A weight that is rounded to float16 first may round to another bfloat16 number. Of two models that are casts of the
    same float32 weights, one of them in float32 or float16, at least one fingerprint is equal.
    """
    known = getattr(model, "draftsmith_fingerprints", None)
    # A target with merged adapters has them: its weights depend on the dtype in which the adapters were added.
    if known is not None:
        return known
    tensors = model.state_dict()
    return [weights_fingerprint(tensors), weights_fingerprint(tensors, float16=True)]


def fingerprint_of_numbers(model: Any) -> str:
    """Return a fingerprint of the weights, the config and a run's quantization, for caches of what a model computes."""
    quantization = getattr(model, "draftsmith_quantization", None)
    return fingerprint([model_fingerprint(model), _computation(model.config.to_dict()), quantization])


def _computation(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config, and those inside it, without `NOT_COMPUTED`."""
    values = {key: value for key, value in config.items() if key not in NOT_COMPUTED}
    return {key: _computation(value) if isinstance(value, dict) else value for key, value in values.items()}


def weights_fingerprint(tensors: dict[str, Any], *, float16: bool = False) -> str:
    """Return `model_fingerprint` of a model with these tensors by name, first rounded to float16 if `float16`."""
    import torch

    digest = hashlib.sha256()
    for name, parameter in sorted(tensors.items()):
        if hasattr(parameter, "full_tensor"):  # sharded: gathered by all processes together
            parameter = parameter.full_tensor()
        if parameter.is_meta:
            raise ConfigError(f"weight {name} is offloaded or on disk (device_map); expected all weights in memory")
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 1024)]
        rounded = (sample.half() if float16 else sample).to(torch.bfloat16)
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(rounded.view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    """Return the date, the versions, the machine and the command; no user name, host name or path."""
    import torch

    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "versions": versions,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def first_difference(stored: Any, now: Any, key: str = "") -> str | None:
    """Return the first key whose values differ, as in `train.steps=8 there, 9 here`; None for equal values."""
    if not (isinstance(stored, Mapping) and isinstance(now, Mapping)):
        return None if stored == now else f"{key}={stored!r} there, {now!r} here"
    names = [*now, *(name for name in stored if name not in now)]
    differences = (first_difference(stored.get(n), now.get(n), f"{key}.{n}".lstrip(".")) for n in names)
    return next(filter(None, differences), None)


def has_cxx_compiler() -> bool:
    """Return whether a C++ compiler is installed, which torch.compile needs on a CPU."""
    names = [name for name in (os.environ.get("CXX"), "g++", "clang++", "c++", "cl") if name]
    return any(map(shutil.which, names))
