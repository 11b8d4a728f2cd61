"""Parameters of tests that `make quick` leaves out."""

from __future__ import annotations

import functools

import pytest

slow = functools.partial(pytest.param, marks=pytest.mark.slow)  # one value for each argument
