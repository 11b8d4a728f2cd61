"""The array types of the package, and memory for intermediate rows that is used again and again."""

from __future__ import annotations

from threading import local
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
Float32Array: TypeAlias = npt.NDArray[np.float32]
Float64Array: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]

_scratch = local()


def scratch32(size: int) -> Float32Array:
    """Uninitialised memory of this thread, the same at every call: for values that no caller keeps.  (size,)

    A new array of a vocabulary's size is new memory from the system, whose first writing takes longer than exp.
    """
    kept: Float32Array | None = getattr(_scratch, "row", None)
    if kept is None or kept.size < size:
        kept = _scratch.row = np.empty(size, np.float32)
    return kept[:size]
