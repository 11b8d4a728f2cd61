"""Tests of specllama."""
