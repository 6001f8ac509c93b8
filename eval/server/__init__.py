"""Measurement of a drafter where it serves: `draftsmith eval server`."""
