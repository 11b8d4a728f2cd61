"""The models commands: list, show, pull, path, remove, add."""
