"""The audit command and its report as Markdown."""
