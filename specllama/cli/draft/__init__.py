"""The draft commands: make, list, remove."""
