"""Parameters of tests: those that `make quick` leaves out, and those that need no test of their own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from itertools import product

import pytest

slow = functools.partial(pytest.param, marks=pytest.mark.slow)  # one value for each argument


def looped(**values: Iterable[object]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """One test over every combination of these arguments, where pytest would take longer than a case (2 ms)."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        names, cases = [*values], [*product(*values.values())]

        def run(**fixtures: object) -> None:
            for case in cases:
                arguments = dict(zip(names, case, strict=True))
                try:
                    test(**arguments, **fixtures)
                except BaseException:
                    print(f"failed with {arguments}")
                    raise

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        signature = inspect.signature(test)
        rest = [parameter for name, parameter in signature.parameters.items() if name not in names]
        run.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return run

    return decorate
