"""Many texts in one KV cache: rows against those of each text alone, and the cells against what llama.cpp says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from specllama import llama
from specllama.base.errors import (
    BackendError,
    ContextFull,
    Interrupted,
    MemoryShort,
    RollbackRefused,
    UnsupportedModel,
    UsageError,
)
from specllama.core.arrays import FloatArray
from specllama.core.types import Cancel, Part
from specllama.llama import LlamaModel, LlamaSlots, load_plan
from specllama.llama import slots as slots_module
from tests import tiny
from tests.llama.test_model import broken
from tests.llama.test_tree import path_to

N_VOCAB = 60
N_SLOTS = 4
N_CTX = 64
ARCHES = ("llama", "qwen2", "gemma3")
MAX_LEAVES = 8
PREFIX = [(5 * index + 1) % N_VOCAB for index in range(23)]


@pytest.fixture(scope="module", params=ARCHES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers, beside it the same quantized; of gemma3, one layer has a window that the texts leave."""
    sizes = {"vocabulary": tiny.letters(N_VOCAB), "n_embd": 64, "n_head": 4, "n_head_kv": 2, "n_ctx": 1024}
    window = {"sliding_window": 16} if request.param == "gemma3" else {}
    whole = tiny.write_model(tmp_path_factory.mktemp("slots") / "f32.gguf", arch=request.param, **sizes, **window)
    llama.requantize(whole, whole.with_name("q4_0.gguf"), "q4_0")
    return whole


# With our kernels, which make rows equal bit for bit, and with those of llama.cpp, which round activations.
with_kernels = pytest.mark.parametrize("model", [True, False], ids=["ours", "theirs"], indirect=True)
with_kernels_and_trees = pytest.mark.parametrize("branching", [True, False], ids=["ours", "theirs"], indirect=True)


@contextmanager
def loaded(path: Path, kernels: bool, **options: object) -> Iterator[LlamaModel]:
    with tiny.load(path.with_name("q4_0.gguf") if kernels else path, kernels=kernels, **options) as model:
        if kernels and not model.plan.kernels:
            pytest.skip("no kernels on this machine")
        yield model


@pytest.fixture
def model(request: pytest.FixtureRequest, path: Path) -> Iterator[LlamaModel]:
    with loaded(path, getattr(request, "param", False), n_ctx=320) as model:
        yield model


@pytest.fixture
def branching(request: pytest.FixtureRequest, path: Path) -> Iterator[LlamaModel]:
    with loaded(path, getattr(request, "param", False), max_leaves=MAX_LEAVES, max_block=12) as model:
        yield model


def opened(model: LlamaModel, **options: int) -> LlamaSlots:
    return LlamaSlots(model, **{"n_slots": N_SLOTS, "n_ctx": N_CTX, "max_rows": 40, **options})


def require_equal(model: LlamaModel, found: FloatArray, expected: FloatArray, what: object) -> None:
    if model.plan.kernels:
        assert np.array_equal(found, expected), what
    else:
        np.testing.assert_allclose(found, expected, atol=0.05, err_msg=str(what))


def alone(model: LlamaModel, text: Sequence[int], n_rows: int) -> FloatArray:
    """The rows of the last tokens of a text that is alone in a KV cache."""
    model.truncate(0)
    model.feed(text[: len(text) - n_rows])
    return np.array(model.eval(text[len(text) - n_rows :])) if n_rows else np.empty((0, model.vocab_size), np.float32)


class History:
    """Random requests in all slots: they join, compute, reject, finish."""

    def __init__(self, slots: LlamaSlots, seed: int, prefix: Sequence[int] = ()) -> None:
        self.slots, self.rng = slots, np.random.default_rng(seed)
        self.texts = [list(prefix) for _ in range(slots.n_slots)]
        self.n_prefix = len(prefix)

    def wish(self, slot: int) -> Part | None:
        """What the slot computes next, if it takes part in the pass."""
        rng, text = self.rng, self.texts[slot]
        if rng.random() < 0.2:
            return None
        n_left = len(text)
        if rng.random() < 0.1 or n_left == self.slots.n_ctx:
            n_left = int(rng.integers(0, max(n_left, 1))) if rng.random() < 0.3 else min(n_left, self.n_prefix)
            self.slots.truncate(slot, n_left)
            del text[n_left:]
        n = min(int(rng.integers(1, 11)), self.slots.n_ctx - n_left)
        return Part(slot, tuple(rng.integers(0, N_VOCAB, n).tolist()), int(rng.integers(0, n + 1)))

    def step(self) -> list[tuple[list[int], FloatArray]]:
        """One pass; returns the text of each part and its rows."""
        parts = [part for slot in range(self.slots.n_slots) if (part := self.wish(slot)) is not None]
        found = []
        for part, rows in zip(parts, self.slots.run(parts), strict=True):
            text = self.texts[part.slot]
            text += part.tokens
            found.append((list(text), np.array(rows)))
        for part in parts:
            if part.n_rows > 1:
                n_kept = int(self.rng.integers(0, part.n_rows))
                pending = len(self.texts[part.slot]) - part.n_rows + 1
                self.slots.keep(part.slot, pending, range(n_kept))
                del self.texts[part.slot][pending + n_kept :]
        return found

    def play(self, n_steps: int, plain: LlamaModel) -> None:
        for step in range(n_steps):
            for text, rows in self.step():
                require_equal(plain, rows, alone(plain, text, len(rows)), (step, text))
            assert [self.slots.length(slot) for slot in range(self.slots.n_slots)] == [*map(len, self.texts)]


@pytest.mark.slow
@with_kernels
def test_after_any_history_the_rows_are_those_of_the_text_alone(model: LlamaModel) -> None:
    """Prevents: a text that sees another one, a rejected token, or a cell that another text took over."""
    with opened(model) as slots:
        History(slots, 1).play(40, model)


@with_kernels
@pytest.mark.parametrize("path", ["llama", "gemma3"], indirect=True)
def test_long_texts_that_are_read_in_turns_have_the_rows_of_each_alone(model: LlamaModel) -> None:
    """Prevents: another sum where a chunk of attention, 256 positions, ends between the cells of other texts."""
    texts = [[(slot + 7 * index * index) % N_VOCAB for index in range(250 + 7 * slot)] for slot in range(3)]
    with opened(model, n_ctx=300) as slots:
        for at in range(0, 270, 11):
            slots.run([Part(slot, tuple(text[at : at + 11]), 0) for slot, text in enumerate(texts) if text[at:]])
        for n in (1, 5):
            more = tuple(range(n))
            for text, rows in zip(texts, slots.run([Part(slot, more, n) for slot in range(3)]), strict=True):
                text += more
                require_equal(model, rows, alone(model, text, n), len(text))


@with_kernels
@pytest.mark.parametrize("path", ["gemma3"], indirect=True)
def test_slots_of_a_model_with_a_cache_of_the_window_keep_everything(path: Path, model: LlamaModel) -> None:
    """Prevents: texts that lose what others push out of a cache of the window alone."""
    texts = [[(slot + 7 * index * index) % N_VOCAB for index in range(90)] for slot in range(6)]
    with (
        loaded(path, bool(model.plan.kernels), rollback="window") as windowed,
        opened(windowed, n_slots=6, n_ctx=100, max_rows=90) as slots,
    ):
        for slot, text in enumerate(texts):
            slots.run([Part(slot, tuple(text), 0)])
        for slot in range(6):
            slots.truncate(slot, 60)
        for text, rows in zip(texts, slots.run([Part(slot, (1, 2), 2) for slot in range(6)]), strict=True):
            require_equal(model, rows, alone(model, [*text[:60], 1, 2], 2), text)


def planned_cells(slots: LlamaSlots) -> dict[int, int]:
    """Position of the token in each cell, as the slots know them; free cells are left out."""
    found = dict[int, int]()
    for slot in slots._slots:
        found.update({cell: cell for cell in range(slot.n_shared)})
        n_text = slot.n_used if slot.tree is None else slot.tree.root + 1 - slot.n_shared
        positions = [*range(slot.n_shared, slot.n_shared + n_text)]
        positions += [slot.tree.position(node) for node in range(slot.n_used - n_text)] if slot.tree else []
        found.update(zip(slot.cells, positions, strict=False))
        spare = slot.cells[len(slot.cells) - len(slot.spare) :]
        found.update(zip(spare, (position for _, position in slot.spare), strict=True))
    return found


@pytest.fixture
def cells_of_passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[int, int]]]:
    """What llama.cpp says before each pass about each of its caches: the position of the token in each cell."""
    monkeypatch.setenv("LLAMA_KV_CACHE_DEBUG", "3")
    found: list[dict[int, int]] = []

    def read(level: str, line: str) -> None:
        words = line.replace("*", "").split()
        if "find_slot: stream" in line and "used" in line:
            found.append({})
            read.at = 0
        elif len(line) > 300 and set(words) <= {".", *map(str, range(1024))}:  # 64 cells in a line
            found[-1].update({read.at + index: int(word) for index, word in enumerate(words) if word != "."})
            read.at += 64

    llama.set_log(read)
    yield found
    llama.set_log(None)


def require_planned_cells(slots: LlamaSlots, history: History, n_steps: int, found: list[dict[int, int]]) -> None:
    """Raises AssertionError if llama.cpp's cells before a pass are not the planned ones."""
    compute, planned = slots._compute, list[dict[int, int]]()

    def look(tokens: Sequence[int]) -> None:
        planned.append(planned_cells(slots))
        n_free = max(planned[-1], default=-1) + 1 - len(planned[-1])
        assert n_free <= len(tokens)
        found.clear()
        compute(tokens)
        assert found
        assert all(each == planned[-1] for each in found), (len(planned), found[0], planned[-1])

    slots._compute = look  # type: ignore[method-assign]
    for _ in range(n_steps):
        history.step()
        for slot in slots._slots:
            assert slot.cells == sorted(slot.cells)
            assert len(slot.cells) == slot.n_used + len(slot.spare)
        n_shared = max(slot.n_shared for slot in slots._slots)
        own = sorted(cell for slot in slots._slots for cell in slot.cells)
        assert own == [*range(n_shared, slots._n_cells)]


@pytest.mark.parametrize("path", ["llama", "gemma3"], indirect=True)
def test_the_cells_of_a_text_ascend_and_none_is_free_among_them(
    model: LlamaModel, cells_of_passes: list[dict[int, int]]
) -> None:
    """Prevents: attention that adds in another order than for the text alone, so that near-ties turn."""
    with opened(model) as slots:
        require_planned_cells(slots, History(slots, 2), 20, cells_of_passes)


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("llama", "batch not sorted"),
        ("llama", "cells not kept as spare"),
        ("llama", "too many cells freed"),
        ("gemma3", "one holder of a cell outside the window"),
    ],
    indirect=["path"],
)
def test_a_fault_in_the_order_of_the_cells_is_seen(
    model: LlamaModel, cells_of_passes: list[dict[int, int]], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Prevents: a test of the cells that passes whatever the cells are."""
    if fault == "one holder of a cell outside the window":
        for module in (slots_module, load_plan):
            monkeypatch.setattr(module, "n_copies_of_lines", lambda n_swa: 1)
    with opened(model) as slots:
        if fault == "batch not sorted":
            monkeypatch.setattr(slots_module.np, "argsort", lambda cells: np.arange(len(cells)))
        elif fault == "cells not kept as spare":
            monkeypatch.setattr(slots, "_copy", lambda *a: None)
        elif fault == "too many cells freed":
            remove = slots._remove
            monkeypatch.setattr(slots, "_remove", lambda line, begin, end: remove(line, begin, end + (end > 0)))
        with pytest.raises(AssertionError):
            require_planned_cells(slots, History(slots, 2), 60, cells_of_passes)


@pytest.mark.slow
def test_the_window_is_that_of_llama_cpp(tmp_path: Path) -> None:
    """Prevents: wrong logits of a model without the key of its window: llama.cpp gives Gemma 2 one of 4096 tokens."""
    path = tiny.write_model(tmp_path / "gemma2.gguf", arch="gemma2", n_vocab=40, n_ctx=8192)
    rng = np.random.default_rng(1)
    long, short = rng.integers(0, 37, 4096 + 600).tolist(), rng.integers(0, 37, 700).tolist()
    with tiny.load(path, n_ctx=6000, n_batch=512) as model, opened(model, n_slots=2, n_ctx=6000, max_rows=512) as slots:
        assert model.header.n_swa == 0
        slots.run([Part(1, tuple(short[:10]), 0)])
        for at in range(0, len(long), 500):
            slots.run([Part(0, tuple(long[at : at + 500]), 0)])
        slots.truncate(1, 5)
        for at in (5, 355):  # takes cells that are free for llama.cpp
            slots.run([Part(1, tuple(short[at : at + 345]), 1)])
        slots.truncate(0, 60)
        rows = slots.run([Part(0, (1, 2, 3), 3)])[0]
        require_equal(model, rows, alone(model, [*long[:60], 1, 2, 3], 3), "after the window")


def test_recurrent_layers_are_those_that_llama_cpp_finds(model: LlamaModel) -> None:
    """Prevents: a pool over a model whose architecture our table lacks."""
    model.has_states = True
    with pytest.raises(UnsupportedModel):
        opened(model)


@with_kernels
@pytest.mark.parametrize("max_rows", [10, 40])
def test_a_shared_beginning_is_read_once(model: LlamaModel, max_rows: int) -> None:
    """Prevents: a system prompt that is computed for every request, or that lies in other cells for some of them."""
    with opened(model, max_rows=max_rows) as slots:
        sizes, compute = list[int](), slots._compute
        slots._compute = lambda tokens: sizes.append(len(tokens)) or compute(tokens)  # type: ignore[method-assign]
        slots.share(PREFIX)
        assert sum(sizes) == len(PREFIX)
        assert max(sizes) <= max_rows
        assert [slots.length(slot) for slot in range(N_SLOTS)] == [len(PREFIX)] * N_SLOTS
        rows = slots.run([Part(slot, (slot, 7), 2) for slot in range(N_SLOTS)])
        for slot, found in enumerate(rows):
            require_equal(model, found, alone(model, [*PREFIX, slot, 7], 2), slot)
        assert slots._n_cells == len(PREFIX) + 2 * N_SLOTS
        with pytest.raises(ValueError, match="use"):
            slots.share(PREFIX)


@with_kernels
@pytest.mark.parametrize("path", ["llama", "gemma3"], indirect=True)
def test_slots_leave_a_shared_beginning_one_by_one(model: LlamaModel) -> None:
    """Prevents: shared tokens that are lost for the others, or cells that belong to no slot any more."""
    with opened(model) as slots:
        for seed in range(2):
            slots.share(PREFIX)
            history = History(slots, 20 + seed, PREFIX)
            history.play(20, model)
            assert slots._n_cells <= N_SLOTS * N_CTX
            for slot in range(N_SLOTS):
                slots.truncate(slot, min(slot, slots.length(slot)))
            for slot in range(N_SLOTS):
                slots.truncate(slot, 0)
        slots.share([])
        assert slots.length(0) == 0
        with pytest.raises(ContextFull):
            slots.share([1] * (N_CTX + 1))
        History(slots, 30).play(5, model)


@pytest.mark.parametrize("path", ["llama", "gemma3"], indirect=True)
def test_the_cells_of_a_text_ascend_behind_a_shared_beginning(
    model: LlamaModel, cells_of_passes: list[dict[int, int]]
) -> None:
    """Prevents: a text that leaves the shared beginning and goes on in cells below."""
    with opened(model) as slots:
        slots.share(PREFIX)
        require_planned_cells(slots, History(slots, 8, PREFIX), 20, cells_of_passes)


def test_a_pass_holds_as_many_tokens_as_were_asked_for(model: LlamaModel) -> None:
    """Prevents: a pass that llama.cpp ends the process for, and one that it computes in two."""
    with opened(model, max_rows=24) as slots:
        for _ in range(2):
            texts = [[(3 * slot + index) % N_VOCAB for index in range(6)] for slot in range(N_SLOTS)]
            rows = slots.run([Part(slot, tuple(text), 6) for slot, text in enumerate(texts)])
            for text, found in zip(texts, rows, strict=True):
                require_equal(model, found, alone(model, text, 6), text)
            with pytest.raises(ValueError, match="24"):
                slots.run([Part(slot, (1,) * (6 + slot // 3), 0) for slot in range(N_SLOTS)])
            for slot in range(N_SLOTS):
                assert slots.length(slot) == 6
                slots.truncate(slot, 0)


def test_a_full_slot_is_an_error_before_anything_is_computed(model: LlamaModel) -> None:
    """Prevents: a pass of many requests that is lost because one of them has no room."""
    with opened(model) as slots:
        text = [index % N_VOCAB for index in range(N_CTX)]
        slots.run([Part(0, tuple(text[:30]), 0), Part(1, (1, 2), 1)])
        slots.run([Part(0, tuple(text[30:]), 0), Part(1, (3,), 1)])
        for n_rows in (0, 1):
            with pytest.raises(ContextFull):
                slots.run([Part(1, (4,), 1), Part(0, (5,), n_rows)])
        assert [slots.length(slot) for slot in range(N_SLOTS)] == [N_CTX, 3, 0, 0]
        require_equal(model, slots.run([Part(1, (4,), 1)])[0], alone(model, [1, 2, 3, 4], 1), "the other goes on")
        slots.truncate(0, N_CTX - 1)
        require_equal(model, slots.run([Part(0, (9,), 1)])[0], alone(model, [*text[:-1], 9], 1), "the last cell")


@pytest.mark.parametrize("path", ["llama"], indirect=True)
@pytest.mark.parametrize(
    "wrong",
    [
        [Part(0, (1,), 1), Part(0, (2,), 1)],  # two parts of one slot
        [Part(0, (), 0)],
        [Part(0, (1, 2), 3)],
        [Part(0, (1,), -1)],
        [Part(0, (N_VOCAB,), 1)],
        [Part(0, (-1,), 1)],
        [Part(0, (1,) * 34, 34)],  # more rows than a block has
        [Part(0, (1,), 1, grows=True)],
    ],
)
def test_a_wrong_part_is_refused_and_changes_nothing(model: LlamaModel, wrong: list[Part]) -> None:
    """Prevents: an assertion of llama.cpp, which ends the process, or a slot that is lost by a caller's mistake."""
    with opened(model) as slots:
        slots.run([Part(0, (1, 2, 3), 0), Part(1, (4,), 0)])
        with pytest.raises(ValueError, match=r"."):
            slots.run([Part(1, (5,), 1), *wrong])
        for call in (lambda: slots.truncate(0, 4), lambda: slots.truncate(0, -1), lambda: slots.keep(0, 3, [1])):
            with pytest.raises((ValueError, UnsupportedModel)):
                call()
        assert [slots.length(0), slots.length(1)] == [3, 1]
        assert slots.run([]) == []
        require_equal(model, slots.run([Part(0, (4,), 1)])[0], alone(model, [1, 2, 3, 4], 1), wrong)


@pytest.mark.parametrize("path", ["llama"], indirect=True)
def test_a_stop_empties_all_slots(model: LlamaModel) -> None:
    """Prevents: cells of a stopped pass that stay, and lengths that hide them."""
    with opened(model) as slots:
        history, cancel = History(slots, 3), Cancel()
        slots.watch(cancel)
        history.play(5, model)
        cancel.set()
        with pytest.raises(Interrupted):
            slots.run([Part(0, (1,), 1)])
        assert [slots.length(slot) for slot in range(N_SLOTS)] == [0] * N_SLOTS
        cancel.clear()
        History(slots, 4).play(10, model)


@pytest.mark.parametrize("path", ["llama"], indirect=True)
@pytest.mark.parametrize(
    ("status", "error"),
    [(1, ContextFull), (-1, BackendError), (-2, MemoryShort), (-3, BackendError), (0, KeyboardInterrupt)],
)
def test_a_failed_pass_empties_all_slots(model: LlamaModel, status: int, error: type[BaseException]) -> None:
    """Prevents: free cells among the used ones, which would break the order of the cells from then on."""
    with opened(model) as slots:
        decode = slots._lib.llama_decode

        def fail(context: object, batch: object) -> int:
            decode(context, batch)
            if not status:
                raise KeyboardInterrupt
            return status

        History(slots, 5).play(5, model)
        with broken(slots, llama_decode=fail), pytest.raises(error):
            slots.run([Part(0, (1, 2), 1), Part(1, (1,), 1)])
        assert [slots.length(slot) for slot in range(N_SLOTS)] == [0] * N_SLOTS
        History(slots, 6).play(10, model)


@pytest.mark.parametrize("path", ["llama"], indirect=True)
@pytest.mark.parametrize("at", ["keep", "run"])
def test_a_refused_removal_empties_all_slots(model: LlamaModel, at: str) -> None:
    """Prevents: a rejected token that stays in the KV cache, and a length that hides it."""
    with opened(model) as slots:
        slots.run([Part(0, (1, 2, 3), 3), Part(1, (1,), 1)])
        slots.truncate(0, 2)
        with broken(slots, llama_memory_seq_rm=lambda *a: False), pytest.raises(RollbackRefused):
            if at == "keep":
                slots.keep(0, 1, ())
            slots.run([Part(0, (1,), 1)])
        assert [slots.length(slot) for slot in range(N_SLOTS)] == [0] * N_SLOTS


@pytest.mark.parametrize("path", ["llama"], indirect=True)
def test_closing_the_model_closes_its_slots(path: Path) -> None:
    """Prevents: a context on weights that are freed, which ends the process."""
    model = tiny.load(path)
    slots, other = opened(model), opened(model)
    rows = slots.run([Part(0, (1, 2), 2)])[0]
    assert rows.shape == (2, N_VOCAB)
    assert not rows.flags.writeable
    other.close()
    other.close()
    assert model.eval([1]).shape == slots.run([Part(1, (1,), 1)])[0].shape
    model.close()
    for call in (lambda: slots.run([Part(0, (1,), 1)]), lambda: other.run([Part(0, (1,), 1)])):
        with pytest.raises(BackendError):
            call()
    slots.close()


@pytest.mark.parametrize("path", ["llama"], indirect=True)
def test_slots_that_nobody_holds_are_freed(path: Path) -> None:
    """Prevents: the KV cache of a pool that stays until the model is closed."""
    with tiny.load(path) as model:
        alive = len(llama.open._alive)
        for _ in range(3):
            opened(model).run([Part(0, (1, 2), 2)])
        assert len(llama.open._alive) == alive
    slots = opened(tiny.load(path))  # keeps its model
    assert slots.run([Part(0, (1, 2), 2)])[0].shape == (2, N_VOCAB)
    slots.close()


@pytest.mark.parametrize("arch", ["mamba", "jamba"])
def test_recurrent_layers_are_refused(tmp_path: Path, arch: str) -> None:
    """Prevents: states of several texts that are mixed, or lost at a rejection."""
    with tiny.load(tiny.write_model(tmp_path / "m.gguf", arch=arch)) as loaded, pytest.raises(UnsupportedModel):
        opened(loaded)


@pytest.mark.parametrize("path", ["llama", "gemma3"], indirect=True)
def test_a_pass_gives_no_more_logits_than_are_planned(model: LlamaModel) -> None:
    """Prevents: memory for logits of every token of a pass, and an assertion of llama.cpp for too many of them."""
    with opened(model, max_outputs=3) as slots, opened(model) as others:
        assert slots.plan.need.compute < others.plan.need.compute
        parts = [Part(0, (1, 2, 3), 2), Part(1, (4,), 1)]
        for mine, other in zip(slots.run(parts), others.run(parts), strict=True):
            assert np.array_equal(mine, other)
        with pytest.raises(ValueError, match="3 tokens"):
            slots.run([Part(0, (1, 2), 2), Part(1, (4, 5), 2)])
        assert (slots.length(0), slots.length(1)) == (3, 1)


@pytest.mark.parametrize("path", ["llama", "gemma3"], indirect=True)
def test_what_cannot_be_opened_is_told(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: an assertion of llama.cpp, and a machine that swaps."""
    for wrong in ({"n_slots": 0}, {"n_ctx": 1}, {"max_rows": 0}, {"n_slots": 129}):
        with pytest.raises(UsageError):
            opened(model, **wrong)
    monkeypatch.setattr(slots_module, "memory_free", lambda: 1000)
    with pytest.raises(MemoryShort):
        opened(model)


class Forest(History):
    """A history with trees, some of which grow in further passes."""

    def __init__(self, slots: LlamaSlots, seed: int, prefix: Sequence[int] = ()) -> None:
        super().__init__(slots, seed, prefix)
        self.trees: dict[int, tuple[list[int], list[int]]] = {}  # slot -> tokens and parents of the nodes

    def plant(self, slot: int, tokens: Sequence[int]) -> tuple[int, ...]:
        """Add nodes with random parents."""
        known, parents = self.trees[slot]
        for token in tokens:
            leaves = {-1, *range(len(known))}.difference(parents)
            is_full = len(leaves) >= self.slots.caps.max_leaves
            parents.append(int(self.rng.choice(sorted(leaves) if is_full else range(-1, len(known)))))
            known.append(token)
        return tuple(parents[len(parents) - len(tokens) :])

    def wish(self, slot: int) -> Part | None:
        rng = self.rng
        if slot not in self.trees:
            part = super().wish(slot)
            if part is None or not part.n_rows or rng.random() < 0.3:
                return part
            self.trees[slot] = [], []
            if len(part.tokens) > part.n_rows:  # the pending token of a tree that may grow
                return Part(slot, part.tokens[: len(part.tokens) - part.n_rows + 1], 1)
            return Part(slot, part.tokens, part.n_rows, self.plant(slot, part.tokens[1:]))
        n = min(int(rng.integers(0, 6)), self.slots.n_ctx - self.slots.length(slot))
        if n and rng.random() < 0.5:
            tokens = tuple(rng.integers(0, N_VOCAB, n).tolist())
            return Part(slot, tokens, n, self.plant(slot, tokens), grows=True)
        known, parents = self.trees.pop(slot)
        way = path_to(parents, int(rng.integers(-1, len(known))))
        self.slots.keep(slot, len(self.texts[slot]), way)
        self.texts[slot] += [known[node] for node in way]
        return None

    def step(self) -> list[tuple[list[int], FloatArray]]:
        """One pass; returns a text for each row."""
        before = {slot: len(tokens) for slot, (tokens, _) in self.trees.items()}
        parts = [part for slot in range(self.slots.n_slots) if (part := self.wish(slot)) is not None]
        found = []
        for part, rows in zip(parts, self.slots.run(parts), strict=True):
            rows, text = np.array(rows), self.texts[part.slot]
            tree = self.trees.get(part.slot)
            nodes = list(range(before.get(part.slot, 0), len(tree[0]))) if tree else []
            if not part.grows:
                text += part.tokens[: len(part.tokens) - len(nodes)]
                n_text = part.n_rows - len(nodes)
                found += [(text[: len(text) - n_text + 1 + at], rows[at : at + 1]) for at in range(n_text)]
            for node, row in zip(nodes, rows[len(rows) - len(nodes) :], strict=True):
                found.append(([*text, *(tree[0][each] for each in path_to(tree[1], node))], row[None]))
        return found

    def play(self, n_steps: int, plain: LlamaModel) -> None:
        for step in range(n_steps):
            for text, rows in self.step():
                require_equal(plain, rows, alone(plain, text, 1), (step, text))


@pytest.mark.slow
@with_kernels_and_trees
@pytest.mark.parametrize("n_leaves", [MAX_LEAVES, 2])
def test_after_any_history_of_trees_the_rows_are_those_of_the_paths_alone(branching: LlamaModel, n_leaves: int) -> None:
    """Prevents: a token that sees its sibling, another text, or what was rejected."""
    with opened(branching, n_leaves=n_leaves) as slots:
        assert (slots.caps.tree, slots.caps.max_leaves, slots.caps.max_block) == (True, n_leaves, 12)
        Forest(slots, 1).play(25, branching)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["llama", "gemma3"], indirect=True)
@pytest.mark.parametrize("n_leaves", [MAX_LEAVES, 2])
def test_the_cells_of_a_path_ascend_and_none_is_free_among_them(
    branching: LlamaModel, cells_of_passes: list[dict[int, int]], n_leaves: int
) -> None:
    """Prevents: an accepted branch in cells that lie otherwise than after a chain."""
    with opened(branching, n_leaves=n_leaves) as slots:
        slots.share(PREFIX)
        require_planned_cells(slots, Forest(slots, 1, PREFIX), 25, cells_of_passes)


@pytest.mark.parametrize("path", ["llama"], indirect=True)
def test_spare_cells_of_one_place_are_filled_together(branching: LlamaModel) -> None:
    """Prevents: a cell that is freed with another one and stays free, so that a later text is not in order."""
    with opened(branching, n_leaves=2) as slots:
        # Both spare lines hold position 2 when another cell of it is rejected.
        slots.run([Part(0, (1, 2, 3, 4, 5), 5, (-1, -1, 0, 1)), Part(1, (1, 2), 1)])
        slots.keep(0, 1, ())
        slots.run([Part(0, (6, 7), 2, (-1,)), Part(1, (3,), 1)])
        slots.keep(0, 2, ())
        sizes, compute = list[int](), slots._compute
        slots._compute = lambda tokens: sizes.append(len(tokens)) or compute(tokens)  # type: ignore[method-assign]
        texts = [[1, 6, 8], [1, 2, 3, 4]]
        for text, rows in zip(texts, slots.run([Part(0, (8,), 1), Part(1, (4,), 1)]), strict=True):
            require_equal(branching, rows, alone(branching, text, 1), text)
        assert [slots.length(0), slots.length(1), *sizes] == [3, 4, 3]  # one token more
        assert slots._n_cells == 9


@with_kernels_and_trees
def test_tokens_that_wait_may_exceed_a_pass(branching: LlamaModel) -> None:
    """Prevents: a pass with accepted branches of many slots that llama.cpp ends the process for."""
    with opened(branching, n_leaves=2, max_rows=6) as slots:
        for slot in range(N_SLOTS):
            slots.run([Part(slot, (slot, 1, 2, 3, 4), 5, (-1, -1, 1, 2))])
            slots.keep(slot, 1, [1, 2, 3])  # not the first nodes, so they are computed again
        rows = slots.run([Part(slot, (7,), 1) for slot in range(N_SLOTS)])  # 16 tokens
        for slot, found in enumerate(rows):
            require_equal(branching, found, alone(branching, [slot, 2, 3, 4, 7], 1), slot)


def test_a_wrong_tree_is_refused_and_changes_nothing(branching: LlamaModel) -> None:
    """Prevents: siblings that are computed as a chain, and a slot that is lost by a caller's mistake."""
    with opened(branching, n_leaves=3) as slots, opened(branching) as chains:
        slots.run([Part(0, (1, 2, 3), 3, (-1, -1)), Part(1, (1,), 1)])
        for wrong in (
            Part(0, (1,), 1),  # the slot holds a tree
            Part(0, (1, 2), 2, (-1, -1), grows=True),  # four leaves
            Part(0, (1,), 1, (2,), grows=True),
            Part(0, (1,), 1, grows=True),
            Part(1, (1, 2, 3), 3, (0, -1)),
            Part(1, (1, 2, 3), 3, (-1,)),
            Part(2, (1,), 1, (-1,), grows=True),  # no tree
        ):
            with pytest.raises(ValueError, match=r"."):
                slots.run([wrong])
        for call in (lambda: slots.truncate(0, 2), lambda: slots.keep(0, 1, [0, 1]), lambda: slots.keep(0, 2, [])):
            with pytest.raises(ValueError, match=r"."):
                call()
        assert [slots.length(slot) for slot in range(3)] == [3, 1, 0]
        slots.keep(0, 1, [1])
        require_equal(branching, slots.run([Part(0, (4,), 1)])[0], alone(branching, [1, 3, 4], 1), "after keep")
        with pytest.raises(UnsupportedModel):
            chains.run([Part(0, (1, 2, 3), 3, (-1, -1))])
        assert (chains.caps.tree, chains.caps.max_leaves, chains.length(0)) == (False, 1, 0)


@pytest.mark.parametrize("path", ["llama", "gemma3"], indirect=True)
def test_leaves_are_clipped_to_what_llama_cpp_has_sequences_for(branching: LlamaModel) -> None:
    """Prevents: an error for 64 requests at once because their drafts might branch."""
    n_copies = 2 if branching.header.n_swa else 1
    with opened(branching, n_slots=24, n_ctx=8, n_leaves=64) as slots:
        assert slots.caps.max_leaves == 5 // n_copies
        assert slots.run([Part(23, (1, 2, 3), 3, (-1, -1))])[0].shape == (3, N_VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["llama", "gemma3"], indirect=True)
def test_many_steps_need_no_more_memory(branching: LlamaModel) -> None:
    """Prevents: cells, lines or views that pile up over a long run."""
    with opened(branching, n_leaves=4) as slots:
        history = Forest(slots, 7)
        for _ in range(300):
            history.step()
        before = psutil.Process().memory_info().rss
        for _ in range(2000):
            history.step()
        assert psutil.Process().memory_info().rss - before < 1 << 20
        assert slots._n_cells <= N_SLOTS * N_CTX
