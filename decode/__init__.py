"""The speculative decoder: target, KV cache, random draws, logits processors, policies, verification and the loop."""
