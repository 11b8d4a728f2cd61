"""Measure a pair on this machine, and choose what is fastest."""
