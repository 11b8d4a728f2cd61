"""A draft model that reads on while its target verifies, for pairs that compute on different devices.

After a draft the target is busy for as long as several tokens of the draft take. Meanwhile a second thread reads what
the draft will probably be asked to read next: its own last token, then its best guess of each token that follows. A row
that was read so is the very row that reading now would give; nothing is drawn in the background, so laws, draws and
exactness are what they are without it. What was guessed wrong is dropped like any rejected token.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import perf_counter

from specllama.base.errors import SpecllamaError, UnsupportedModel
from specllama.core.types import Cancel, FloatArray, Guess, LanguageModel, room_after


@dataclass(slots=True)
class _Run:
    """One reading in the background."""

    length: int  # of the model's KV when it began
    busy_s: float  # of the model, then
    stop: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class AheadModel:
    """`model`, and in its KV possibly a few tokens more that were read ahead; a `LanguageModel` and a `RunsAhead`.

    Invariants: the KV holds the `length` tokens that were asked for, then those of `_read`, and nothing else; where it
    is not as long as it was left, somebody else used the model, and `_read` is worth nothing. The
    background thread runs only between `run_ahead` and the next call of anything: every method waits for it first, at
    most for the one token that it is reading. And which tokens are read alone, which decides the last bits of their
    logits, does not depend on how far it came: the same seed gives the same text at any speed.
    """

    def __init__(self, model: LanguageModel, *, worker: Executor | None = None) -> None:
        """`worker` runs the background readings, one after the other; None = a thread of its own."""
        self._model = model
        self._worker: Executor = worker or ThreadPoolExecutor(1, thread_name_prefix="specllama-ahead")
        self._using = threading.Lock()  # held by the background thread for every token that it reads
        self._run: _Run | None = None
        self._read: list[tuple[int, FloatArray]] = []  # read ahead: each token with its row  (1, V)
        self._end = 0  # length of the KV behind them
        self._first: int | None = None  # what `run_ahead` began with, as long as it is the next token
        self._hidden_s = 0.0  # time inside the model that nobody waited for
        self.vocab_size = model.vocab_size
        self.n_ctx = model.n_ctx
        self.caps = replace(model.caps, tree=False)

    @property
    def model(self) -> LanguageModel:
        """The model itself, for whoever does without reading ahead; then `leave` comes first."""
        return self._model

    @property
    def end_tokens(self) -> frozenset[int]:
        """Those of the model."""
        return self._model.end_tokens

    @property
    def length(self) -> int:
        """Tokens in the KV, those that were read ahead left out."""
        self._settle()
        return self._model.length - len(self._read)

    @property
    def busy_s(self) -> float:
        """Seconds inside the model's own calls that the caller waited for, where the model counts them.

        What was hidden behind the verification took none of its time.
        """
        seen_s = self._busy() if self._run is None else self._run.busy_s
        return seen_s - self._hidden_s

    def _busy(self) -> float:
        return float(getattr(self._model, "busy_s", 0.0))

    def room_after(self, tokens: Sequence[int]) -> int:
        """See `types.room_after`: what was read ahead takes no room."""
        self._settle()
        ahead = [token for token, _ in self._read]
        n_ahead = room_after(self._model, ()) - room_after(self._model, ahead)
        return room_after(self._model, tokens) + n_ahead

    # -------------------------------------------------------------------------------------------------- in background

    def run_ahead(self, first: int, n_most: int, guess: Guess) -> None:
        """Start to read `first` and what `guess` says of each row, at most `n_most` tokens in all.

        Returns at once. `guess` is called in the other thread; it must decide without chance and touch no model.
        """
        self._settle()
        self._drop()
        if n_most < 1:
            return
        self._first = first
        # Known before it begins: a Ctrl-C in between must not leave a reading that nobody stops.
        run = self._run = _Run(self._model.length, self._busy())
        with suppress(RuntimeError):  # no thread to be had, or the program ends: then it is read when it is asked for
            self._worker.submit(self._read_on, run, first, n_most, guess)

    def _read_on(self, run: _Run, first: int, n_most: int, guess: Guess) -> None:
        """The background thread."""
        token: int | None = first
        while token is not None:
            with self._using:
                if run.stop.is_set() or len(self._read) == n_most:
                    return
                try:
                    if room_after(self._model, (token,)) < 0:
                        return
                    rows = self._model.eval((token,)).copy()  # the model's own view ends with the next token
                    rows.setflags(write=False)
                    self._read.append((token, rows))
                    token = guess(rows[0])
                except BaseException as error:  # told by `_settle`, in the caller's thread
                    run.error = error
                    return

    def _settle(self) -> None:
        """End what runs in the background, and bring `_read` in line with the KV, whatever happened there.

        A known error is dropped with its token: if that is asked for, it is read again, and the error met again.
        """
        run = self._run
        if run is None:
            # A Ctrl-C that comes when a cut returns looks like somebody else's use, too.
            if self._read and self._model.length != self._end:
                self._forget()
            return
        run.stop.set()
        started = perf_counter()
        with self._using:  # the token that is being read
            waited_s = perf_counter() - started
        hidden_s = max(self._busy() - run.busy_s - waited_s, 0.0)
        n_read = self._model.length - run.length
        if n_read > len(self._read):
            self._cut_back(run.length + len(self._read))
        del self._read[max(n_read, 0) :]
        self._end = self._model.length
        self._hidden_s += hidden_s
        self._run = None  # last: where a Ctrl-C comes before, the next call does all of it again
        if run.error is not None and not isinstance(run.error, (SpecllamaError, MemoryError)):
            raise run.error

    def _cut_back(self, length: int) -> None:
        """Drop a token that was read without a row. A model that refuses, as a closed one does, tells it once."""
        try:
            self._model.truncate(length)
        except SpecllamaError:
            self._run = None
            self._forget()
            raise

    def _drop(self) -> None:
        """Nothing is ahead any more."""
        if self._read:
            self._model.truncate(self._model.length - len(self._read))
        self._forget()

    def _forget(self) -> None:
        """The KV no longer holds what was read ahead."""
        self._read.clear()
        self._first = None

    # ----------------------------------------------------------------------------------------- what any model can do

    def feed(self, tokens: Sequence[int]) -> None:
        """Append tokens without logits. `run_ahead`'s first one is read alone, whether or not that was done yet."""
        self._settle()
        if tokens and tokens[0] == self._first:
            self.eval(tokens[:1])
            tokens = tokens[1:]
        if tokens:
            self._drop()
            self._model.feed(tokens)

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        """Append tokens and return their logits, (len(tokens), V): a read-only view, valid until the next call.

        A single token may have been read ahead; several are always read together. `parents` may only describe a chain.
        """
        if parents is not None and any(parent != index - 1 for index, parent in enumerate(parents)):
            raise UnsupportedModel("a draft that reads ahead cannot look at trees", hint="draft a chain")
        self._settle()
        if len(tokens) == 1 and self._read and self._read[0][0] == tokens[0]:
            self._first = None
            return self._read.pop(0)[1]
        self._drop()
        return self._model.eval(tokens)

    def truncate(self, length: int) -> None:
        """Drop every token from `length` on. Raises RollbackRefused, and then drops nothing."""
        held = self.length
        if not 0 <= length <= held:
            raise ValueError(f"cannot truncate {held} tokens to {length}")
        if length < held:
            self._model.truncate(length)
            self._forget()

    def keep(self, length: int, path: Sequence[int]) -> None:
        """Of the last eval keep the KV up to `length` (the pending token) and the nodes of `path`."""
        if any(node != index for index, node in enumerate(path)):
            raise UnsupportedModel("only the beginning of a chain can be kept", hint="draft a chain")
        self.truncate(length + len(path))

    # ---------------------------------------------------------------------------------- what some models can do, too

    def watch(self, cancel: Cancel | None) -> None:
        """Let a long computation of the model stop when `cancel` is set, where it listens."""
        self._settle()
        watch = getattr(self._model, "watch", None)
        if watch is not None:
            watch(cancel)

    def leave(self) -> None:
        """End the thread, and leave the model open with what was asked for, and no more. Nothing is read ahead then."""
        try:
            self._settle()
            self._drop()
        finally:
            self._worker.shutdown()

    def close(self) -> None:
        """End the thread, and free the model where it can be freed. Closing twice, or after the model, does nothing."""
        try:
            with suppress(SpecllamaError):
                self._settle()
        finally:
            self._worker.shutdown()
            close = getattr(self._model, "close", None)
            if close is not None:
                close()
