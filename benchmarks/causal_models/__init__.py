"""Every type that transformers maps to a causal language model: simulated, and emulated."""
