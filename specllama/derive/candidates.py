"""Candidates for a draft: made of one parent, measured beside the target, and removed again unless they are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

from specllama.base.errors import ConfigError
from specllama.derive import make as derive
from specllama.llama.header import EMBEDDING, HEAD, Header
from specllama.llama.kernel_path import KernelPath
from specllama.llama.quantize import QUANTS
from specllama.pairs import derived as drafts
from specllama.pairs.derived import Derived, Recipe
from specllama.tuning.tune import DRAFT, MeasuredDraft, Tuning

PathsOf = Callable[[Path], Sequence[KernelPath]]

MAKING = 1.0  # weight of making a draft in the time
# The least time for a byte of weights in another type: Q4_0 against the mixture Q4_K_M (AMX; 0.8 on other CPUs).
FASTEST_TYPE = 0.65


def pass_bytes(parent: Header, recipe: Recipe | None = None) -> float:
    """Bytes of weights that a pass over one token reads, about, in the draft that the recipe makes."""
    recipe = recipe or Recipe()
    kept = recipe.n_vocab / parent.n_vocab if recipe.n_vocab else 1.0
    bits = QUANTS[recipe.quant].bits if recipe.quant else 0.0
    return sum(
        (prod(tensor.shape) * bits / 8 if bits else tensor.n_bytes)
        * (kept if tensor.name in (HEAD, EMBEDDING) else 1.0)
        for tensor in parent.pass_tensors
    )


def least_cost(parent: Header, recipe: Recipe, base: Recipe | None = None) -> float:
    """The least cost of a pass of the draft that `recipe` makes, in passes of the one that `base` makes."""
    base = base or Recipe()
    share = pass_bytes(parent, recipe) / pass_bytes(parent, base)
    return share if recipe.quant == base.quant else FASTEST_TYPE * share


def ready(parent: Header, recipe: Recipe) -> Derived | None:
    """The draft of this recipe, if it exists and is not stale."""
    path = drafts.place(parent.path, recipe)
    try:
        derived = drafts.read(path) if path.is_file() else None
    except ConfigError:  # a damaged one is made again
        return None
    true = derived is not None and derived.parent.path == parent.path.resolve() and not drafts.stale(derived)
    return derived if true else None


class Candidates:
    """Makes and measures drafts. `kept`: the one that stays at the end, besides those that were there before."""

    def __init__(self, parent: Header, tuning: Tuning, paths_of: PathsOf) -> None:
        self.kept: Path | None = None
        self.made: list[Path] = []
        self._parent, self._tuning, self._paths_of = parent, tuning, paths_of

    def measure(self, path: Path) -> MeasuredDraft:
        """Measure a draft that exists. Raises what `Tuning.try_draft` raises."""
        seconds, tell = self._tuning.budget.piece(DRAFT)
        return self._tuning.try_draft(path, self._paths_of(path), seconds, tell)

    def attempt(self, recipe: Recipe) -> tuple[Derived, MeasuredDraft]:
        """Make a draft, unless it exists, and measure it. Raises what `derive.make` and `Tuning.try_draft` raise."""
        recipe = derive.checked(self._parent, recipe)
        derived = ready(self._parent, recipe)
        if derived is None:
            path = drafts.place(self._parent.path, recipe)
            if not path.exists():  # else it was there before, and stays
                self.made.append(path)
            _, tell = self._tuning.budget.piece(MAKING)
            derive.make(self._parent, recipe, path, lambda what, share: tell(f"{recipe.name}: {what}", share))
            derived = drafts.record(path, recipe, self._parent.path)
        return derived, self.measure(derived.path)


@contextmanager
def candidates(parent: Header, tuning: Tuning, paths_of: PathsOf) -> Iterator[Candidates]:
    """Removes at the end what was made and is not kept, or all of it after an error. The caller holds `drafts.LOCK`."""
    drafts.sweep()
    several = Candidates(parent, tuning, paths_of)
    try:
        yield several
    except BaseException:
        several.kept = None
        raise
    finally:
        for path in several.made:
            if path != several.kept:
                drafts.discard(path)
