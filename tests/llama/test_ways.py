"""The choice of the way back, and caches that hold only the window of sliding layers."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specllama import llama
from specllama.audit import kv
from specllama.audit import run as audit
from specllama.audit.kv import Along
from specllama.audit.parts import AuditEffort, AuditPrompt, AuditSubject
from specllama.audit.report import KV_BOUND, AuditReport
from specllama.base.errors import Interrupted, MemoryShort, UsageError
from specllama.core.engine import Engine
from specllama.core.events import Finished, TokenEvent
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import Rule
from specllama.drafters import DraftSettings
from specllama.drafters.length import DraftLength
from specllama.drafters.model import ModelDrafter
from specllama.llama import LlamaModel, LoadOptions, read_header
from specllama.llama.header import window_layers
from specllama.llama.load_plan import GpuMemory, LoadPlan, plan_load
from specllama.llama.memory import kv_bytes, window_cells
from specllama.llama.rollback import DEVICE, KEPT, SAVED, TRUNCATION, WAYS, WINDOW, Call, SavedStates, WindowCache
from specllama.llama.ways import ASKED, MeasuredWays, WayBack, cheapest
from tests import tiny

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

N_WINDOW, N_CELLS = 8, 256  # llama.cpp rounds 8 + 16 up to 256
ROUNDING = 5e-3  # of logits with a spread of about 1.5: the cells of a window stand in another order
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.3)
PARTIAL = 1  # flag of llama.cpp: the recurrent state, without cells of full attention
N_PLACE = 16  # bytes at the beginning of such a state, the last four of which are its position
sound_back = SavedStates.back
NO_GPU = GpuMemory(supported=False, n_free=0, shared=False)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("windows") / "g.gguf")


def write(path: Path, **options: object) -> Path:
    return tiny.write_model(path, arch="gemma3", n_layer=4, sliding_window=N_WINDOW, n_vocab=40, n_ctx=2048, **options)  # type: ignore[arg-type]


def load(path: Path, rollback: str = WINDOW, **options: object) -> LlamaModel:
    return tiny.load(path, **{"n_ctx": 1024, "n_batch": 16, "max_block": 6, "rollback": rollback, **options})


@pytest.fixture
def model(path: Path) -> Iterator[LlamaModel]:
    with load(path) as opened:
        yield opened


@pytest.fixture
def whole(path: Path) -> Iterator[LlamaModel]:
    with load(path, TRUNCATION) as opened:
        yield opened


def text_of(n: int, seed: int = 1) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 37, n)]


def same(one: LlamaModel, other: LlamaModel, tokens: list[int]) -> None:
    """Read the tokens in both and compare their rows."""
    rows = np.array(one.eval(tokens))
    np.testing.assert_allclose(rows, other.eval(tokens), atol=ROUNDING)


@pytest.mark.parametrize("n_said", [12, *range(N_CELLS - 7, N_CELLS + 2), 2 * N_CELLS - 3])
def test_every_rejection_leaves_what_a_whole_cache_holds(model: LlamaModel, whole: LlamaModel, n_said: int) -> None:
    """Prevents: a token that left the window before a rejection, also where the cache begins anew in its middle."""
    said = text_of(n_said)
    for n_accepted in range(6):
        for each in (model, whole):
            each.truncate(0)
            each.feed(said)
            each.eval([7, 3, 1, 4, 1, 5])
            each.keep(n_said + 1, range(n_accepted))
            assert each.length == n_said + 1 + n_accepted
        same(model, whole, [9, 8])


@pytest.mark.slow
def test_a_random_walk_of_drafts_and_cuts_equals_a_whole_cache(model: LlamaModel, whole: LlamaModel) -> None:
    """Prevents: holes that rejections leave in the cache and that grow until a window is lost."""
    draw, said = np.random.default_rng(3), text_of(20)
    for each in (model, whole):
        each.feed(said)
    for step in range(400):
        block = text_of(int(draw.integers(1, 7)), seed=step)
        same(model, whole, block)
        n_left = model.length - int(draw.integers(0, len(block)))
        if step % 23 == 22:
            n_left -= int(draw.integers(0, 300))
        n_left = max(n_left, 1)
        for each in (model, whole):
            each.truncate(n_left)
        if model.length > 900:
            for each in (model, whole):
                each.truncate(0)
                each.feed(text_of(9, seed=step))


def test_tokens_read_one_by_one_are_taken_back(model: LlamaModel, whole: LlamaModel) -> None:
    """Prevents: a draft model that drafts on after its own rejected tokens."""
    for each in (model, whole):
        each.feed(text_of(250))
    for step in range(20):
        for token in text_of(5, seed=step):
            same(model, whole, [token])
        for each in (model, whole):
            each.truncate(each.length - 4)


def test_llama_cpp_removes_tokens_although_their_window_is_lost(model: LlamaModel, whole: LlamaModel) -> None:
    """Prevents: trust in `llama_memory_seq_rm`: it says yes, and the text goes on with half a window."""
    for each in (model, whole):
        each.feed(text_of(600))
        each.eval([1])
    assert model._call("llama_memory_seq_rm", model._memory, 0, 100, -1)
    model._n_decoded = 100
    del model._text[100:]
    whole.truncate(100)
    rows = np.array(model.eval([1, 2]))
    assert np.abs(rows - whole.eval([1, 2])).max() > 10 * ROUNDING


@pytest.mark.parametrize("n_left", [100, 342, 343, 344, 599])
def test_a_text_whose_window_is_lost_is_read_again(model: LlamaModel, whole: LlamaModel, n_left: int) -> None:
    """Prevents: the above, wherever the text goes back to; tokens read again although the cache has their window."""
    for each in (model, whole):
        each.feed(text_of(600))
        each.eval([1])
    first = model._call("llama_memory_seq_pos_min", model._memory, 0)
    known = n_left - N_WINDOW + 1 >= first
    assert (model.resume_at(n_left) == n_left) == known
    for each in (model, whole):
        each.truncate(n_left)
        assert each.length == n_left
    assert model._n_decoded == (n_left if known else 0)
    same(model, whole, [1, 2])


def test_the_cache_holds_a_window_and_a_batch(model: LlamaModel) -> None:
    """Prevents: another size in llama.cpp than the one that the memory is planned with."""
    assert window_cells(model.header, model.plan.n_ubatch) == N_CELLS
    for _ in range(600):
        model.eval([1])
    first = model._call("llama_memory_seq_pos_min", model._memory, 0)
    assert model.length - first == N_CELLS


def test_the_cells_are_those_of_llama_cpps_log(path: Path) -> None:
    """Prevents: memory planned for other layers than llama.cpp's, which it chooses by architecture and number."""
    assert cells_of(path, n_batch=16, n_ctx=1024) == {(1024, 2), (N_CELLS, 2)}


def cells_of(path: Path, **options: object) -> set[tuple[int, int]]:
    """(cells, layers with them) of the caches that llama.cpp makes for a model with windows."""
    lines = list[str]()
    llama.set_log(lambda _level, text: lines.append(text))
    try:
        with load(path, **options):
            pass
    finally:
        llama.set_log(None)
    found = re.findall(r"\(\s*(\d+) cells,\s*(\d+) layers", "".join(lines))
    return {(int(cells), int(layers)) for cells, layers in found}


@pytest.mark.parametrize("n_prompt", [30, 100, 300])
def test_another_answer_reads_no_prompt_again(model: LlamaModel, n_prompt: int) -> None:
    """Prevents: a prompt read again for /regen after an answer that filled the cache."""
    prompt, engine = text_of(n_prompt), Engine(model)
    unending = replace(GREEDY, logit_bias=dict.fromkeys(model.end_tokens, -np.inf))

    def answer(n: int) -> list[int]:
        events = list(engine.generate(prompt, unending, RandomChooser(0), max_tokens=n))
        assert isinstance(events[-1], Finished)
        n_cached.append(events[-1].stats.n_cached)
        return [event.token for event in events if isinstance(event, TokenEvent)]

    n_cached = list[int]()
    first = answer(500)
    assert answer(50) == first[:50]
    assert n_cached == [0, n_prompt - 1]


@pytest.mark.slow
@pytest.mark.parametrize("role", ["target", "draft"])
def test_greedy_answers_are_those_of_a_whole_cache(tmp_path: Path, role: str) -> None:
    """Prevents: another text by a cache of the window, of the target or of the draft."""
    paths = write(tmp_path / "t.gguf", seed=1), write(tmp_path / "d.gguf", seed=1, noise=0.1)
    found, n_rejected = list[list[int]](), 0
    for ways in ((TRUNCATION, TRUNCATION), (WINDOW, TRUNCATION) if role == "target" else (TRUNCATION, WINDOW)):
        with load(paths[0], ways[0]) as target, load(paths[1], ways[1]) as draft:
            engine = Engine(target, ModelDrafter(draft, n_max=4))
            unending = replace(GREEDY, logit_bias=dict.fromkeys(target.end_tokens, -np.inf))
            events = list(engine.generate(text_of(40), unending, RandomChooser(0), max_tokens=700))
            found.append([event.token for event in events if isinstance(event, TokenEvent)])
            n_rejected += events[-1].stats.n_rejected
    assert found[0] == found[1]
    assert n_rejected > 100


LITTLE = AuditEffort(
    n_prompts=1, n_tokens=6, n_contexts=1, most_branches=30, n_enumerated=2, n_draws=1, n_runs=2, n_steps=6
)


def subject_of(target: LlamaModel, draft: LlamaModel, **prompts: list[int]) -> AuditSubject:
    """A pair, audited under every rule."""
    return AuditSubject(
        target=target,
        draft=draft,
        prompts=[AuditPrompt(name, tuple(tokens)) for name, tokens in prompts.items()],
        params=SamplingParams(temperature=1.0),
        strategies=("draft-simple", "chain"),
        rules=tuple(Rule),
        drafting=DraftSettings(length=DraftLength(4)),
        seed=3,
        piece=lambda token: bytes([97 + token]),
    )


@pytest.mark.slow
def test_the_audit_finds_no_trace_of_rejected_tokens_in_a_cache_of_the_window(tmp_path: Path) -> None:
    """Prevents: rejected tokens in a window that begins anew several times, in target and draft, under every rule."""
    paths = write(tmp_path / "t.gguf", seed=1), write(tmp_path / "d.gguf", seed=1, noise=0.1)
    with load(paths[0]) as target, load(paths[1], max_block=33) as draft:
        subject = subject_of(target, draft, long=text_of(N_CELLS + 100), edge=text_of(N_CELLS - 9))
        along = Along(target.end_tokens, np.random.default_rng(0))
        rows = [row for found in kv.check(subject, replace(LITTLE, n_runs=12, n_steps=25), along) for row in found]
    assert {row.model for row in rows} == {"target", "draft"}
    for row in rows:
        assert (row.n_foreign, row.difference) == (0, 0.0)
        assert row.narrow <= ROUNDING < row.wrong
    assert sum(row.n_dropped for row in rows) > 200


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "way"), [("jamba", SAVED), ("jamba", DEVICE), ("qwen35", SAVED), ("qwen35", KEPT)])
def test_the_audit_passes_states_and_finds_one_that_is_not_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, way: str
) -> None:
    """Prevents: an audit that does not see the state of a recurrent layer, by any way back."""
    paths = tiny.write_pair(tmp_path, arch=arch, n_vocab=40, noise=0.1)
    with load(paths[0], way) as target, load(paths[1], way) as draft:
        # A short prompt: a tiny state forgets within tens of tokens.
        both = subject_of(target, draft, short=text_of(8))
        subject = replace(both, strategies=("draft-simple",), rules=(Rule.BLOCK,))

        def audited() -> AuditReport:
            *_, report = audit.run(subject, LITTLE, {})
            assert isinstance(report, AuditReport)
            return report

        sound = audited()
        assert sound.passed, sound.bugs
        assert {row.model for row in sound.kv} == {"target", "draft"}
        assert all(row.n_dropped and row.difference <= KV_BOUND < row.wrong for row in sound.kv)
        monkeypatch.setattr(SavedStates, "back", back_without_the_state)
        broken = audited()
    assert not broken.passed
    assert {row.model for row in broken.kv if not row.sound} == {"target", "draft"}


def back_without_the_state(self: SavedStates, call: Call, n_decoded: int, length: int) -> int | None:
    """Goes back, but the state keeps the numbers of the rejected tokens."""

    def state() -> ctypes.Array[ctypes.c_uint8]:
        data = (ctypes.c_uint8 * call("llama_state_seq_get_size_ext", self._context, 0, PARTIAL))()
        assert call("llama_state_seq_get_data_ext", self._context, data, len(data), 0, PARTIAL) == len(data)
        return data

    numbers = state()
    at = sound_back(self, call, n_decoded, length)
    if at:
        numbers[:N_PLACE] = state()[:N_PLACE]
        assert call("llama_state_seq_set_data_ext", self._context, numbers, len(numbers), 0, PARTIAL)
    return at


def test_trees_need_the_whole_cache(path: Path) -> None:
    """Prevents: cells that several branches share and that llama.cpp never gives back."""
    with load(path, "auto", max_leaves=4) as model:
        assert (model.way_back.way, model.caps.tree) == (TRUNCATION, True)
    with load(path, WINDOW, max_leaves=4) as model:
        assert isinstance(model._rollback, WindowCache)
        assert (model.way_back.way, model.caps.tree, model.plan.n_lines) == (WINDOW, False, 1)
        assert "window" in model.no_tree


def test_layers_with_a_window_are_those_of_llama_cpp(tmp_path: Path) -> None:
    """Prevents: memory planned for other layers: one in six of gemma3 has none, unless the file names them."""
    named = read_header(write(tmp_path / "named.gguf"))
    assert window_layers(named) == (True, False, True, False)
    by_name = replace(named, n_layer=12, files=(replace(named.gguf, entries={}),))
    assert window_layers(by_name) == (*(True,) * 5, False) * 2
    assert not any(window_layers(replace(by_name, architecture="llama")))
    assert not any(window_layers(replace(by_name, n_swa=0)))


def plan(path: Path, free: int = 1 << 40, **options: object) -> LoadPlan:
    wish = LoadOptions(**{"n_ctx": 2048, **options})  # type: ignore[arg-type]
    return plan_load(read_header(path), wish, free=free, gpu=NO_GPU, extra=())


def test_memory_decides_between_whole_and_window(path: Path) -> None:
    """Prevents: an error for a context that fits by its window; a window's cache, which forgets, without need."""
    whole, window = plan(path), plan(path, rollback=WINDOW)
    assert (whole.way_back.way, window.way_back) == (TRUNCATION, WayBack(WINDOW, ASKED))
    assert window.need.kv < whole.need.kv
    short = plan(path, free=whole.need.total - 1)
    assert (short.way_back.way, short.need) == (WINDOW, window.need)
    longest = plan(path, free=whole.need.total - 1, n_ctx=0)
    assert (longest.way_back.way, longest.n_ctx) == (WINDOW, 2048)
    for wish in ({"rollback": TRUNCATION}, {"max_leaves": 4}):
        with pytest.raises(MemoryShort):
            plan(path, free=whole.need.total - 1, **wish)
    with pytest.raises(UsageError):
        plan(path, rollback="ring")


def test_what_a_window_saves_for_a_real_shape(path: Path) -> None:
    """Prevents: wrong figures in the docs: gemma-3-270m with 8192 and 32768 tokens, in MiB."""
    tiny_one = read_header(path)
    shape = {"n_layer": 18, "n_head_kv": (1,) * 18, "key_length": 256, "value_length": 256, "n_swa": 512}
    header = replace(tiny_one, files=(replace(tiny_one.gguf, entries={}),), **shape)  # type: ignore[arg-type]
    n_window = window_cells(header, 512)
    assert n_window == 1024
    for n_ctx, sizes in ((8192, (144, 39)), (32768, (576, 111))):
        assert tuple(kv_bytes(header, n_ctx, "f16", "f16", n_window=n) >> 20 for n in (0, n_window)) == sizes


def test_the_cheapest_way_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a way by rule although another is faster here; a measurement at each load; a choice never told."""
    path = tiny.write_model(tmp_path / "lfm2.gguf", arch="lfm2", n_vocab=40)
    took, measured = {KEPT: 2.0, SAVED: 1.0}, list[str]()

    def step(model: LlamaModel) -> float:
        measured.append(model.plan.way_back.way)
        return took[measured[-1]]

    monkeypatch.setattr(LlamaModel, "step_with_rejections", step)
    header = read_header(path)
    before = llama.way_back(header)
    assert (before.way, before.why) == (KEPT, "not measured yet")
    for _ in range(2):
        with tiny.load(path) as model:
            assert (model.way_back.way, model.plan.n_kept_states, model.caps.n_again) == (SAVED, 0, 4)
            assert model.way_back == llama.way_back(header, LoadOptions(n_ctx=256))
            assert model.eval([1, 2]).shape == (2, 40)
    assert measured == [SAVED, KEPT]
    with tiny.load(path, rollback=KEPT) as model:
        assert (model.way_back, model.caps.n_again) == (WayBack(KEPT, ASKED), 0)
    MeasuredWays(header, (KEPT, SAVED)).keep({KEPT: 1.0, SAVED: 0.97})
    assert llama.way_back(header).way == KEPT, "a gain within the noise"


def test_a_measurement_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: Ctrl-C that waits for the steps of a large model by every way."""
    path, measured = tiny.write_model(tmp_path / "lfm2.gguf", arch="lfm2", n_vocab=40), list[LlamaModel]()
    monkeypatch.setattr(LlamaModel, "step_with_rejections", lambda model: measured.append(model) or 1.0)
    with pytest.raises(Interrupted):
        llama.load(path, LoadOptions(n_ctx=256, n_threads=1), progress=lambda _share: not measured)
    assert len(measured) == 1
    assert llama.way_back(read_header(path)).why == "not measured yet"


def test_a_step_with_rejections_is_what_the_engine_does(tmp_path: Path) -> None:
    """Prevents: a measurement that leaves tokens behind, or that times no rejection."""
    path = tiny.write_model(tmp_path / "m.gguf", arch="qwen35", n_vocab=40)
    for way in (KEPT, SAVED):
        with tiny.load(path, rollback=way) as model:
            assert model.step_with_rejections() > 0.0
            assert (model.length, model.busy_s) == (0, 0.0)


def test_ways_on_the_device_are_compared_only_with_a_gpu() -> None:
    """Prevents: copies by tensor functions of ggml where the memory is the same."""
    from specllama.llama import ways
    from tests.headers import QWEN

    hybrid = replace(QWEN, architecture="qwen35")
    assert ways.compared(hybrid, on_gpu=False) == (KEPT, SAVED)
    assert ways.compared(hybrid, on_gpu=True) == (KEPT, SAVED, DEVICE)
    assert ways.compared(replace(QWEN, architecture="mamba"), on_gpu=False) == ()
    assert ways.compared(replace(QWEN, architecture="mamba"), on_gpu=True) == (SAVED, DEVICE)
    assert ways.compared(QWEN, on_gpu=True) == ()
    assert cheapest((SAVED, DEVICE), {SAVED: 2.0, DEVICE: 1.0}).way == DEVICE
    assert set(ways.possible(hybrid)) <= set(WAYS)
