"""Publishing: the model card."""
