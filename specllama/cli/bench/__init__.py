"""The bench command: options, models, tables, small plots."""
