"""What a drafter learns from: prompts, target samples, teacher signals and objectives."""
