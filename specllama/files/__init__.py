"""Models as files: names, sources, caches, GGUF bytes."""
