"""Exactness on real pairs: greedy answers, laws, draws, the KV cache, seeded faults."""
