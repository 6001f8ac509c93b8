"""Forward passes of a model over sequences and drafts: one class for each way of running it."""
