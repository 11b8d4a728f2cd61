"""`LlamaModel` on tiny files with the real llama.cpp: logits, rollback, held tokens, errors, interruption."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
from specllama.core.types import Cancel, Recording
from specllama.llama import LlamaModel, LoadOptions, build_info, load, set_log
from specllama.llama.bindings import bindings
from specllama.llama.memory import KV_TYPE_BYTES
from specllama.llama.open import apart
from tests import tiny

PROMPT = [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 2, 4, 6, 8]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("tiny") / "m.gguf", n_ctx=2048)


@pytest.fixture
def model(path: Path) -> Iterator[LlamaModel]:
    with tiny.load(path, n_batch=8, n_ubatch=8, max_block=6) as opened:
        yield opened


class Broken:
    """The bindings, with one function replaced."""

    def __init__(self, lib: object, **functions: Callable[..., object]) -> None:
        self._lib = lib
        self._functions = functions

    def __getattr__(self, name: str) -> object:
        return self._functions[name] if name in self._functions else getattr(self._lib, name)


@contextmanager
def broken(model: LlamaModel, **functions: Callable[..., object]) -> Iterator[None]:
    """Replace functions of the bindings in the block."""
    lib = model._lib
    model._lib = Broken(lib, **functions)
    try:
        yield
    finally:
        model._lib = lib


def fresh(path: Path, tokens: list[int], n_rows: int, **options: object) -> FloatArray:
    """Logits of the last `n_rows` tokens from a new model."""
    with tiny.load(path, n_batch=8, n_ubatch=8, max_block=6, **options) as other:
        other.feed(tokens[:-n_rows])
        return other.eval(tokens[-n_rows:]).copy()


def test_logits_have_one_row_for_each_token_of_the_block(model: LlamaModel) -> None:
    """Prevents: logits also for the prompt (2.5 GB at 4096 x 152k), or only for the last token."""
    model.feed(PROMPT[:3])
    logits = model.eval([4, 5])
    assert logits.shape == (2, 12)
    assert logits.dtype == np.float32
    assert not logits.flags.writeable
    assert np.isfinite(logits).all()
    assert len(np.unique(logits)) > 12


def test_rows_follow_the_order_of_the_tokens(model: LlamaModel, path: Path) -> None:
    """Prevents: rows in another order because llama.cpp reorders outputs."""
    model.feed(PROMPT)
    rows = model.eval([3, 1, 4, 1, 5, 2]).copy()
    for index in range(6):
        alone = fresh(path, [*PROMPT, 3, 1, 4, 1, 5, 2][: len(PROMPT) + 1 + index], 1)
        np.testing.assert_allclose(rows[index], alone[0], atol=1e-4)


def test_the_view_agrees_with_llama_cpps_own_row_lookup(model: LlamaModel) -> None:
    """Prevents: a wrong stride or offset in llama.cpp's logits."""
    model.feed(PROMPT[:5])
    logits = model.eval([1, 2, 3])
    for index in range(3):
        pointer = model._lib.llama_get_logits_ith(model._context, 5 + index)
        np.testing.assert_array_equal(np.ctypeslib.as_array(pointer, (12,)), logits[index])


def test_a_pair_of_tiny_files_agrees_often_and_not_always(tmp_path: Path) -> None:
    """Prevents: a test pair that never accepts, or never rejects."""
    target_path, draft_path = tiny.write_pair(tmp_path)
    with tiny.load(target_path) as target, tiny.load(draft_path) as draft:
        block = PROMPT + PROMPT
        same = target.eval(block).argmax(axis=1) == draft.eval(block).argmax(axis=1)
    assert 0.3 < same.mean() < 1.0


def test_the_slices_in_which_a_prompt_is_fed_do_not_matter(model: LlamaModel, path: Path) -> None:
    """Prevents: logits that depend on how the engine divides the prompt for its progress events."""
    for size in (1, 3, 5, 8, 14):
        model.truncate(0)
        for start in range(0, len(PROMPT), size):
            model.feed(PROMPT[start : start + size])
        np.testing.assert_array_equal(model.eval([1, 2]), fresh(path, [*PROMPT, 1, 2], 2))


def test_held_tokens_count_and_are_computed_with_the_next_block(model: LlamaModel) -> None:
    """Prevents: an extra pass over the weights for every prompt and every fully accepted block."""
    sizes: list[int] = []
    decode = model._lib.llama_decode
    with broken(model, llama_decode=lambda *a: sizes.append(a[1].n_tokens) or decode(*a)):
        model.feed(PROMPT[:10])
        assert (model.length, sizes) == (10, [8])
        model.eval([1, 2, 3])
        assert (model.length, sizes) == (13, [8, 5])
        model.feed(PROMPT[:7])
        model.eval([1, 2])  # 7 and 2 exceed the batch of 8: the held tokens go first
        assert (model.length, sizes) == (22, [8, 5, 7, 2])


@pytest.mark.parametrize("kept", range(5))
def test_a_rollback_leaves_no_trace_of_rejected_tokens(model: LlamaModel, path: Path, kept: int) -> None:
    """Prevents: a rejected token left in the KV cache, or an accepted one lost; bit for bit, with equal chunks."""
    committed = [7, 1, 2, 3, 4, 5][: 1 + kept]
    after = []
    for rejected in (0, 8):
        model.truncate(0)
        model.feed(PROMPT)
        model.eval([*committed, *[rejected] * (5 - kept)])
        model.keep(len(PROMPT) + 1, range(kept))
        assert model.length == len(PROMPT) + 1 + kept
        after.append(model.eval([8, 8]).copy())
    np.testing.assert_array_equal(after[0], after[1])
    np.testing.assert_allclose(after[0], fresh(path, [*PROMPT, *committed, 8, 8], 2), atol=1e-3)


def test_many_steps_of_speculation_leave_the_kv_of_a_new_prefill(model: LlamaModel, path: Path) -> None:
    """Prevents: a slow drift of the KV cache that one step does not show."""
    rng = np.random.default_rng(3)
    tokens = list(PROMPT)
    model.feed(tokens)
    for _ in range(30):
        block = [int(token) for token in rng.integers(0, 9, size=rng.integers(1, 6))]
        n_kept = int(rng.integers(0, len(block)))
        model.eval(block)
        model.keep(len(tokens) + 1, range(n_kept))
        tokens += block[: 1 + n_kept]
        assert model.length == len(tokens)
    np.testing.assert_allclose(model.eval([1, 2]), fresh(path, [*tokens, 1, 2], 2), atol=1e-3)


def test_rollback_crosses_the_edge_of_a_sliding_window(tmp_path: Path) -> None:
    """Prevents: tokens missing after a rollback because they had left a sliding window (FIELD_CASES 23)."""
    path = tiny.write_model(tmp_path / "g.gguf", arch="gemma3", n_layer=4, sliding_window=8, n_ctx=2048)
    with tiny.load(path, n_ctx=1024, n_batch=8, n_ubatch=8, max_block=6) as model:
        model.feed(PROMPT)
        for _ in range(100):
            model.eval([1, 2, 3, 4, 5, 6])
        model.truncate(len(PROMPT))
        np.testing.assert_allclose(model.eval([7]), fresh(path, [*PROMPT, 7], 1), atol=1e-4)


def test_a_short_window_changes_the_logits(tmp_path: Path) -> None:
    """Prevents: the test above passing because the window has no effect."""
    short = tiny.write_model(tmp_path / "s.gguf", arch="gemma3", n_layer=4, sliding_window=4)
    long = tiny.write_model(tmp_path / "l.gguf", arch="gemma3", n_layer=4, sliding_window=512)
    assert np.abs(fresh(short, PROMPT, 1) - fresh(long, PROMPT, 1)).max() > 0.01


def test_truncating_held_tokens(model: LlamaModel, path: Path) -> None:
    """Prevents: lost held tokens, or computed ones removed instead."""
    model.feed(PROMPT[:11])
    model.truncate(9)
    assert model.length == 9
    model.feed([5])
    np.testing.assert_array_equal(model.eval([1]), fresh(path, [*PROMPT[:9], 5, 1], 1))
    model.feed([1, 2, 3])
    model.truncate(4)
    assert model.length == 4
    np.testing.assert_allclose(model.eval([1]), fresh(path, [*PROMPT[:4], 1], 1), atol=1e-4)


def test_a_model_reports_the_tokens_that_it_holds(model: LlamaModel) -> None:
    """Prevents: an answer that goes on from the text of another user, of the same length."""
    assert isinstance(model, Recording)
    model.feed([1, 2, 3])
    model.eval([4, 5])
    model.truncate(4)
    model.feed([6])
    assert list(model.tokens) == [1, 2, 3, 4, 6]


def test_truncating_to_the_same_length_does_nothing(model: LlamaModel) -> None:
    """Prevents: an off-by-one that removes a token at each step."""
    model.feed(PROMPT)
    model.truncate(model.length)
    assert model.length == len(PROMPT)
    for length in (-1, model.length + 1):
        with pytest.raises(ValueError, match="cannot truncate"):
            model.truncate(length)


def test_a_failed_rollback_is_an_error_and_changes_nothing(model: LlamaModel) -> None:
    """Prevents: a wrong length because the result of llama_memory_seq_rm is ignored."""
    model.feed(PROMPT)
    model.eval([1, 2])
    with broken(model, llama_memory_seq_rm=lambda *a: False), pytest.raises(RollbackRefused):
        model.truncate(3)
    assert model.length == len(PROMPT) + 2
    model.truncate(3)
    assert model.length == 3


def test_a_chain_is_accepted_and_a_tree_is_refused(model: LlamaModel, path: Path) -> None:
    """Prevents: a tree evaluated as a chain, which gives a wrong distribution without an error."""
    model.feed(PROMPT)
    np.testing.assert_array_equal(model.eval([1, 2, 3], [-1, 0]), fresh(path, [*PROMPT, 1, 2, 3], 3))
    before = model.length
    for parents in ([-1, -1], [0, 1]):
        with pytest.raises(UnsupportedModel, match="tree"):
            model.eval([1, 2, 3], parents)
    with pytest.raises(UnsupportedModel, match="chain"):
        model.keep(3, [1])
    assert model.length == before
    assert not model.caps.tree


def test_too_long_a_block_is_an_error(model: LlamaModel) -> None:
    """Prevents: a failed assertion in llama.cpp for more output rows than announced."""
    assert model.caps.max_block == 6
    for tokens in ([1] * 7, []):
        with pytest.raises(BackendError, match="1 to 6"):
            model.eval(tokens)
    assert model.length == 0
    assert model.eval([1] * 6).shape == (6, 12)


def test_the_context_has_exactly_the_given_size(path: Path) -> None:
    """Prevents: a context rounded up, a hang, or a lost token at its end (FIELD_CASES 24)."""
    with tiny.load(path, n_ctx=20, n_batch=8) as model:
        model.feed(PROMPT)
        model.eval([1, 2, 3, 4, 5, 6])
        assert model.length == model.n_ctx == 20
        for call in (model.feed, model.eval):
            with pytest.raises(ContextFull, match="20"):
                call([1])
        assert model.length == 20
        model.truncate(10)
        assert model.eval([1]).shape == (1, 12)


@pytest.mark.parametrize("token", [-1, 12, 2_000_000_000])
def test_a_token_outside_the_vocabulary_is_named_and_harmless(model: LlamaModel, token: int) -> None:
    """Prevents: 'return code -1' as the only message."""
    model.feed(PROMPT[:3])
    with pytest.raises(BackendError, match=f"token {token} is outside"):
        model.eval([1, token])
    assert model.length == 3
    assert model.eval([1]).shape == (1, 12)


@pytest.mark.parametrize(
    ("status", "error"),
    [(1, ContextFull), (2, Interrupted), (-1, BackendError), (-2, MemoryShort), (-3, BackendError)],
)
def test_after_every_return_code_the_length_is_right(
    model: LlamaModel, path: Path, status: int, error: type[Exception]
) -> None:
    """Prevents: tokens of a failed call left in the KV cache of the next answer."""
    decode = model._lib.llama_decode

    def fail(context: object, batch: object) -> int:
        decode(context, batch)  # the worst case: all tokens are computed before the failure
        return status

    model.feed(PROMPT)
    with broken(model, llama_decode=fail):
        with pytest.raises(error):
            model.eval([1, 2, 3])
        assert model.length == len(PROMPT)
        with pytest.raises(error):
            model.feed([5] * 20)
        assert model.length == len(PROMPT)
    np.testing.assert_array_equal(model.eval([1, 2]), fresh(path, [*PROMPT, 1, 2], 2))


@pytest.mark.parametrize("call", [lambda model: model.eval([2]), lambda model: model.feed([2] * 20)])
def test_if_the_failed_tokens_cannot_be_removed_the_memory_is_emptied(
    model: LlamaModel, path: Path, call: Callable[[LlamaModel], object]
) -> None:
    """Prevents: a wrong length."""
    model.feed(PROMPT)
    model.eval([1])
    model.feed([3])
    with (
        broken(model, llama_decode=lambda *a: -3, llama_memory_seq_rm=lambda *a: False),
        pytest.raises(BackendError),
    ):
        call(model)
    assert model.length == 0
    model.feed(PROMPT)
    np.testing.assert_array_equal(model.eval([1]), fresh(path, [*PROMPT, 1], 1))


def test_ctrl_c_between_two_chunks_leaves_the_right_length(model: LlamaModel, path: Path) -> None:
    """Prevents: a wrong length after a KeyboardInterrupt, which Python raises when the C call returns."""
    decode = model._lib.llama_decode
    calls: list[int] = []

    def interrupt(context: object, batch: object) -> int:
        calls.append(1)
        status: int = decode(context, batch)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return status

    tokens = PROMPT * 3
    with broken(model, llama_decode=interrupt), pytest.raises(KeyboardInterrupt):
        model.feed(tokens)
    assert model.length == 8
    model.feed(tokens[8:])
    np.testing.assert_array_equal(model.eval([1]), fresh(path, [*tokens, 1], 1))


def test_the_end_tokens_are_known_before_the_first_answer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: 0.1 s for 150,000 calls in the first answer."""
    with tiny.load(path) as loaded:
        monkeypatch.setattr(type(loaded.vocab), "_check", lambda self, *tokens: pytest.fail("the vocabulary was asked"))
        assert loaded.end_tokens


@pytest.mark.parametrize("n_held", [0, 3, 7])
def test_ctrl_c_in_an_eval_leaves_the_kv_unchanged(model: LlamaModel, path: Path, n_held: int) -> None:
    """Prevents: held tokens counted twice, or lost, by an interrupted eval."""
    decode = model._lib.llama_decode

    def interrupt(context: object, batch: object) -> int:
        decode(context, batch)
        raise KeyboardInterrupt

    tokens = [*PROMPT[:8], *PROMPT[:n_held]]
    model.feed(tokens)
    with broken(model, llama_decode=interrupt), pytest.raises(KeyboardInterrupt):
        model.eval([1, 2])
    assert model.length == len(tokens)
    np.testing.assert_array_equal(model.eval([1, 2]), fresh(path, [*tokens, 1, 2], 2))


def test_a_set_flag_stops_before_the_computation(model: LlamaModel, path: Path) -> None:
    """Prevents: an answer that goes on after Ctrl-C; a flag that is never cleared."""
    cancel = Cancel()
    model.watch(cancel)
    model.feed(PROMPT)
    cancel.set()
    with pytest.raises(Interrupted):
        model.eval([1, 2])
    assert model.length == len(PROMPT)
    cancel.clear()
    np.testing.assert_array_equal(model.eval([1, 2]), fresh(path, [*PROMPT, 1, 2], 2))
    cancel.set()
    model.watch(None)
    assert model.eval([1]).shape == (1, 12)


def test_a_long_prefill_in_a_thread_is_stopped_by_the_flag(tmp_path: Path) -> None:
    """Prevents: Ctrl-C in an 8,000-token prefill that takes effect at its end (FIELD_CASES 37)."""
    path = tiny.write_model(tmp_path / "m.gguf", n_embd=128, n_ff=1024, n_layer=6, n_ctx=8192)
    with tiny.load(path, n_ctx=8192, n_batch=4096, n_ubatch=64) as model:
        cancel = Cancel()
        model.watch(cancel)
        errors: list[BaseException] = []

        def prefill() -> None:
            try:
                model.feed([1, 2, 3, 4] * 2000)
            except BaseException as error:
                errors.append(error)

        worker = threading.Thread(target=prefill)
        worker.start()
        time.sleep(0.1)
        cancel.set()
        raised_s = time.process_time()  # which a busy machine does not change
        worker.join(timeout=120)
        waited_s = time.process_time() - raised_s
        assert [type(error) for error in errors] == [Interrupted]
        assert waited_s < 1.0
        assert model.length in (0, 4096)
        cancel.clear()
        n_before = model.length
        model.feed([5, 6])
        after = model.eval([7]).copy()
        model.truncate(n_before)
        model.feed([5, 6])
        np.testing.assert_array_equal(after, model.eval([7]))


def test_two_models_may_watch_one_flag(path: Path) -> None:
    """Prevents: a draft that continues its prefill after the target has stopped."""
    cancel = Cancel()
    with tiny.load(path) as one, tiny.load(path) as other:
        one.watch(cancel)
        other.watch(cancel)
        cancel.set()
        for opened in (one, other):
            with pytest.raises(Interrupted):
                opened.eval([1])


def test_busy_time_is_the_time_inside_llama_cpp(model: LlamaModel) -> None:
    """Prevents: a wrong overhead of the loop in reports."""
    assert model.busy_s == 0.0
    start_s = time.perf_counter()
    model.feed(PROMPT)
    model.eval([1, 2])
    model.truncate(3)
    assert 0.0 < model.busy_s <= time.perf_counter() - start_s


def test_a_closed_model_raises_and_can_be_closed_again(path: Path) -> None:
    """Prevents: a call with freed memory; a second close that frees twice."""
    with tiny.load(path) as model:
        model.eval([1])
    model.close()
    for call in (
        lambda: model.feed([1]),
        lambda: model.eval([1]),
        lambda: model.truncate(0),
        lambda: model.watch(Cancel()),
    ):
        with pytest.raises(BackendError, match="closed"):
            call()


@pytest.mark.parametrize("kv", KV_TYPE_BYTES)
def test_llama_cpp_uses_the_given_kv_type(tmp_path: Path, kv: str) -> None:
    """Prevents: a name with the number of another type; a flag that is parsed and not used."""
    path = tiny.write_model(tmp_path / "m.gguf", n_embd=64)  # quantized types need heads of 32 numbers
    for type_k, type_v in ((kv, "f16"), ("f16", kv)):
        heard: list[str] = []
        set_log(lambda level, text, heard=heard: heard.append(text))
        try:
            with tiny.load(path, type_k=type_k, type_v=type_v) as model:
                assert np.isfinite(model.eval(PROMPT)).all()
        finally:
            set_log(None)
        assert any(f"K ({type_k})" in line and f"V ({type_v})" in line for line in heard)


@pytest.mark.parametrize("wanted", [True, False])
def test_extra_buffer_types_and_mapping_are_passed_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    """Prevents: the crash test's fallback without effect."""
    seen: list[tuple[bool, bool]] = []
    lib = bindings()

    def spy(name: bytes, params: Any) -> object:
        seen.append((params.use_extra_bufts, params.load_mode == 1))
        return lib.llama_model_load_from_file(name, params)

    monkeypatch.setattr("specllama.llama.open.bindings", lambda: Broken(lib, llama_model_load_from_file=spy))
    tiny.load(path, use_extra_bufts=wanted, use_mmap=wanted).close()
    assert seen == [(wanted, wanted)]


@pytest.mark.parametrize("wish", [{"type_k": "q8_0"}, {"type_v": "q8_0"}, {"type_k": "q8_0", "flash_attn": "off"}])
def test_a_kv_type_that_does_not_fit_the_heads_is_refused(path: Path, wish: dict[str, str]) -> None:
    """Prevents: a failed assertion of llama.cpp without flash attention, its own words with it."""
    with pytest.raises(UsageError, match="multiple of 32"):
        tiny.load(path, **wish)


@pytest.mark.parametrize("flash_attn", ["on", "off", "auto"])
def test_flash_attention_is_a_choice(path: Path, flash_attn: str) -> None:
    """Prevents: wrong numbers for on, off and auto."""
    with tiny.load(path, flash_attn=flash_attn) as model:
        assert model.eval(PROMPT).shape == (14, 12)


def test_loading_reports_its_progress_and_can_be_stopped(path: Path) -> None:
    """Prevents: a long load without progress, or one that Ctrl-C cannot stop."""
    seen: list[float] = []
    load(path, LoadOptions(n_threads=1), progress=lambda share: seen.append(share) is None).close()
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    with pytest.raises(Interrupted):
        load(path, LoadOptions(n_threads=1), progress=lambda share: False)


def test_the_end_of_the_fastest_call_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a fast load whose last progress is not told and which cannot be stopped."""
    monkeypatch.setattr("specllama.llama.open.start_new_thread", lambda work, _: work())
    looks: list[None] = []
    assert apart(lambda: 7, lambda: looks.append(None), Cancel()) == 7
    assert len(looks) == 1


def test_an_error_in_the_progress_callback_is_raised_again(path: Path) -> None:
    """Prevents: a KeyboardInterrupt lost in C frames."""

    def interrupt(share: float) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(path, LoadOptions(n_threads=1), progress=interrupt)


def test_a_model_has_its_facts(tmp_path: Path) -> None:
    """Prevents: reports with the wrong file, size or template."""
    path = tiny.write_model(tmp_path / "m.gguf", vocabulary=tiny.byte_level(), chat_template=tiny.CHATML)
    with tiny.load(path) as model:
        assert model.chat_template == tiny.CHATML
        assert (model.architecture, model.path, model.vocab_size) == ("llama", path, 263)
        assert model.header.name == "tiny llama"
        assert model.n_bytes == model.header.n_weight_bytes == 4 * model.n_params
        assert model.description.split()[:2] == ["llama", f"{model.n_params / 1e6:.3g}M"]
        assert model.end_tokens == {261, 262}
    with tiny.load(tiny.write_model(tmp_path / "n.gguf")) as model:
        assert model.chat_template is None


def test_the_build_is_described() -> None:
    """Prevents: missing facts in doctor and in benchmark reports."""
    info = build_info()
    assert info.bindings.count(".") == 2
    assert any("llama" in path.name for path in info.libraries)
    assert any(device.kind == "cpu" for device in info.devices)
    assert any(name.startswith("CPU.") for name in info.features)
    assert info == build_info()
    assert len(info.fingerprint) == 16
