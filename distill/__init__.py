"""Training data, teachers and objectives: prompts, target samples, the target's signals, and losses."""
