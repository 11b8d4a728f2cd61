"""Models with recurrent layers: after any rejection the state is that of a fresh prefill; the way back is short."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from specllama.base.errors import BackendError, Interrupted, ModelFileError, UnsupportedModel
from specllama.chat.session import ChatSession
from specllama.chat.settings import Settings
from specllama.core.arrays import FloatArray
from specllama.core.engine import Engine
from specllama.core.events import Finished, TokenEvent
from specllama.core.kept_prefix import KeptPrefix
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import Cancel
from specllama.drafters import DraftSettings
from specllama.drafters.length import DraftLength
from specllama.drafters.lookup import LookupDrafter
from specllama.drafters.model import ModelDrafter
from specllama.drafters.token_map import NO_TOKEN
from specllama.drafters.translated import TranslatedModel
from specllama.llama import LlamaModel, read_header
from specllama.llama.header import state_bytes
from specllama.llama.rollback import DEVICE, KEPT, MOST_AGAIN, MOST_SAVED, SAVED, WINDOW, SavedStates
from tests import tiny, tiny_recurrent
from tests.llama.test_model import broken

ARCHITECTURES = (*tiny_recurrent.PURE, *tiny_recurrent.HYBRID)
KEEPING = ("lfm2", "nemotron_h", "qwen35")  # llama.cpp keeps their last states
BLOCK = [3, 1, 4, 1, 5]
ROUNDING = 1e-3  # of logits with a spread of about 1.5; on x86 they are equal to the last bit
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.3)

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recurrent")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def path(request: pytest.FixtureRequest, folder: Path) -> Path:
    return tiny.write_model(folder / f"{request.param}.gguf", arch=request.param, n_vocab=40)


@pytest.fixture
def model(path: Path) -> Iterator[LlamaModel]:
    with load(path, n_batch=16, max_block=6) as opened:
        yield opened


@pytest.fixture
def mamba(folder: Path) -> Iterator[LlamaModel]:
    path = tiny.write_model(folder / "alone.gguf", arch="mamba", n_vocab=40)
    with load(path, max_block=6, n_ctx=512) as opened:
        yield opened


def load(path: Path, **options: object) -> LlamaModel:
    """By the states that llama.cpp keeps, if it does."""
    return tiny.load(path, **{"rollback": KEPT, **options})


def text_of(n: int, seed: int = 1) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 37, n)]


def anew(model: LlamaModel, tokens: list[int], n_rows: int) -> FloatArray:
    """The last `n_rows` logits of the same model after an empty memory; it holds what it held before."""
    known = list(model._text)
    model._clear()
    model.feed(tokens[:-n_rows])
    rows = np.array(model.eval(tokens[-n_rows:]))
    model._clear()
    model.feed(known)
    return rows


def doubling(model: LlamaModel) -> TranslatedModel:
    """`model` as the draft of a target whose odd tokens it reads as the even one before, twice."""
    ids = np.arange(model.vocab_size)
    return TranslatedModel(model, np.where(ids % 2, NO_TOKEN, ids), Doubling(), vocab_size=model.vocab_size)


class Doubling:
    first = ()

    def __call__(self, token: int) -> tuple[int, ...]:
        return (token - 1, token - 1) if token % 2 else (token,)


def sizes_of(model: LlamaModel) -> list[int]:
    """The tokens of each decode from now on."""
    sizes, lib = list[int](), model._lib

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(lib, name)

        def llama_decode(self, context: object, batch: object) -> int:
            sizes.append(batch.n_tokens)  # type: ignore[attr-defined]
            return int(lib.llama_decode(context, batch))

    model._lib = Counting()
    return sizes


def test_the_way_back_is_that_of_the_architecture(model: LlamaModel) -> None:
    """Prevents: copies of a state that llama.cpp keeps anyway; a tree in a memory that holds one path."""
    assert isinstance(model._rollback, SavedStates)
    assert (model._rollback._n_kept > 0) == (model.architecture in KEEPING)
    assert model.caps.rollback
    assert not model.caps.tree


def test_every_pattern_of_rejections_leaves_the_state_of_a_fresh_prefill(path: Path) -> None:
    """Prevents: a rejected token that stays in the state, or an accepted one that is lost or counted twice."""
    require_every_pattern(path)


@pytest.mark.parametrize("arch", KEEPING)
def test_states_that_llama_cpp_keeps_can_be_saved_instead(folder: Path, arch: str) -> None:
    """Prevents: a measured choice between two ways, one of which was never tried with the architecture."""
    require_every_pattern(tiny.write_model(folder / f"saved-{arch}.gguf", arch=arch, n_vocab=40), rollback=SAVED)


@pytest.mark.parametrize("arch", ["mamba", "rwkv7", "jamba", "qwen35"])
def test_states_on_the_device_are_those_of_a_fresh_prefill(folder: Path, arch: str) -> None:
    """Prevents: a state on the device that a later one has replaced; here the device is the CPU."""
    require_every_pattern(tiny.write_model(folder / f"device-{arch}.gguf", arch=arch, n_vocab=40), rollback=DEVICE)


@pytest.mark.parametrize("arch", KEEPING)
def test_a_long_block_goes_back_beyond_the_kept_states(
    folder: Path, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: large states that are kept only a few at a time, and a block that loses more tokens than that."""
    path = tiny.write_model(folder / f"{arch}.gguf", arch=arch, n_vocab=40)
    monkeypatch.setattr("specllama.llama.header._MOST_KEPT_BYTES", 2 * state_bytes(read_header(path)))
    with load(path) as model:
        assert model.plan.n_kept_states == 2
    require_every_pattern(path)


def require_every_pattern(path: Path, **options: object) -> None:
    said = text_of(12)
    n_block = len(BLOCK)
    with load(path, max_block=6, **options) as model, load(path, max_block=6) as other:
        assert options.get("rollback", model.way_back.way) == model.way_back.way
        expected: dict[tuple[int, ...], FloatArray] = {}
        for pattern in product(range(n_block + 1), repeat=2):
            model.truncate(0)
            model.feed(said)
            text = list(said)
            for n_accepted in pattern:
                model.eval([7, *BLOCK])
                model.keep(len(text) + 1, range(n_accepted))
                text += [7, *BLOCK[:n_accepted]]
                assert model.length == len(text)
            rows = model.eval([2, 6])
            if tuple(text) not in expected:
                other.truncate(0)
                other.feed(text)
                expected[tuple(text)] = np.array(other.eval([2, 6]))
            np.testing.assert_allclose(rows, expected[tuple(text)], atol=ROUNDING)


@pytest.mark.slow
def test_a_random_walk_of_drafts_plain_steps_and_cuts_keeps_the_state(path: Path) -> None:
    """Prevents: a state that is saved or thrown away at the wrong time."""
    draw, said = np.random.default_rng(3), text_of(20)
    with load(path, n_batch=16, max_block=6) as model, load(path, n_batch=16, max_block=6) as other:
        model.feed(said[:-1])
        for step in range(50):
            drafted = text_of(int(draw.integers(0, 6)), seed=step)
            rows = np.array(model.eval([said[-1], *drafted]))
            n_accepted = int(draw.integers(0, len(drafted) + 1))
            other.truncate(0)
            other.feed(said[:-1])
            np.testing.assert_allclose(rows, other.eval([said[-1], *drafted]), atol=ROUNDING)
            model.keep(len(said), range(n_accepted))
            said += [*drafted[:n_accepted], int(draw.integers(0, 37))]
            if step % 11 == 10:
                del said[int(draw.integers(1, len(said))) :]
                model.truncate(len(said) - 1)


def test_tokens_read_one_by_one_are_taken_back(path: Path) -> None:
    """Prevents: a draft model that drafts on after its own rejected tokens."""
    said = text_of(30)
    with load(path) as draft, load(path) as other:
        kept = KeptPrefix.of(draft)
        for n in range(12, 30):
            n_held = kept.rewind(said[:n])
            kept.feed(said[n_held : n - 1])
            kept.eval(said[n - 1 : n])
            for token in BLOCK[: n % 5]:
                kept.eval([token])
            kept.rewind(said[: n + 1])
            found = np.array(kept.eval(said[n : n + 1]))
            other.truncate(0)
            other.feed(said[:n])
            np.testing.assert_allclose(found, other.eval(said[n : n + 1]), atol=ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["target", "draft", "lookup"])
def test_greedy_answers_with_drafts_are_those_of_plain_decoding(path: Path, role: str, tmp_path: Path) -> None:
    """Prevents: text that depends on the drafts, by a recurrent target or a recurrent draft."""
    with load(path) as model, load(tiny.write_model(tmp_path / "m.gguf", n_vocab=40)) as partner:
        target, draft = (partner, model) if role == "draft" else (model, partner)

        def answer(prompt: list[int], *, drafts: bool) -> tuple[list[int], int]:
            drafter = LookupDrafter(n_max=4) if role == "lookup" else ModelDrafter(draft, n_max=4)
            engine = Engine(target, drafter if drafts else None)
            events = list(engine.generate(prompt, GREEDY, RandomChooser(0), max_tokens=40))
            return [event.token for event in events if isinstance(event, TokenEvent)], events[-1].stats.n_rejected

        n_rejected = 0
        for seed in range(4):
            prompt = text_of(9, seed=seed) * 2
            tokens, n_more = answer(prompt, drafts=True)
            assert tokens == answer(prompt, drafts=False)[0]
            n_rejected += n_more
        assert n_rejected, "drafts that are always accepted show nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "rollback"),
    [
        *((arch, KEPT) for arch in ARCHITECTURES),
        *((arch, SAVED) for arch in KEEPING),
        ("jamba", DEVICE),
        ("gemma3", WINDOW),
    ],
)
def test_a_chat_with_regen_undo_and_a_full_context_is_that_of_plain_decoding(
    arch: str, rollback: str, tmp_path: Path
) -> None:
    """Prevents: an answer to a text that was taken back, in either model."""
    n_ctx, window = (400, {"sliding_window": 8}) if arch == "gemma3" else (256, {})
    paths = tiny.write_pair(
        tmp_path, arch=arch, vocabulary=tiny.ascii_level(), chat_template=tiny.CHATML, n_ctx=n_ctx, noise=0.02, **window
    )
    how = {"rollback": rollback, "n_ctx": n_ctx, "n_batch": 64}
    wish = {"params": GREEDY, "n_predict": 12, "seed": 1}
    drafting = Settings(**wish, strategy="draft-simple", drafting=DraftSettings(length=DraftLength(3)))  # type: ignore[arg-type]
    with load(paths[0], **how) as target, load(paths[1], **how) as draft, load(paths[0], **how) as other:
        chats = ChatSession(target, draft, drafting), ChatSession(other, settings=Settings(**wish, strategy="none"))  # type: ignore[arg-type]
        acts: list[Callable[[ChatSession], object]] = [
            *(lambda chat, i=i: list(chat.ask(f"question {i} " + "x" * 20)) for i in range(3)),  # type: ignore[misc]
            lambda chat: list(chat.regen()),
            lambda chat: chat.undo(),
            lambda chat: list(chat.ask("another one")),
            lambda chat: list(chat.edit("in its place")),
            *(lambda chat, i=i: list(chat.ask(f"longer {i} " + "y" * 50)) for i in range(4)),  # type: ignore[misc]
        ]
        for act in acts:
            for chat in chats:
                act(chat)
            assert [turn.answer for turn in chats[0].turns] == [turn.answer for turn in chats[1].turns]
        assert chats[0].n_dropped > 0
        assert chats[0].stats.n_drafted > chats[0].stats.n_accepted


def test_a_stopped_computation_leaves_the_state_of_the_text_before(model: LlamaModel) -> None:
    """Prevents: half a block in the state after Ctrl-C, which llama.cpp leaves there."""
    said, cancel = text_of(20), Cancel()
    model.feed(said)
    model.eval([1])
    model.watch(cancel)
    for call in (lambda: model.eval([2, 3]), lambda: model.eval([2]), lambda: model.feed(text_of(40))):
        cancel.set()
        with pytest.raises(Interrupted):
            call()
        cancel.clear()
        assert model.length == 21
    found = np.array(model.eval([2, 3]))
    np.testing.assert_allclose(found, anew(model, [*said, 1, 2, 3], 2), atol=ROUNDING)


@pytest.mark.parametrize("where", ["llama_decode", "llama_state_seq_set_data_ext", "llama_state_seq_get_data_ext"])
def test_after_any_failure_the_text_is_read_again(mamba: LlamaModel, where: str) -> None:
    """Prevents: a state that is half restored, or one that was never saved and is taken for the text's."""
    said = text_of(20)
    decode = mamba._lib.llama_decode

    def fail(*arguments: object) -> int:
        if where == "llama_decode":
            decode(*arguments)
            return -3
        return 0

    mamba.feed(said)
    mamba.eval([1])
    with broken(mamba, **{where: fail}):
        if where == "llama_decode":
            with pytest.raises(BackendError):
                mamba.eval([2, 3])
        else:
            mamba.eval([2, 3])
            mamba.truncate(21)
    assert mamba.length == 21
    np.testing.assert_allclose(np.array(mamba.eval([2, 3])), anew(mamba, [*said, 1, 2, 3], 2), atol=ROUNDING)


def test_few_tokens_are_computed_again_after_a_rejection(mamba: LlamaModel) -> None:
    """Prevents: a whole prompt read again for each rejected token, or ever more tokens from step to step."""
    length = 60
    mamba.feed(text_of(length))
    sizes = sizes_of(mamba)
    for step in range(40):
        mamba.eval([1, 2, 3, 4])
        n_accepted = step % 3
        length += 1 + n_accepted
        mamba.keep(length - n_accepted, range(n_accepted))
    assert sizes[0] == 60  # the prompt, so that the way back to it is short
    assert max(sizes[1:]) <= MOST_AGAIN + 4
    assert sum(sizes[1:]) <= 40 * (4 + MOST_AGAIN)
    assert len(sizes[1:]) <= 40 * 1.5


def test_plain_decoding_saves_few_states_and_keeps_few(mamba: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a copy of a large state for each token of an answer without drafts; memory that grows with the text."""
    saved, save = list[int](), SavedStates._save
    monkeypatch.setattr(SavedStates, "_save", lambda self, call, n: (saved.append(n), save(self, call, n)))
    prompt, kept = text_of(30), KeptPrefix.of(mamba)
    kept.rewind([*prompt, 1])
    kept.feed(prompt)
    for token in text_of(150):
        kept.eval([token])
        mamba.keep(mamba.length, ())
    assert len(saved) <= 150 // MOST_AGAIN + 2
    assert isinstance(mamba._rollback, SavedStates)
    assert len(mamba._rollback._saved) <= MOST_SAVED
    assert 30 in mamba._rollback._saved, "the beginning of the answer, for another one"


@pytest.mark.parametrize(("n_prompt", "n_answer"), [(30, 150), (100, 400)])
def test_another_answer_reads_no_prompt_again(mamba: LlamaModel, n_prompt: int, n_answer: int) -> None:
    """Prevents: a prompt read again for /regen after a long answer."""
    prompt, engine = text_of(n_prompt), Engine(mamba)
    unending = replace(GREEDY, logit_bias=dict.fromkeys(mamba.end_tokens, -np.inf))
    list(engine.generate(prompt, unending, RandomChooser(0), max_tokens=n_answer))
    sizes = sizes_of(mamba)
    list(engine.generate(prompt, unending, RandomChooser(1), max_tokens=50))
    assert sizes == [1] * 50


def test_a_draft_reads_few_tokens_again(folder: Path) -> None:
    """Prevents: a state from which a draft goes on, dropped for a newer one that holds its rejected tokens."""
    path = tiny.write_model(folder / "draft.gguf", arch="lfm2", n_vocab=40)
    with load(path, n_ctx=512) as draft:
        drafter, said, accepted = ModelDrafter(draft, n_max=3), text_of(60), np.random.default_rng(7)
        drafter.begin(said)
        sizes = sizes_of(draft)
        for token in text_of(60, seed=7):
            drafted = drafter.propose(said, 3, GREEDY, RandomChooser(0)).tokens
            said += [*drafted[: accepted.integers(0, 4)], token]
    assert sizes[0] == 59
    assert max(sizes[1:]) <= MOST_AGAIN  # 40 without it


@pytest.mark.parametrize("translated", [False, True])
def test_a_draft_reads_no_prompt_again_for_another_answer(mamba: LlamaModel, translated: bool) -> None:
    """Prevents: a draft, which reads the prompt together with the first token, without a state at the prompt's end."""
    drafter = ModelDrafter(doubling(mamba) if translated else mamba, n_max=2)
    prompt = [*text_of(60), 3]

    def answer(tokens: list[int]) -> None:
        drafter.begin(prompt)
        for n in range(len(tokens) + 1):
            drafter.propose([*prompt, *tokens[:n]], 2, GREEDY, RandomChooser(0))

    answer(text_of(150, seed=2))
    sizes = sizes_of(mamba)
    answer([])
    assert 0 < sum(sizes) <= 4


def test_a_translated_draft_goes_back_to_a_whole_spelling(mamba: LlamaModel) -> None:
    """Prevents: text that counts as held and is computed again, because the adapter hides the saved states."""
    draft = doubling(mamba)
    kept, text = KeptPrefix.of(draft), [3] * 60
    kept.rewind(text)
    kept.feed(text[:-1])
    kept.eval(text[-1:])
    assert isinstance(mamba._rollback, SavedStates)
    assert list(mamba._rollback._saved) == [2 * 59]
    assert [draft.resume_at(n) for n in (60, 59, 40, 2, 0)] == [60, 59, 0, 2, 0]
    mamba._rollback._saved[45] = mamba._rollback._saved.pop(2 * 59)  # within a spelling
    assert [draft.resume_at(n) for n in (60, 59, 40, 2, 0)] == [60, 0, 0, 2, 0]


@pytest.mark.parametrize(("n_same", "n_cached"), [(60, 0), (99, 99), (107, 99), (148, 141)])
def test_a_text_that_parts_from_the_last_one_is_read_from_the_nearest_state(
    mamba: LlamaModel, n_same: int, n_cached: int
) -> None:
    """Prevents: a long silence after /undo: text that is said to be cached, and is computed with the first block."""
    engine, text = Engine(mamba), text_of(100)
    unending = replace(GREEDY, logit_bias=dict.fromkeys(mamba.end_tokens, -np.inf))
    events = list(engine.generate(text, unending, RandomChooser(0), max_tokens=50))
    text += [event.token for event in events if isinstance(event, TokenEvent)]
    sizes = sizes_of(mamba)
    prompt = [*text[:n_same], *((token + 1) % 37 for token in text_of(40, seed=2))]
    finished = list(engine.generate(prompt, unending, RandomChooser(0), max_tokens=1))[-1]
    assert isinstance(finished, Finished)
    assert abs(finished.stats.n_cached - n_cached) <= MOST_AGAIN
    assert finished.stats.n_cached <= n_same
    assert sum(sizes) <= len(prompt) - finished.stats.n_cached + MOST_AGAIN


@pytest.mark.parametrize(
    ("blocks", "lengths"),
    [
        ([[1, 2, 3, 4], [5]], [22, 21]),  # before the last decode
        ([[1, 2, 3, 4]], [23, 22]),  # twice without a decode between
        ([[1, 2, 3, 4]], [20, 19]),  # to a saved state, then before it
        ([[1]], [5]),  # to the beginning; the probe at load had another text
    ],
)
@pytest.mark.parametrize("arch", ["lfm2", "mamba"])
def test_a_state_serves_only_its_own_text(folder: Path, arch: str, blocks: list[list[int]], lengths: list[int]) -> None:
    """Prevents: a state of an older decode, which llama.cpp takes for the one asked for."""
    path, text = tiny.write_model(folder / f"own-{arch}.gguf", arch=arch, n_vocab=40), text_of(20)
    with load(path, max_block=6) as model:
        model.feed(text)
        for block in blocks:
            model.eval(block)
            text += block
        for length in lengths:
            model.truncate(length)
        text[lengths[-1] :] = [9, 8]
        np.testing.assert_allclose(np.array(model.eval([9, 8])), anew(model, text, 2), atol=ROUNDING)


def test_after_an_accepted_block_the_next_one_begins_with_a_save(mamba: LlamaModel) -> None:
    """Prevents: tokens of an accepted block computed again because the one after it was rejected."""
    mamba.feed(text_of(60))
    mamba.eval([1, 2, 3, 4])
    mamba.keep(61, range(3))
    mamba.eval([5, 6, 7, 8])
    mamba.keep(65, ())
    sizes = sizes_of(mamba)
    mamba.eval([1, 2])
    assert sizes == [1 + 2]


def test_trees_are_refused_with_the_reason(path: Path) -> None:
    """Prevents: states for sequences that no tree can use; a tree read as if its branches followed each other."""
    with load(path, max_leaves=4) as model:
        assert (model.plan.n_lines, model.caps.tree, model.caps.max_leaves) == (1, False, 1)
        assert "recurrent" in model.no_tree
        with pytest.raises(UnsupportedModel):
            model.eval([1, 2, 3], [-1, -1])


def test_the_memory_counts_the_states(path: Path) -> None:
    """Prevents: a context that fits without the states of the model, but not with them."""
    with load(path, max_block=6) as model:
        assert isinstance(model._rollback, SavedStates)
        model.feed(text_of(200))
        model.eval([1])
        state = len(next(iter(model._rollback._saved.values())).data)
        assert model.plan.need.kv >= state_bytes(model.header) * (MOST_SAVED + 2)
        assert state <= state_bytes(model.header) + 1000, "no attention cells, which are not lost"


def test_heads_that_kernels_would_read_across_are_refused(folder: Path) -> None:
    """Prevents: logits that depend on the memory behind a head of 32 numbers, in RWKV kernels that read 64."""
    path = tiny.write_model(folder / "narrow.gguf", arch="rwkv7", extra={"rwkv7.wkv.head_size": 32})
    with pytest.raises(ModelFileError, match="head_size"):
        read_header(path)
