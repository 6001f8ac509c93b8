"""Drafts: built from q or retrieved for all texts of a batch, and the form in which they are verified."""
