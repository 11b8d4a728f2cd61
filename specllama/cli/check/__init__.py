"""The check command: files, reports, probes, lists of drafts."""
