"""The command line: one file per command; the only part of specllama that prints."""
