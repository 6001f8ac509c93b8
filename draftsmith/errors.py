"""The errors that draftsmith raises on purpose. The CLI turns `ConfigError` into one line and exit code 2."""

LONGEST_LINE = 480
"""Characters of an error's message: with the name of the error in front of it, a line has at most 500."""


def one_line(text: str, most: int = LONGEST_LINE) -> str:
    """Return `text` as one line; of a longer text its beginning and its end, where key and expectation stand."""
    if len(text) > 8 * most:
        text = f"{text[: 4 * most]} … {text[-4 * most :]}"
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    end = most // 3
    return f"{line[: most - end - 3]} … {line[-end:]}"


def reason_of(error: BaseException, *, whole: bool = False) -> str:
    """Return the first line of an exception of another library, or all of it as one; its type's name for none."""
    text = str(error).strip() or type(error).__name__
    return one_line(text if whole else text.splitlines()[0], 300)


class DraftsmithError(Exception):
    """Base of every error that draftsmith raises on purpose. Its message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class ConfigError(DraftsmithError, ValueError):
    """Something the user gave cannot be used; the message names the key, the value and what would be valid."""

    @classmethod
    def of(cls, key: str, value: object, expected: str) -> "ConfigError":
        """`train.draft_length=0; expected >= 1`"""
        return cls(f"{key}={value!r}; expected {expected}")
