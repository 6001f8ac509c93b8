"""Train drafters for speculative decoding on a frozen target, and measure what they are worth."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from draftsmith.errors import ConfigError, DraftsmithError

if TYPE_CHECKING:
    from draftsmith.decode.custom_generate import as_custom_generate
    from draftsmith.decode.decoder import SpeculativeDecoder
    from draftsmith.heads.checkpoint import load_drafter, save_drafter

__version__ = "0.4.0"
__all__ = [
    "ConfigError",
    "DraftsmithError",
    "SpeculativeDecoder",
    "as_custom_generate",
    "load_drafter",
    "save_drafter",
]

# Imported on first use, so that `import draftsmith` and `draftsmith --help` do not wait for torch.
_LAZY = {
    "SpeculativeDecoder": "draftsmith.decode.decoder",
    "as_custom_generate": "draftsmith.decode.custom_generate",
    "load_drafter": "draftsmith.heads.checkpoint",
    "save_drafter": "draftsmith.heads.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'draftsmith' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
