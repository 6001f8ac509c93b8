"""Forward passes of a model over texts and drafts: one class for each way of running it."""
