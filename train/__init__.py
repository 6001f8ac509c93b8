"""Training: the recipe, the accelerate loop, checkpoints and resume."""
