"""Kernel paths: the layout of a model's weights, which decides the kernels that compute with them.

llama.cpp keeps matrices as in the file, or rearranged in the CPU's extra buffer types: its own, and that of our
kernels. Each layout has its own cost of a block against one row. A path is fixed when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specllama.kernels.library import BUFFER_TYPE
from specllama.llama.header import Header
from specllama.llama.load_plan import LoadOptions, LoadPlan, rearranged_bytes


@dataclass(frozen=True, slots=True)
class KernelPath:
    """Rearranged weights, or those of the file."""

    extra_bufts: bool = True
    own: bool = False  # our kernels come before llama.cpp's

    @classmethod
    def of(cls, options: LoadOptions | LoadPlan) -> KernelPath:
        return cls(options.use_extra_bufts, options.kernels)

    def applied(self, options: LoadOptions) -> LoadOptions:
        """The options on this path; our kernels stay off where the options switch them off."""
        return replace(options, use_extra_bufts=self.extra_bufts, kernels=self.own and options.kernels)

    @property
    def name(self) -> str:
        """For reports."""
        if not self.extra_bufts:
            return "weights as in the file"
        return "specllama's kernels" if self.own else "rearranged weights"

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "extra_bufts": self.extra_bufts, "own": self.own}


DEFAULT = KernelPath()  # llama.cpp's own choice
OWN = KernelPath(own=True)  # our kernels, and llama.cpp's choice for the rest
AS_IN_FILE = KernelPath(extra_bufts=False)


def candidates(header: Header, extra: Sequence[str]) -> tuple[KernelPath, ...]:
    """The paths to measure for a file on a CPU with the extra buffer types `extra`; by its types, no two are equal."""
    theirs = [name for name in extra if name != BUFFER_TYPE]
    # F32 alone is not worth a path: ours are no faster there.
    ours = rearranged_bytes(header, [BUFFER_TYPE]) - header.weight_bytes.get("f32", 0)
    has_ours = len(theirs) < len(extra) and ours > 0
    as_in_file = [AS_IN_FILE] if rearranged_bytes(header, theirs) else []
    return (*([OWN] if has_ours else []), DEFAULT, *as_in_file)
