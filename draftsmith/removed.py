"""Names that earlier versions had: each is refused in one line that says what to use instead."""

from draftsmith.errors import ConfigError

REMOVED = {
    **dict.fromkeys(
        (f"draftsmith forecast {option}" for option in ("--server", "--model", "--context", "--write")),
        "draftsmith eval server, which measures a running server",
    ),
    "drafter.type=hydra": "medusa or eagle3",
    "drafter.type=mlp_speculator": "medusa or eagle3",
    "drafter=hybrid:memory": "hybrid:drafter=FOLDER, which drafts from the text itself",
    "drafter=suffix:memory": "suffix, which drafts from the text itself",
    "target.tensor_parallel": "answers from an engine that serves the target (data.server), or target.sharded, "
    "target.offload or target.quantization",
}
"""What to use instead of each name."""


def removed(name: str, where: str = "") -> ConfigError:
    """Return the error for a name of `REMOVED`, after the words that say where it was read."""
    return ConfigError(f"{where}{name} was removed in 0.5; expected {REMOVED[name]}")
