"""Errors that draftsmith raises itself. The CLI prints a `ConfigError` as one line and exits with code 2."""

LONGEST_LINE = 480
"""Characters of an error's message; a printed line, with the error's name in front, has at most 500."""


def one_line(text: str, most: int = LONGEST_LINE) -> str:
    """Return `text` as one line of at most `most` characters; a longer one is cut in the middle.

    The beginning of an error names the key, and its end says what is expected.
    """
    if len(text) > 8 * most:
        text = f"{text[: 4 * most]} … {text[-4 * most :]}"
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    end = most // 3
    return f"{line[: most - end - 3]} … {line[-end:]}"


def reason_of(error: BaseException, *, whole: bool = False) -> str:
    """Return the first line of another library's exception, or with `whole` all of it as one line.

    A first line that ends in a colon has the reason after it. An exception without a text gives the name of its type.
    """
    text = str(error).strip() or type(error).__name__
    first = text.splitlines()[0]
    return one_line(text if whole or first.endswith(":") else first, 300)


class DraftsmithError(Exception):
    """Base of the errors that draftsmith raises itself. The message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class ConfigError(DraftsmithError, ValueError):
    """A value from the user that cannot be used; the message names the key, the value and what is expected."""

    @classmethod
    def of(cls, key: str, value: object, expected: str) -> "ConfigError":
        """Return an error such as `train.draft_length=0; expected >= 1`."""
        return cls(f"{key}={value!r}; expected {expected}")


class EngineLost(DraftsmithError):
    """No engine computes a teacher's states any more; the run continues from its last checkpoint."""


REMOVED = {
    **dict.fromkeys(
        (f"draftsmith forecast {option}" for option in ("--server", "--model", "--context", "--write")),
        "draftsmith eval server, which measures a running server",
    ),
    "drafter.type=hydra": "medusa or eagle3",
    "drafter.type=mlp_speculator": "medusa or eagle3",
    "drafter=hybrid:memory": "hybrid:drafter=FOLDER, which drafts from the text itself",
    "drafter=suffix:memory": "suffix, which drafts from the text itself",
    "rule=traversal": "token, which verifies drawn trees too; without a rule each draft has the best one",
    "target.tensor_parallel": "answers from an engine that serves the target (data.server), or target.sharded, "
    "target.offload or target.quantization",
}
"""Names that earlier versions had, with what to use instead of each."""


def removed(name: str, where: str = "") -> ConfigError:
    """Return the error for a name of `REMOVED`, after the words that say where it was read."""
    return ConfigError(f"{where}{name} was removed in 0.5; expected {REMOVED[name]}")
