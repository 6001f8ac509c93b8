"""The drafter that an installed vLLM builds from an export, as told by its own parser of speculators configs."""

import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draftsmith.errors import ConfigError


def reading_of_vllm(folder: Path) -> str | None:
    """Describe the drafter that vLLM builds from `folder`; None where vLLM is absent or reads the folder as a model.

    Raises:
        ConfigError: if vLLM refuses the config.
    """
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if "speculators_model_type" not in config or find_spec("vllm") is None:
        return None
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig  # type: ignore[import-not-found]

    try:
        how: dict[str, Any] = SpeculatorsConfig.extract_vllm_speculative_config(config)
        what: dict[str, Any] = SpeculatorsConfig.extract_transformers_pre_trained_config(config)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder}: vLLM {version('vllm')} refuses this config ({error})") from error
    count = what["num_hidden_layers"]
    kinds = what.get("layer_types") or ["full_attention"] * count
    seen = [f"a window of {what['sliding_window']}" if kind == "sliding_attention" else "all tokens" for kind in kinds]
    return (
        f"vLLM {version('vllm')} reads {what['architectures'][0]}, method {how['method']}, "
        f"{how['num_speculative_tokens']} tokens a round, features {what['eagle_aux_hidden_state_layer_ids']}, "
        f"{what['draft_vocab_size']} tokens; layers that see {', '.join(seen)}"
    )
