"""The speculative decoder: target adapter, KV cache, chance, processors, verification rules and the loop."""
