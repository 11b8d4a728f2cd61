"""Options as values: groups of options, their types and checks."""
