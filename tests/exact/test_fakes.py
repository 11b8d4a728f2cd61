"""The fakes and the enumeration themselves: a tolerant fake, or a missed branch, would prove nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from specllama.base.errors import ContextFull, Interrupted
from specllama.core.distribution import Distribution
from specllama.core.types import Caps, Chooser
from tests.enumeration import ScriptedChooser, law_of, tv
from tests.fakes import ContractBroken, FakeModel, RandomTable

COIN = Distribution.dense([0.25, 0.75])


def model(**settings: object) -> FakeModel:
    return FakeModel(RandomTable(5, 60), 5, **settings)  # type: ignore[arg-type]


def test_every_branch_is_weighed() -> None:
    """A run with certain, impossible and even decisions, of different depths."""

    def run(choose: Chooser) -> str:
        assert choose.flip(1.0)
        assert not choose.flip(0.0)
        if choose.flip(0.5):
            return "heads"
        return f"tails {choose.pick(COIN)}"

    assert law_of(run) == {"heads": 0.5, "tails 0": 0.125, "tails 1": 0.375}


def test_an_edge_draw_lets_the_impossible_show() -> None:
    """`closed` models `u <= prob`: an outcome of probability 0 appears, with weight 0."""
    assert law_of(lambda choose: choose.flip(0.0), closed=True) == {True: 0.0, False: 1.0}


def test_a_run_that_is_no_function_of_its_choices_is_refused() -> None:
    """Hidden state between replays would give weights to the wrong outcomes."""
    probs = iter([0.5, 0.6, 0.7])
    with pytest.raises(ContractBroken, match="function of the choices"):
        law_of(lambda choose: choose.flip(next(probs)))
    lengths = iter([2, 1, 1])
    with pytest.raises(ContractBroken, match="function of the choices"):
        law_of(lambda choose: [choose.flip(0.5) for _ in range(next(lengths))].count(True))


def test_laws_without_unit_mass_and_nan_are_refused() -> None:
    """A lost branch, which only makes all others a little lighter."""
    with pytest.raises(ContractBroken, match="mass"):
        law_of(lambda choose: choose.pick(Distribution.dense([0.5, 0.4])))
    with pytest.raises(ContractBroken, match="nan"):
        law_of(lambda choose: choose.flip(math.nan))


def test_the_distance_of_laws_is_the_mass_that_must_move() -> None:
    """Outcomes that only one of the laws has must count."""
    assert tv({"a": 0.5, "b": 0.5}, {"a": 0.25, "c": 0.75}) == 0.75
    assert tv({"a": 1.0}, {"a": 1.0}) == 0.0


def test_a_script_cannot_ask_for_the_impossible() -> None:
    """A scripted path that no generator could take."""
    with pytest.raises(ContractBroken):
        ScriptedChooser(flips=[True]).flip(0.0)
    with pytest.raises(ContractBroken):
        ScriptedChooser(flips=[False]).flip(1.0)
    with pytest.raises(ContractBroken):
        ScriptedChooser(picks=[2]).pick(COIN)


def test_rows_follow_their_own_line() -> None:
    """Logits of a chain and of a tree are those of each token's history."""
    fake = model()
    fake.feed((1, 2))
    rows = fake.eval((3, 4, 0, 1), parents=(-1, -1, 0))
    lines = [(1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 0), (1, 2, 3, 4, 1)]
    assert all(np.array_equal(row, fake.table(line)) for row, line in zip(rows, lines, strict=True))
    fake.keep(3, (0, 2))
    assert fake.tokens == (1, 2, 3, 4, 1)


@pytest.mark.parametrize("spoil", [lambda fake: fake.feed((1,)), lambda fake: fake.eval((1,))], ids=["feed", "eval"])
def test_rows_are_read_only_and_die_with_the_next_call(spoil: Callable[[FakeModel], object]) -> None:
    """A stale view that goes unnoticed: in llama.cpp it holds other numbers."""
    fake = model()
    rows = fake.eval((1, 2))
    with pytest.raises(ValueError, match="read-only"):
        rows[0, 0] = 1.0
    fake.keep(1, ())
    assert np.isfinite(rows).all(), "keep and truncate leave the rows alone"
    spoil(fake)
    assert np.isnan(rows).all()


@pytest.mark.parametrize(
    "misuse",
    [
        lambda fake: fake.eval(()),
        lambda fake: fake.eval((1, 5)),
        lambda fake: fake.feed((-1,)),
        lambda fake: fake.eval((1, 2, 3, 4, 1)),
        lambda fake: fake.eval((1, 2), parents=(0,)),
        lambda fake: fake.eval((1, 2), parents=()),
        lambda fake: fake.truncate(3),
        lambda fake: fake.keep(1, ()),
        lambda fake: (fake.eval((1, 2)), fake.keep(2, ())),
        lambda fake: (fake.eval((1, 2)), fake.keep(3, (1,))),
        lambda fake: (fake.eval((1, 2, 3)), fake.keep(3, (1,))),
        lambda fake: (fake.eval((1, 2, 3), parents=(-1, -1)), fake.feed((1,))),
        lambda fake: (fake.eval((1, 2, 3), parents=(-1, -1)), fake.truncate(4)),
        lambda fake: (fake.eval((1, 2)), fake.truncate(3), fake.keep(3, (0,))),
        lambda fake: (fake.eval((1,)), fake.grow((1, 2), (-1,))),
        lambda fake: (fake.eval((1,)), fake.grow((1, 2), (-1, 2))),
        lambda fake: (fake.eval((1,)), fake.keep(3, ()), fake.grow((1,), (-1,))),
        lambda fake: (fake.eval((1,)), fake.grow((1, 2), (-1, -1)), fake.eval((1,))),
        lambda fake: (fake.eval((1,)), fake.grow((1, 2), (-1, -1)), fake.truncate(4)),
        lambda fake: (fake.eval((1,)), fake.grow((1, 2), (-1, 0)), fake.keep(3, (1,))),
        lambda fake: (fake.eval((1,)), fake.grow((1, 2, 3), (-1, -1, -1))),
        lambda fake: fake.eval((1, 2, 3, 4), parents=(-1, -1, -1)),
    ],
)
def test_misuse_is_refused(misuse: Callable[[FakeModel], object]) -> None:
    """A fake that tolerates a call on which llama.cpp aborts or returns other numbers."""
    fake = model(caps=Caps(tree=True, max_leaves=2, max_block=4))
    fake.feed((0, 1))
    with pytest.raises(ContractBroken):
        misuse(fake)


def test_a_tree_that_grows_has_the_rows_of_its_lines_and_keeps_one_of_them() -> None:
    """A row of a sibling or of the batch's order; a KV with another branch."""
    fake = model()
    fake.feed((0, 1))
    fake.eval((2,))
    first = fake.grow((3, 4), (-1, -1)).copy()
    second = fake.grow((0, 1, 2), (1, 0, 1)).copy()
    lines = [(3,), (4,), (4, 0), (3, 1), (4, 2)]
    for row, line in zip([*first, *second], lines, strict=True):
        assert np.array_equal(row, fake.table((0, 1, 2, *line)))
    fake.keep(3, (1, 4))
    assert fake.tokens == (0, 1, 2, 4, 2)


def test_a_full_context_raises_and_keeps_what_it_has() -> None:
    """An overflow that wraps around."""
    fake = model(n_ctx=3)
    fake.feed((0, 1))
    with pytest.raises(ContextFull):
        fake.eval((1, 2))
    assert fake.tokens == (0, 1)
    fake.eval((1,))


def test_an_interrupted_feed_leaves_its_first_half() -> None:
    """As an aborted prefill does: chunks that were computed stay."""

    def stop(n_call: int, name: str) -> None:
        raise Interrupted("stopped")

    fake = model(hook=stop)
    with pytest.raises(Interrupted):
        fake.feed((0, 1, 2, 3))
    assert fake.tokens == (0, 1)
    with pytest.raises(Interrupted):
        fake.eval((2,))
    assert fake.tokens == (0, 1)


def test_tables_depend_on_the_whole_history() -> None:
    """Rows that only look at the last token would hide a wrong KV."""
    table = RandomTable(4, 61)
    histories = [(), (0,), (0, 0), (1, 0), (0, 1, 0), (0, 0, 0), (2, 1, 0)]
    rows = {tuple(table(history).tolist()) for history in histories}
    assert len(rows) == len(histories)
    assert np.array_equal(table((1, 0)), RandomTable(4, 61)((1, 0)))
