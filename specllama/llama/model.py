"""Models on llama.cpp: load, eval, roll back. No ctypes type leaves this package.

It calls the low-level API: a batch with numpy views of its arrays, logits of the block's rows only, and one KV sequence
with a length that is always known, also after an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from specllama.base.clock import perf_counter
from specllama.base.errors import BackendError, ContextFull, Interrupted, MemoryShort, RollbackRefused
from specllama.base.text import counted
from specllama.core.arrays import FloatArray
from specllama.core.types import Caps, require_chain
from specllama.files.gguf_check import read_parts
from specllama.kernels.library import Kernels, self_test
from specllama.llama import crash_test, rpc
from specllama.llama.bindings import attach_kernels, bindings, devices, extra_buffer_types, log
from specllama.llama.context import Context
from specllama.llama.crash_test import Use
from specllama.llama.header import Header, cannot_roll_back, make_header, refuse_architecture, why_no_tree
from specllama.llama.load_plan import (
    GpuMemory,
    LoadOptions,
    LoadPlan,
    bytes_beyond_file,
    check_options,
    physical_cores,
    plan_load,
)
from specllama.llama.log import LogSink
from specllama.llama.memory import MemoryNeed, memory_free, need_for
from specllama.llama.open import (
    LoadProgress,
    Native,
    describe,
    load_model,
    load_models,
    load_vocabulary_only,
    open_context,
    refuse_kind,
)
from specllama.llama.quantize import quantize
from specllama.llama.rollback import (
    DEVICE,
    KEPT,
    MOST_AGAIN,
    SAVED,
    WINDOW,
    Rollback,
    SavedStates,
    Truncation,
    WindowCache,
)
from specllama.llama.tree import Growth, Tree, TreeLines
from specllama.llama.vocab import Vocabulary
from specllama.llama.ways import ASKED, N_REJECTED, N_ROWS, N_STEPS, MeasuredWays, WayBack, by_kind, compared, wished

_EVERY = -1  # sequence
_WIDE = 6  # rows of the test of our kernels
_N_REHEARSED = 128  # tokens of context
_ROUNDING = 0.5  # most that a logit of a row depends on the rows beside it, in parts of the logits' spread
_CHARACTERS = (*range(0x250), *range(0x4E00, 0x4E20), *range(0x1F600, 0x1F620))  # of a rehearsal: 1 to 4 bytes long


def set_log(sink: LogSink | None) -> None:
    """Pass all lines of llama.cpp's log to `sink(level, text)`; None (the default) shows none."""
    log.read()  # the lines so far are not for this sink
    log.sink = sink


def read_header(path: Path, *, needs_weights: bool = True) -> Header:
    """The header of a model; reads no weights, and accepts a file without any if not `needs_weights`.

    Raises ModelFileError.
    """
    path = Path(path)
    return make_header(path, read_parts(path), needs_weights=needs_weights)


def _opened(model: Path | Header, *, needs_weights: bool = True) -> Header:
    return model if isinstance(model, Header) else read_header(model, needs_weights=needs_weights)


def memory_needed(model: Header, options: LoadOptions | None = None) -> MemoryNeed:
    """The memory of the model with these options; a context of 0 is the model's own. Raises UsageError."""
    wish = options or LoadOptions()
    check_options(model, wish)
    return need_for(
        model,
        n_ctx=wish.n_ctx or model.n_ctx_train,
        n_ubatch=wish.n_ubatch,
        n_outputs=wish.n_outputs,
        type_k=wish.type_k,
        type_v=wish.type_v,
        n_more=bytes_beyond_file(model, wish, extra_buffer_types(kernels=wish.kernels)),
        way_back=wished(model, wish.rollback),
        flash_attn=wish.flash_attn,
    )


def load(
    model: Path | Header, options: LoadOptions | None = None, *, progress: LoadProgress | None = None
) -> LlamaModel:
    """Load a model and open a context on it.

    `progress` receives the share that is loaded and may return False to stop. Raises ModelFileError, UnsupportedModel,
    MemoryShort, UsageError, BackendError, and Interrupted if `progress` returns False.
    """
    return load_together([(model, options or LoadOptions())], progress=progress)[0]


def load_together(
    models: Sequence[tuple[Path | Header, LoadOptions]], *, progress: LoadProgress | None = None
) -> list[LlamaModel]:
    """Load models at the same time, then open their contexts one after another. Only for models on the CPU: layers on
    a GPU are planned for memory that the other models may take.

    As `load`; after an error none is loaded.
    """
    rpc.connect(tuple(server for _, options in models for server in options.rpc))
    gpu = _gpu_memory(remote=any(options.rpc for _, options in models))
    free, wishes, plans = memory_free(), list[_Wish](), list[LoadPlan]()
    for model, options in models:
        about = _opened(model)
        refuse_architecture(about)
        wishes.append(_Wish(about, options, free, gpu, extra_buffer_types(kernels=options.kernels)))
        plans.append(wishes[-1].planned(options.rollback))
        free -= plans[-1].need.total
    prove(*(wish.about for wish in wishes))
    natives = load_models([(wish.about, plan) for wish, plan in zip(wishes, plans, strict=True)], progress)
    with ExitStack() as owned:
        for native in natives:
            owned.callback(native.close)
        rpc.watch_connections()
        loaded = []
        for native, wish, plan in zip(natives, wishes, plans, strict=True):
            refuse_kind(native, wish.about)
            loaded.append(_cheapest(native, wish.about, plan, wish.planned, progress))
            if wish.options.max_leaves > 1:
                loaded[-1].probe_tree()
        owned.pop_all()
    return loaded


@dataclass(frozen=True, slots=True)
class _Wish:
    """A model to be loaded, and what its plan depends on."""

    about: Header
    options: LoadOptions
    free: int  # bytes of main memory
    gpu: GpuMemory
    extra: tuple[str, ...]  # buffer types

    def planned(self, rollback: str) -> LoadPlan:
        options = replace(self.options, rollback=rollback)
        return plan_load(self.about, options, free=self.free, gpu=self.gpu, extra=self.extra)


def way_back(model: Header, options: LoadOptions | None = None) -> WayBack:
    """The way back that `load` takes, as far as that is known without loading. Raises UsageError."""
    wish = options or LoadOptions()
    gpu, extra = _gpu_memory(remote=bool(wish.rpc)), extra_buffer_types(kernels=wish.kernels)
    try:
        plan = plan_load(model, wish, free=memory_free(), gpu=gpu, extra=extra)
    except MemoryShort:
        plan = plan_load(model, wish, free=sys.maxsize, gpu=gpu, extra=extra)
    return _known(model, plan) or plan.way_back


def _cheapest(
    native: Native,
    about: Header,
    plan: LoadPlan,
    planned: Callable[[str], LoadPlan],
    progress: LoadProgress | None,
) -> LlamaModel:
    """The model with a context for the cheapest way back; ways that can be compared are measured once."""

    def opened(plan: LoadPlan) -> LlamaModel:
        open_context(native, about, plan)
        model = LlamaModel(native, about, plan)
        model.probe_rollback()
        return model

    ways, last = _compared(about, plan), None
    choice = _known(about, plan)
    if ways and choice is None and plan.max_block >= N_ROWS and plan.n_ctx >= _N_REHEARSED:
        step_s = {}
        for way in reversed(ways):  # the one to prefer last: it often stays
            last = opened(planned(way))
            step_s[way] = last.step_with_rejections()
            if progress is not None and progress(1.0) is False:
                raise Interrupted(f"loading {about.path.name} was stopped on request")
        choice = MeasuredWays(about, ways).keep(step_s)
    if choice is None:
        return opened(plan)
    if last is None or last.way_back.way != choice.way:
        last = opened(planned(choice.way))
    last.way_back = choice
    return last


def _compared(about: Header, plan: LoadPlan) -> tuple[str, ...]:
    return () if plan.way_back.why == ASKED else compared(about, on_gpu=plan.n_gpu_layers > 0)


def _known(about: Header, plan: LoadPlan) -> WayBack | None:
    ways = _compared(about, plan)
    return MeasuredWays(about, ways).choice() if ways else None


def prove(*models: Header) -> None:
    """Raise ModelFileError if llama.cpp crashes on one of the files: see `crash_test.require_sound`.

    The weights are read if they fit into main memory; the page cache then keeps them for `load`.
    """
    free = memory_free()
    crash_test.require_sound({model: 0 < model.n_weight_bytes <= free for model in models})


def rehearse(use: Use) -> object:
    """Use a model as an answer does, on the CPU. Only for a child process: llama.cpp may end it.

    The result keeps the model, because freeing it takes 0.2 s. Raises as `load`, and BackendError for logits that are
    not finite.
    """
    kernels = None
    if use.kernels:
        if wrong := self_test(Path(use.kernels)):
            raise BackendError(wrong)
        kernels = attach_kernels(Path(use.kernels))
    about = read_header(Path(use.path), needs_weights=False)
    if not about.n_weight_bytes:
        native = load_vocabulary_only(about)
        _use_vocabulary(Vocabulary(bindings(), bindings().llama_model_get_vocab(native.pointers.model), native))
        return native
    wish = LoadOptions(
        n_ctx=_N_REHEARSED,
        n_threads=1,  # threads that wait for each other take seconds on a busy machine
        n_gpu_layers=0,
        use_extra_bufts=use.use_extra_bufts,
        kernels=bool(use.kernels),
        max_block=max(use.widths, default=1),
        use_mmap=use.weights,
    )
    gpu = GpuMemory(supported=False, n_free=0, shared=False)
    plan = plan_load(about, wish, free=sys.maxsize, gpu=gpu, extra=extra_buffer_types())
    native = load_model(about, plan, None, weights=use.weights)
    refuse_kind(native, about)
    open_context(native, about, plan)
    model = LlamaModel(native, about, plan)
    _use_vocabulary(model.vocab)
    if not use.weights:
        return model
    model.probe_rollback()
    for width in use.widths:
        if not np.isfinite(model.eval([token % model.vocab_size for token in range(width)])).all():
            raise BackendError(f"a decode of {width} tokens gave NaN or infinite logits")
    if kernels is not None:
        _require_ours(model, kernels)
    return model


def _require_ours(model: LlamaModel, kernels: Kernels) -> None:
    if not kernels.n_packed:
        raise BackendError("llama.cpp gives them no weights")
    tokens = [token % model.vocab_size for token in range(min(_WIDE, model.plan.max_block))]
    model.truncate(0)
    together = np.array(model.eval(tokens))
    model.truncate(0)
    if not np.array_equal(together, np.concatenate([np.array(model.eval([token])) for token in tokens])):
        raise BackendError("a row depends on the tokens beside it")


def _use_vocabulary(vocab: Vocabulary) -> None:
    if vocab.kind == "none":
        return
    for special in (False, True):
        vocab.tokenize("".join(map(chr, _CHARACTERS)), special=special)


def requantize(source: Path | Header, destination: Path, kind: str, *, progress: LoadProgress | None = None) -> None:
    """Write `source` to `destination` with its weights in `kind`; see `quantize`."""
    about = _opened(source)
    refuse_architecture(about)
    quantize(about, destination, kind, n_threads=physical_cores(), progress=progress)


def load_vocabulary(model: Path | Header) -> Vocabulary:
    """The vocabulary of a model file, without its weights. Raises ModelFileError and UnsupportedModel."""
    about = _opened(model, needs_weights=False)
    refuse_architecture(about)
    crash_test.require_sound({about: False})
    native = load_vocabulary_only(about)
    return Vocabulary(bindings(), bindings().llama_model_get_vocab(native.pointers.model), native, native.records)


class LlamaModel(Context):
    """A model with a KV cache for one sequence; implements `types.LanguageModel`.

    Invariant: `length` = tokens in llama.cpp's memory + held tokens, also after errors. Held tokens are computed in the
    same pass as those of the next `eval`: those of `feed` that do not fill a batch, and those that a way back loses.
    """

    def __init__(self, native: Native, about: Header, plan: LoadPlan) -> None:
        lib, model = native.pointers.lib, native.pointers.model
        self.vocab = Vocabulary(lib, lib.llama_model_get_vocab(model), native, native.records)
        super().__init__(native, about, plan, self.vocab.size, plan.n_lines)
        self._n_batch = plan.n_batch
        self._n_decoded = 0
        self._text: list[int] = []  # the tokens in llama.cpp's memory, then the held ones
        self._tree: Tree | None = None  # of the last eval; a model for chains keeps none
        self._lines = TreeLines(0, plan.n_lines)
        self.has_states = bool(lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model))
        self._rollback, self.way_back = _way_back(native, self._memory, plan, has_states=self.has_states)
        self.header = about
        self.architecture = about.architecture
        self.chat_template = about.chat_template
        self.warnings = plan.warnings
        self.end_tokens = self.vocab.end_tokens  # may take 0.1 s, so not in the first answer
        self.n_ctx = plan.n_ctx
        self.n_params: int = lib.llama_model_n_params(model)
        self.n_bytes: int = lib.llama_model_size(model)
        self.description = describe(native, self.n_params)
        self.caps = Caps(max_block=plan.max_block, n_again=self._rollback.n_again)
        self.no_tree = ""  # why trees, though asked for, cannot be evaluated

    @property
    def length(self) -> int:
        """Tokens in the KV cache, including held tokens."""
        return len(self._text)

    @property
    def tokens(self) -> Sequence[int]:
        """See `types.Recording`."""
        return self._text

    def feed(self, tokens: Sequence[int]) -> None:
        """Append tokens without logits. Full batches are computed now, the remainder with the next `eval`.

        Raises ContextFull, Interrupted (computed tokens stay, see `length`) and BackendError.
        """
        self._require_line()
        self._require_room(self.length, len(tokens))
        n_before, self._tree = self.length, None
        self._text.extend(tokens)
        try:
            while self.length - self._n_decoded >= self._n_batch:
                self._decode(self._text[self._n_decoded : self._n_decoded + self._n_batch], 0)
        except BaseException:
            del self._text[max(n_before, self._n_decoded) :]
            raise

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        """Append tokens and return their logits, (len(tokens), V) float32: a read-only view, valid until the next call.

        `parents`: one for each token after the first, see `types.LanguageModel`. An error leaves the KV cache
        unchanged. Raises ContextFull, Interrupted, UnsupportedModel for trees that the model cannot evaluate,
        BackendError for too many tokens or a failure.
        """
        n_rows = len(tokens)
        self._require_line()
        self._require_rows(n_rows)
        growth = None
        if self.caps.tree:
            growth = Tree(self.length).growth(tokens[1:], range(-1, n_rows - 2) if parents is None else parents)
            self._require_leaves(growth.n_lines)
        else:
            require_chain(parents)
        while held := self._text[self._n_decoded :]:
            n_first = self._rollback.n_first(self._n_decoded, len(held))
            if not n_first and len(held) + n_rows <= self._n_batch:
                break
            self._decode(held[: min(n_first or len(held), self._n_batch)], 0)
        self._decode([*held, *tokens], n_rows, growth)
        return self._logits(n_rows)

    def grow(self, tokens: Sequence[int], parents: Sequence[int]) -> FloatArray:
        """Append nodes to the tree of the last `eval`, see `types.Growing`. Errors are those of `eval`; they end the
        tree, and the pending token stays.
        """
        self._require_rows(len(tokens))
        if self._tree is None:
            raise ValueError("there is no tree that can grow, expected an eval of a model with caps.tree")
        growth = self._tree.growth(tokens, parents)
        self._require_leaves(growth.n_lines)
        self._decode(tokens, len(tokens), growth)
        return self._logits(len(tokens))

    def truncate(self, length: int) -> None:
        """Remove all tokens from `length` on. Raises RollbackRefused and then removes none."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} tokens to {length}")
        if self._tree is not None and self._tree.branches and length > self._tree.root + 1:
            raise ValueError(f"cannot truncate to {length} tokens, within a tree: use keep")
        if length < self._n_decoded and not self._back(length):
            raise self._refused(length)
        del self._text[length:]
        self._tree = None

    def resume_at(self, length: int) -> int:
        """See `types.Resuming`: a state may have to be computed again from the last saved one on."""
        if length >= self._n_decoded:
            return length
        nearest = self._rollback.nearest(self._call, self._n_decoded, length)
        return length if length - nearest <= MOST_AGAIN else nearest

    def expect_return(self, tokens: Sequence[int]) -> None:
        """See `types.Resuming`."""
        self._rollback.expect_return(self.length + len(tokens))

    def keep(self, length: int, path: Sequence[int]) -> None:
        """Keep the KV cache up to `length` (the pending token) and the nodes of `path`.

        Only nodes that follow each other in the cache keep their cells. The rest of the path is computed again, with
        the next `eval`: in other cells, attention would add in another order than after a chain.
        """
        tree = self._tree
        if tree is None or not tree.branches:
            require_chain(kept=path)
            self.truncate(length + len(path))
            return
        n_kept, again = tree.kept(length, path)
        self._prune(tree, n_kept)
        self._text.extend(again)

    def set_threads(self, n_one: int, n_many: int) -> None:
        """Set the threads for single tokens and for several tokens at once."""
        self._require_open()
        self._lib.llama_set_n_threads(self._context, n_one, n_many)

    def close(self) -> None:
        self.vocab.close()
        super().close()

    def _require_line(self) -> None:
        if self._tree is not None and self._tree.branches:
            raise ValueError("the KV cache holds a tree, expected keep or truncate first")

    def _require_rows(self, n_rows: int) -> None:
        self._require_room(self.length, n_rows)
        if not 1 <= n_rows <= self.caps.max_block:
            raise BackendError(
                f"eval got {counted(n_rows, 'token')} (expected 1 to {self.caps.max_block})",
                hint="draft fewer tokens, or load the model with a larger max_block and n_batch",
            )

    def _require_leaves(self, n_leaves: int) -> None:
        if n_leaves > self.caps.max_leaves:
            raise BackendError(
                f"eval got a tree with {n_leaves} leaves (expected 1 to {self.caps.max_leaves})",
                hint="draft a tree with fewer branches, or load the model with a larger max_leaves",
            )

    def _decode(self, tokens: Sequence[int], n_rows: int, growth: Growth | None = None) -> None:
        """Append `tokens`, with logits for the last `n_rows` of them; all or nothing.

        `growth`: the last tokens are these nodes; those before them end with the pending token of a new tree. An error
        also ends a tree that grows.
        """
        start = before = self._n_decoded
        n_text = self.length
        if growth is not None and len(tokens) == len(growth.tokens):
            n_text = before = growth.tree.root + 1
        try:
            self._rollback.before(self._call, start, n_rows)
            n_before = len(tokens) - (len(growth.tokens) if growth else 0)
            positions = [*range(start, start + n_before), *(growth.positions if growth else ())]
            for source, line, begin, end in self._lines.join(growth, start):
                self._call("llama_memory_seq_cp", self._memory, source, line, begin, end)
            outputs = [False] * (len(tokens) - n_rows) + [True] * n_rows
            self._batch.fill(tokens, positions, self._lines.of(n_before, growth), outputs)
            self._compute(tokens)
            self._rollback.after(len(tokens))
            self._n_decoded = start + len(tokens)
            self._text[start : self._n_decoded] = tokens
            self._tree = self._lines.grown(growth)
        except BaseException:  # Ctrl-C arrives when the call returns
            self._cut_back(before, n_text)
            raise

    def _remove(self, line: int, start: int) -> bool:
        """Take a line, or every line, out of the cells from position `start` on; a cell without any is free."""
        if not self._call("llama_memory_seq_rm", self._memory, line, start, -1):
            return False
        self._lines.cut(start, None if line == _EVERY else line)
        return True

    def _prune(self, tree: Tree, n_kept: int) -> None:
        """Keep the first nodes, a path in order, and no others. Raises RollbackRefused: the memory is then empty."""
        end = tree.root + 1 + n_kept
        removed = self._remove(_EVERY, end)
        for line, start in self._lines.limits(end, tree):
            removed = removed and self._remove(line, start)
        if not removed:
            self._clear()
            raise self._refused(end)
        self._n_decoded = end
        del self._text[end:]
        self._tree = None

    def _refused(self, length: int) -> RollbackRefused:
        return RollbackRefused(
            f"llama.cpp did not remove the tokens from {length} on from its memory of {self._n_decoded}"
        )

    def _clear(self) -> None:
        self._timed(self._lib.llama_memory_clear, self._memory, False)
        self._rollback.forget()
        self._text.clear()
        self._n_decoded, self._tree = 0, None
        self._lines.cut(0)

    def _back(self, length: int) -> bool:
        """Bring llama.cpp's memory to at most `length` tokens; the others up to `length` are held. False: refused."""
        n_left = self._rollback.back(self._call, self._n_decoded, length)
        if n_left is None:
            return False
        self._n_decoded = n_left
        self._lines.cut(n_left)
        return True

    def _cut_back(self, length: int, n_text: int) -> None:
        """Remove the tokens of a failed call; if llama.cpp refuses, empty the memory, so that `length` is right."""
        self._n_decoded, self._tree = length, None
        del self._text[n_text:]
        if not self._back(length):
            self._clear()

    def probe_rollback(self) -> None:
        """Reject a token, which some models cannot. Raises UnsupportedModel."""
        token = self.vocab.bos or 0
        self._decode([token, token], 0)
        try:
            self.truncate(1)
            sound = isinstance(self._rollback, Truncation) or self._comes_back()
        except (RollbackRefused, BackendError):  # the latter for the positions that a refusal leaves
            sound = False
        if not sound:
            raise cannot_roll_back(self.path, self.architecture)
        self._clear()
        self.busy_s = 0.0

    def _comes_back(self) -> bool:
        """True if a token has the same logits before and after a rollback."""
        first, *block = (token % self.vocab_size for token in range(min(1 + self.caps.max_block, 3)))
        if self.length + 1 + len(block) > self.n_ctx:
            return True
        self.eval([first])  # the memory is not empty, so its state is saved
        before = np.array(self.eval(block)[-1])
        self.truncate(self.length - 1)
        after = self.eval(block[-1:])[0]
        return bool(np.abs(after - before).max() <= _ROUNDING * before.std())

    def step_with_rejections(self) -> float:
        """Seconds of the fastest of some steps of N_ROWS rows whose last N_REJECTED are rejected."""
        block = [token % self.vocab_size for token in range(N_ROWS)]
        took = []
        for _ in range(1 + N_STEPS):
            began = perf_counter()
            self.eval(block)
            self.truncate(self.length - N_REJECTED)
            took.append(perf_counter() - began)
        self._clear()
        self.busy_s = 0.0
        return min(took[1:])

    def probe_tree(self) -> None:
        """Set `caps.tree` if two siblings do not see each other; else `no_tree` says why."""
        chains, self.no_tree = self.caps, self._rollback.no_tree or why_no_tree(self.header, self.plan.max_block)
        if self.no_tree:
            return
        self.caps = replace(chains, tree=True, max_leaves=self.plan.n_lines)
        pending, first, second = (token % self.vocab_size for token in range(3))
        try:
            beside = np.array(self.eval([pending, first, second], [-1, -1])[2])
            self.keep(1, ())
            alone = self.eval([second])[0]
            if not np.abs(beside - alone).max() <= _ROUNDING * alone.std():
                self.no_tree = "a token sees its sibling"
        except (BackendError, ContextFull, RollbackRefused) as error:
            self.no_tree = str(error)
        if self.no_tree:
            self.caps = chains
        self._clear()
        self.busy_s = 0.0


def _way_back(native: Native, memory: object, plan: LoadPlan, *, has_states: bool) -> tuple[Rollback, WayBack]:
    lib, pointers, way = native.pointers.lib, native.pointers, plan.way_back
    if has_states:
        n_kept = lib.llama_n_rs_seq(pointers.context)
        states = SavedStates(pointers.context, memory, n_kept=n_kept, on_device=way.way == DEVICE)
        return states, way if way.way in (KEPT, SAVED, DEVICE) else by_kind(SAVED)
    if way.way == WINDOW:
        return WindowCache(pointers.context, memory, lib.llama_model_n_swa(pointers.model)), way
    return Truncation(memory), way


def _gpu_memory(*, remote: bool) -> GpuMemory:
    """`remote`: with the devices of RPC servers."""
    gpus = [device for device in devices() if device.is_gpu and (remote or rpc.is_here(device.name))]
    return GpuMemory(
        supported=bool(bindings().llama_supports_gpu_offload()) and bool(gpus),
        n_free=sum(device.memory_free for device in gpus),
        shared=(sys.platform == "darwin" and not remote) or all(device.kind == "igpu" for device in gpus),
    )
