"""Our own prompts and texts, and what reads them."""
