"""Cheaper drafts from a model that is here."""
