"""`specllama batch`: the requests of a file."""
