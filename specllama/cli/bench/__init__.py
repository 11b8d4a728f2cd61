"""The bench command: options, models, report."""
