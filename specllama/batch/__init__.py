"""Many requests at once in one model: the pool, its scheduler and its statistics."""
