"""Token trees in llama.cpp: rows, and the KV cache after every kind of path, against chains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from specllama import llama
from specllama.base.errors import BackendError, ContextFull, Interrupted, MemoryShort, UnsupportedModel, UsageError
from specllama.core.arrays import FloatArray
from specllama.core.engine import Engine
from specllama.core.events import StepEvent, TokenEvent
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.drafters.shape import FixedShape
from specllama.drafters.token_map import NO_TOKEN
from specllama.drafters.translated import TranslatedModel
from specllama.drafters.tree import TreeDrafter
from specllama.llama import LlamaModel
from specllama.llama import model as llama_model
from specllama.llama.context import Batch
from tests import tiny
from tests.llama.test_model import broken
from tests.marks import slow

N_VOCAB = 60
MAX_LEAVES = 8
ARCHES = ("llama", "qwen2", "gemma3")
# The branches lie in one block of attention, across the end of a block, across the end of a chunk.
TEXTS = (3, 27, 250)
AFTER = (5, 9)  # tokens whose rows show what the KV cache holds

Parents = tuple[int, ...]


def text_of(n: int) -> list[int]:
    return [(7 * i * i + 3 * i) % N_VOCAB for i in range(n)]


def random_tree(rng: np.random.Generator, n: int) -> Parents:
    """Parents of `n` nodes with at most MAX_LEAVES leaves; some nodes have many children, some paths are long."""
    parents: list[int] = []
    for node in range(n):
        leaves = {-1, *range(node)}.difference(parents)
        free = sorted(leaves) if len(leaves) >= MAX_LEAVES else list(range(-1, node))
        parents.append(int(rng.choice(free[-3:] if rng.random() < 0.7 else free)))
    return tuple(parents)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


@pytest.fixture(scope="module", params=ARCHES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers, whole and quantized; of gemma3, one layer has a window that the longest text leaves."""
    folder = tmp_path_factory.mktemp("tree")
    window = {"sliding_window": 64} if request.param == "gemma3" else {}
    whole = tiny.write_model(
        folder / "f32.gguf",
        arch=request.param,
        vocabulary=tiny.letters(N_VOCAB),
        n_embd=64,
        n_head=4,
        n_head_kv=2,
        n_ctx=1024,
        **window,
    )
    tiny.requantized(whole, "q4_0")
    return folder


def opened(path: Path, **options: object) -> LlamaModel:
    return tiny.load(path, **{"n_ctx": 512, "max_leaves": MAX_LEAVES, "max_block": 33, **options})


@pytest.fixture(params=[True, False], ids=["ours", "theirs"])
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[LlamaModel]:
    """With our kernels, which make rows equal bit for bit, and with those of llama.cpp, which round activations."""
    with opened(folder / ("f32-q4_0.gguf" if request.param else "f32.gguf"), kernels=request.param) as loaded:
        if request.param and not loaded.plan.kernels:
            pytest.skip("no kernels on this machine")
        assert (loaded.caps.tree, loaded.caps.max_leaves, loaded.no_tree) == (True, MAX_LEAVES, "")
        yield loaded


def require_equal(model: LlamaModel, found: FloatArray, expected: FloatArray, what: object) -> None:
    if model.plan.kernels:
        assert np.array_equal(found, expected), (what, float(np.abs(found - expected).max()))
    else:
        np.testing.assert_allclose(found, expected, atol=0.05, err_msg=str(what))


@pytest.fixture
def plain(model: LlamaModel) -> Iterator[LlamaModel]:
    """The same file, loaded for chains."""
    with opened(model.path, kernels=model.plan.kernels, max_leaves=1) as loaded:
        yield loaded


def chain(model: LlamaModel, text: Sequence[int], block: Sequence[int]) -> FloatArray:
    """The rows of a block after a text, read from the beginning."""
    model.truncate(0)
    model.feed(text)
    return np.array(model.eval(block))


def plant(model: LlamaModel, tokens: Sequence[int], parents: Parents, n_first: int) -> FloatArray:
    """Evaluates a pending token with the first nodes, then level by level those that are left; the rows of all."""
    rows = [np.array(model.eval(tokens[: 1 + n_first], parents[:n_first]))]
    while (at := sum(map(len, rows)) - 1) < len(parents):
        end = next((node for node in range(at + 1, len(parents)) if parents[node] >= at), len(parents))
        rows.append(np.array(model.grow(tokens[1 + at : 1 + end], parents[at:end])))
    return np.concatenate(rows)


@pytest.mark.parametrize("n_text", TEXTS)
@pytest.mark.parametrize("grown", [pytest.param(False, id="at once"), slow(True, id="by levels")])
def test_every_row_of_a_tree_is_that_of_its_path(
    model: LlamaModel, plain: LlamaModel, n_text: int, grown: bool
) -> None:
    """Prevents: a token that sees its sibling, or sums over its ancestors in another order than a chain."""
    rng = np.random.default_rng(n_text)
    for each in (model, plain):
        each.feed(text_of(n_text))
    for n in (2, 5, 17):
        parents = random_tree(rng, n)
        tokens = rng.integers(0, N_VOCAB, n + 1).tolist()
        model.truncate(n_text)
        rows = plant(model, tokens, parents, int(rng.integers(0, n)) if grown else n)
        assert rows.shape == (n + 1, N_VOCAB)
        for node in set(range(n)).difference(parents):
            line = path_to(parents, node)
            plain.truncate(n_text)
            expected = plain.eval([tokens[0], *(tokens[1 + each] for each in line)])
            require_equal(model, rows[[0, *(1 + each for each in line)]], expected, (parents, node))


@pytest.mark.parametrize("n_text", TEXTS)
@pytest.mark.parametrize("grown", [slow(False, id="at once"), pytest.param(True, id="by levels")])
def test_after_any_path_the_kv_cache_is_that_of_a_chain(
    model: LlamaModel, plain: LlamaModel, n_text: int, grown: bool
) -> None:
    """Prevents: a cell of another branch that stays, an accepted one that is lost, or cells in another order."""
    rng = np.random.default_rng(100 + n_text)
    for each in (model, plain):
        each.feed(text_of(n_text))
    for n in (1, 4, 9):
        parents = random_tree(rng, n)
        tokens = rng.integers(0, N_VOCAB, n + 1).tolist()
        for node in range(-1, n):
            line = path_to(parents, node)
            for each in (model, plain):
                each.truncate(n_text)
            plant(model, tokens, parents, int(rng.integers(0, n + 1)) if grown else n)
            model.keep(n_text + 1, line)
            plain.feed([tokens[0], *(tokens[1 + each] for each in line)])
            assert model.length == plain.length == n_text + 1 + len(line)
            require_equal(model, model.eval(AFTER), plain.eval(AFTER), (parents, line))


def test_many_steps_leave_the_kv_cache_of_a_new_prefill(model: LlamaModel, plain: LlamaModel) -> None:
    """Prevents: a sequence that holds cells of an earlier tree, or lacks text that came since it was used last."""
    rng = np.random.default_rng(5)
    said = text_of(20)
    model.feed(said)
    for step in range(60):
        n = int(rng.integers(0, 10))
        parents, tokens = random_tree(rng, n), rng.integers(0, N_VOCAB, n + 1).tolist()
        plant(model, tokens, parents, int(rng.integers(0, n + 1)))
        line = path_to(parents, int(rng.integers(-1, n)))
        if step % 7 == 3:
            n_left = int(rng.integers(len(said) - 4, len(said) + 2))
            model.truncate(n_left)
            said = [*said, tokens[0]][:n_left]
        else:
            model.keep(len(said) + 1, line)
            said += [tokens[0], *(tokens[1 + each] for each in line)]
        if step % 5 == 2:
            model.feed(more := rng.integers(0, N_VOCAB, int(rng.integers(1, 4))).tolist())
            said += more
        assert model.length == len(said)
        assert model.length < 450
    found = np.array(model.eval(AFTER))
    require_equal(model, found, chain(plain, said, AFTER), "after many steps")


@pytest.mark.slow  # two threads wait for each other on a busy machine
@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_rows_of_a_tree_do_not_depend_on_the_threads(folder: Path) -> None:
    """Prevents: threads that share out the chunks of a row differently where it has a gap."""
    parents = random_tree(np.random.default_rng(1), 12)
    tokens, found = [9, *text_of(12)], []
    for n_threads in (1, 2):
        with opened(folder / "f32-q4_0.gguf", n_threads=n_threads) as loaded:
            if not loaded.plan.kernels:
                pytest.skip("no kernels on this machine")
            for block in (range(6), range(12)):
                loaded.truncate(0)
                loaded.feed(text_of(280))
                found.append(np.array(loaded.eval([tokens[0], *(tokens[1 + n] for n in block)], parents[: len(block)])))
    assert np.array_equal(found[0], found[2])
    assert np.array_equal(found[1], found[3])
    assert np.array_equal(found[0], found[1][:7])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_a_greedy_answer_drafted_with_trees_is_the_answer_without(tmp_path: Path, arch: str) -> None:
    """Prevents: text that depends on the branches beside it, in the whole engine: verify, keep, draft, grow."""
    window = {"sliding_window": 64} if arch == "gemma3" else {}
    sizes = {"vocabulary": tiny.letters(N_VOCAB), "n_embd": 64, "n_head": 4, "n_head_kv": 2, "n_ctx": 1024}
    made = tiny.write_pair(tmp_path, arch=arch, noise=0.2, **sizes, **window)
    files = [tiny.requantized(each, "q4_0") for each in made]
    with opened(files[0]) as target, opened(files[1]) as draft:
        if not target.plan.kernels:
            pytest.skip("no kernels on this machine")
        bias = dict.fromkeys(target.end_tokens, -np.inf)
        params = SamplingParams(temperature=0.0, repeat_penalty=1.3, repeat_last_n=8, logit_bias=bias)
        shape = FixedShape((-1, -1, -1, 0, 0, 1, 3))
        drafter = TreeDrafter(draft, shape, n_leaves=MAX_LEAVES, vocab_size=N_VOCAB)
        texts, paths = [], []
        for engine in (Engine(target, drafter), Engine(target)):
            events = list(engine.generate(text_of(30), params, RandomChooser(0), max_tokens=80))
            texts.append([event.token for event in events if isinstance(event, TokenEvent)])
            paths += [event.path for event in events if isinstance(event, StepEvent) and event.path]
        assert texts[0] == texts[1]
        assert any(path != tuple(range(len(path))) for path in paths)
        assert any(len(path) > 1 for path in paths)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[LlamaModel]:
    with opened(
        tiny.write_model(tmp_path / "m.gguf"), n_ctx=64, n_batch=8, n_ubatch=8, max_block=6, max_leaves=3
    ) as it:
        yield it


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (1, ContextFull),
        (2, Interrupted),
        (-1, BackendError),
        (-2, MemoryShort),
        (-3, BackendError),
        (0, KeyboardInterrupt),
    ],
)
@pytest.mark.parametrize("call", ["eval", "grow", "branch"])
def test_a_failed_tree_leaves_the_text_before_it(
    small: LlamaModel, status: int, error: type[BaseException], call: str
) -> None:
    """Prevents: nodes of a failed call that stay, or text that is lost."""
    decode, text = small._lib.llama_decode, [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]

    def fail(context: object, batch: object) -> int:
        decode(context, batch)
        if not status:
            raise KeyboardInterrupt
        return status

    steps = {
        "eval": lambda: small.eval([3, 4, 5, 6], [-1, -1, 0]),
        "grow": lambda: small.grow([7], [2]),
        "branch": lambda: small.grow([8, 7], [3, 0]),  # one goes on, one branches off
    }

    def rows_after(failing: str) -> list[FloatArray]:
        small.truncate(0)
        small.feed(text)
        for name, step in steps.items():
            if name == failing:
                with broken(small, llama_decode=fail), pytest.raises(error):
                    step()
                assert small.length == len(text) + (name != "eval")
                small.truncate(len(text))
                break
            step()
        rows = [np.array(step()) for step in steps.values()]
        small.keep(len(text) + 1, [0, 2, 3, 4])
        assert small.length == len(text) + 5
        return [*rows, np.array(small.eval([1, 2]))]

    expected = rows_after("eval")
    for found, row in zip(rows_after(call), expected, strict=True):
        np.testing.assert_allclose(found, row, atol=1e-4)
    np.testing.assert_allclose(expected[-1], chain(small, [*text, 3, 4, 6, 7, 8], [1, 2]), atol=1e-4)


@pytest.mark.parametrize("n_refused", [0, 1])
def test_if_llama_cpp_does_not_remove_a_branch_the_memory_is_emptied(small: LlamaModel, n_refused: int) -> None:
    """Prevents: a KV cache with cells of a rejected branch, and a length that hides them."""
    remove, calls = small._lib.llama_memory_seq_rm, iter(range(9))
    small.eval([1, 2, 3, 4], [-1, 0, 0])
    with (
        broken(small, llama_memory_seq_rm=lambda *a: next(calls) != n_refused and remove(*a)),
        pytest.raises(llama_model.RollbackRefused),
    ):
        small.keep(1, [0, 1])
    assert small.length == 0
    assert np.array_equal(np.array(small.eval([1, 2])), chain(small, [], [1, 2]))


def test_what_does_not_fit_is_refused_before_anything_is_computed(small: LlamaModel) -> None:
    """Prevents: an assertion of llama.cpp, which ends the process; a tree that is read as a chain."""
    small.feed([1, 2])
    for call, error in (
        (lambda: small.eval([1, 2, 3, 4, 5], [-1, -1, -1, -1]), BackendError),  # four leaves
        (lambda: small.eval([1] * 7, [-1] + [0] * 5), BackendError),  # seven rows
        (lambda: small.eval([1, 2, 3], [-1]), ValueError),
        (lambda: small.eval([1, 2, 3], [0, -1]), ValueError),
        (lambda: small.grow([1], [-1]), ValueError),  # no tree
    ):
        with pytest.raises(error):
            call()  # type: ignore[operator]
        assert small.length == 2
    small.eval([1, 2, 3], [-1, -1])
    for call, error in (
        (lambda: small.feed([1]), ValueError),
        (lambda: small.eval([1]), ValueError),
        (lambda: small.truncate(4), ValueError),
        (lambda: small.keep(3, [0, 1]), ValueError),  # siblings
        (lambda: small.keep(3, [2]), ValueError),
        (lambda: small.keep(4, [1]), ValueError),
        (lambda: small.grow([1], [2]), ValueError),
        (lambda: small.grow([1, 2], [-1, -1]), BackendError),  # four leaves
    ):
        with pytest.raises(error):
            call()  # type: ignore[operator]
        assert small.length == 5
    small.truncate(3)
    with pytest.raises(ValueError, match="tree"):
        small.grow([1], [-1])
    np.testing.assert_allclose(np.array(small.eval([4])), chain(small, [1, 2, 1], [4]), atol=1e-4)


def test_a_full_context_holds_no_tree(small: LlamaModel) -> None:
    """Prevents: a node without a cell; a node takes a cell even where it shares its position."""
    small.feed([1] * 60)
    with pytest.raises(ContextFull):
        small.eval([1, 2, 3, 4, 5], [-1, -1, -1, 0])
    small.eval([1, 2, 3, 4], [-1, -1, -1])
    with pytest.raises(ContextFull):
        small.grow([5], [0])
    small.keep(61, [2])
    small.eval([5, 6])
    assert small.length == 64


def test_a_model_for_chains_has_one_sequence_and_refuses_trees(tmp_path: Path) -> None:
    """Prevents: a context that costs more than before for everything that drafts chains."""
    with tiny.load(tiny.write_model(tmp_path / "m.gguf")) as loaded:
        assert loaded._lib.llama_n_seq_max(loaded._context) == 1
        assert (loaded.caps.tree, loaded.caps.max_leaves, loaded.no_tree) == (False, 1, "")
        with pytest.raises(UnsupportedModel):
            loaded.eval([1, 2, 3], [-1, -1])
        loaded.eval([1, 2, 3], [-1, 0])
        with pytest.raises(ValueError, match="tree"):
            loaded.grow([1], [-1])


def test_the_estimate_of_memory_counts_a_row_of_logits_for_every_leaf(tmp_path: Path) -> None:
    """Prevents: a model for trees that does not fit after the estimate said that it does."""
    header = llama.read_header(tiny.write_model(tmp_path / "m.gguf", n_vocab=20))
    few, many = (
        llama.memory_needed(header, llama.LoadOptions(n_ctx=64, max_block=3, max_leaves=n)).compute for n in (3, 16)
    )
    assert many - few == 13 * 20 * 4


@pytest.mark.parametrize("max_leaves", [0, 257])
def test_a_number_of_leaves_out_of_range_is_a_usage_error(tmp_path: Path, max_leaves: int) -> None:
    """Prevents: a context that llama.cpp does not open."""
    with pytest.raises(UsageError):
        tiny.load(tiny.write_model(tmp_path / "m.gguf"), max_leaves=max_leaves)


def test_a_short_window_says_why_there_are_no_trees(tmp_path: Path) -> None:
    """Prevents: rows that depend on the other branches because no text before the tree is visible."""
    path = tiny.write_model(tmp_path / "g.gguf", arch="gemma3", sliding_window=8)
    with tiny.load(path, max_leaves=4) as loaded:
        assert (loaded.caps.tree, loaded.caps.max_leaves) == (False, 1)
        assert "window of 8" in loaded.no_tree
        assert loaded.eval([1, 2]).shape == (2, 12)


@pytest.mark.parametrize("fault", ["a chain", "an error"])
def test_the_probe_finds_a_model_that_cannot_evaluate_trees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Prevents: a llama.cpp, or an architecture, that lays siblings one after the other without an error."""

    fill = Batch.fill

    def chain_of(batch: Batch, tokens: Sequence[int], positions: Sequence[int], lines: object, *rest: object) -> None:
        if fault == "an error" and len(tokens) > 2:
            raise BackendError("no branches here")
        fill(batch, tokens, range(positions[0], positions[0] + len(tokens)), [(0,)] * len(tokens), *rest)

    monkeypatch.setattr(Batch, "fill", chain_of)
    with tiny.load(tiny.write_model(tmp_path / "m.gguf", n_vocab=20), max_leaves=4) as loaded:
        assert not loaded.caps.tree
        assert loaded.no_tree
        assert (loaded.length, loaded.busy_s) == (0, 0.0)
        assert np.array_equal(np.array(loaded.eval([1, 2])), chain(loaded, [], [1, 2]))


def test_a_trimmed_draft_evaluates_trees_of_its_own_tokens(tmp_path: Path) -> None:
    """Prevents: chains only for the fastest drafts; a node in the wrong cell behind a token of several cells."""
    target, draft = tiny.letters(30), tiny.letters(20)
    to_target = np.array([target.tokens.index(token) for token in draft.tokens])
    to_target[3] = NO_TOKEN
    path = tiny.write_model(tmp_path / "d.gguf", vocabulary=draft)
    spellings = {0: (0,), 1: (1,), 2: (2,), 5: (5,), 25: (1, 2, 0)}

    class Spell:
        first = ()

        def __call__(self, token: int) -> tuple[int, ...]:
            return spellings[token]

    with opened(path, max_leaves=4) as inner, opened(path) as plain:
        model = TranslatedModel(inner, to_target, Spell(), vocab_size=30)
        assert (model.caps.tree, model.caps.max_leaves) == (True, 4)

        def expected(cells: list[int]) -> FloatArray:
            plain.truncate(0)
            plain.feed(cells[:-1])
            return np.array(plain.eval(cells[-1:]))[0]

        model.feed([0, 25])
        rows = np.array(model.eval([25, 1, 2], [-1, -1]))
        wide = np.array(model.grow([5, 0], [1, -1]))
        text = [0, 1, 2, 0, 1, 2, 0]
        mapped = to_target != NO_TOKEN
        for row, cells in zip((*rows, *wide), ((), (1,), (2,), (2, 5), (0,)), strict=True):
            np.testing.assert_allclose(row[to_target[mapped]], expected([*text, *cells])[mapped], atol=1e-4)
            assert np.isneginf(np.delete(row, to_target[mapped])).all()
        for unknown in (lambda: model.grow([25], [-1]), lambda: model.grow_known([25], [-1])):
            with pytest.raises(UnsupportedModel):
                unknown()
        model.keep(3, [1, 2])
        assert (model.length, inner.length) == (5, len(text) + 2)
        np.testing.assert_allclose(
            np.array(model.eval([25]))[0, to_target[mapped]], expected([*text, 2, 5, 1, 2, 0])[mapped], atol=1e-4
        )
        model.truncate(4)
        assert inner.length == len(text) + 1
        with pytest.raises(UnsupportedModel):
            model.eval([0, 25, 1], [-1, -1])
        assert (model.length, inner.length) == (4, len(text) + 1)
