"""The embedded target: a small Llama that writes Python code; its weights are part of the package."""

from pathlib import Path

from draftsmith.distill.embedded.corpus import embedded_prompts

__all__ = ["embedded_prompts", "embedded_target"]


def embedded_target() -> Path:
    """Return the folder of the embedded target in transformers format, with `build.json`: how it was trained."""
    return Path(__file__).resolve().parent / "weights"
