"""Drafts: built from q or retrieved for all sequences of a batch, and the form in which they are verified."""
