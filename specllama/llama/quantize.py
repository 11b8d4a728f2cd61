"""Store a model's weights in another quantization with llama.cpp."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specllama.base.errors import BackendError, UsageError
from specllama.core.types import Cancel
from specllama.llama.bindings import bindings, log
from specllama.llama.header import Header
from specllama.llama.open import LoadProgress, apart

_STEP = re.compile(r"\[\s*(\d+)/\s*(\d+)\]")  # "[  12/ 290] blk.0.attn_q.weight - ...": one line a tensor


@dataclass(frozen=True, slots=True)
class Quant:
    """A quantization of llama.cpp."""

    ftype: int  # llama.cpp's llama_ftype
    bits: float  # per weight, about
    pure: bool  # all matrices in this type; else a mixture with more bits for important matrices


# The quantizations that need no importance matrix, from the coarsest to the finest.
QUANTS: Mapping[str, Quant] = {
    "Q2_K": Quant(10, 3.0, False),
    "Q3_K_S": Quant(11, 3.5, False),
    "Q3_K_M": Quant(12, 4.0, False),
    "Q3_K_L": Quant(13, 4.3, False),
    "IQ4_XS": Quant(30, 4.5, False),
    "Q4_0": Quant(2, 4.5, True),
    "IQ4_NL": Quant(25, 4.5, True),
    "Q4_1": Quant(3, 5.0, True),
    "Q4_K_S": Quant(14, 4.7, False),
    "Q4_K_M": Quant(15, 5.0, False),
    "Q5_0": Quant(8, 5.5, True),
    "Q5_1": Quant(9, 6.0, True),
    "Q5_K_S": Quant(16, 5.6, False),
    "Q5_K_M": Quant(17, 5.8, False),
    "Q6_K": Quant(18, 6.6, False),
    "Q8_0": Quant(7, 8.5, True),
}


def quant_of(name: str) -> str:
    """The name in QUANTS, from a name in any case. Raises UsageError."""
    if name.upper() not in QUANTS:
        raise UsageError(f"the quantization is {name!r}, expected one of {', '.join(QUANTS)}")
    return name.upper()


def quantize(
    about: Header, destination: Path, kind: str, *, n_threads: int, progress: LoadProgress | None = None
) -> None:
    """Write the model of `about` with its weights as `kind`.

    `progress` receives the share that is done; it cannot stop llama.cpp. llama.cpp crashes on some files, so call this
    in a child process. Delete `destination` after an error. Raises UsageError and BackendError.
    """
    lib, quant = bindings(), QUANTS[quant_of(kind)]
    params = lib.llama_model_quantize_default_params()
    params.nthread = n_threads
    params.ftype = quant.ftype
    params.pure = quant.pure
    params.allow_requantize = True

    def hear(_level: str, line: str) -> None:
        step = _STEP.match(line)
        if step is not None and progress is not None:
            progress((int(step[1]) - 1) / int(step[2]))

    before, log.sink = log.sink, hear
    log.clear()
    try:
        status = apart(
            lambda: lib.llama_model_quantize(os.fsencode(about.path), os.fsencode(destination), ctypes.byref(params)),
            log.read,
            Cancel(),
        )
    finally:
        log.sink = before
    if status:
        reason = log.reason() or "no reason given"
        raise BackendError(f"llama.cpp cannot store {about.path.name} as {kind}: {reason}")
