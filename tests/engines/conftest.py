"""Fixtures of tests that run real engines (`make test-engines`). Each test skips where its engine is absent."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines.workshop import Workshop
from integration.conftest import _few_timings  # noqa: F401 - local measurements time each pass once


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """Return the targets and drafters of all tests, with a cache of their own."""
    place: Path = tmp_path_factory.mktemp("engines")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DRAFTSMITH_CACHE", str(place / "cache"))
        patched.setenv("NO_PROXY", "127.0.0.1")
        yield Workshop(place)
