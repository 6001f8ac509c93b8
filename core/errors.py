"""The errors that draftsmith raises on purpose. The CLI turns `ConfigError` into one line and exit code 2."""


class DraftsmithError(Exception):
    """Base of every error that draftsmith raises on purpose."""


class ConfigError(DraftsmithError, ValueError):
    """Something the user gave cannot be used; the message names the key, the value and what would be valid."""

    @classmethod
    def of(cls, key: str, value: object, expected: str) -> "ConfigError":
        """`train.draft_length=0; expected >= 1`"""
        return cls(f"{key}={value!r}; expected {expected}")
