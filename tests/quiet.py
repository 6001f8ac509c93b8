"""Silence what libraries print at import, as the command line does."""

from draftsmith.terminal import quiet_imports

quiet_imports()
