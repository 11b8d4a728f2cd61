"""Messages of a chat: from an editor with history and completion, or from lines of stdin."""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from specllama.base.disk import open_own, size_text
from specllama.base.errors import SpecllamaError, UsageError
from specllama.base.ranges import sound
from specllama.base.text import decoded
from specllama.cli.prompting import MAX_BYTES
from specllama.cli.screen.editor import editor
from specllama.cli.screen.keyboard import Keyboard
from specllama.cli.screen.output import Output, say_error, stream_of
from specllama.cli.screen.visible import HIDDEN, N_BEFORE, in_one_line, visible

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.layout.processors import Processor

PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'
MAX_REMEMBERED = 20_000  # characters; a longer message is not saved in the history

Complete = Callable[[str], Iterable[tuple[str, int, str]]]  # line -> (text, start relative to its end, meaning)


def is_open(text: str) -> bool:
    '''True while a block in """ has no end yet.'''
    return text.count(QUOTES) % 2 == 1


def unquoted(text: str) -> str:
    """A message without its triple quotes, if it is one block."""
    inner = text.strip()
    if inner.startswith(QUOTES) and inner.endswith(QUOTES) and inner.count(QUOTES) == 2:
        return inner.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return text


def bare(text: str) -> str:
    """An argument without its quotes: triple, double or single."""
    text = unquoted(text).strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


class Lines:
    """One message a line, or a block in triple quotes; a prompt is written to stderr of `prompt`, if given."""

    edits = False  # `start` of `read` has no effect

    def __init__(self, file: TextIO, prompt: Output | None) -> None:
        # Decoded line by line, so that a line that is not text does not affect the next ones.
        self._file = file.buffer
        self._prompt = prompt
        self._endless = False

    def read(self, start: str = "") -> str:
        text = self._line(PROMPT)
        while is_open(text):
            try:
                text += "\n" + self._line(MORE)
            except EOFError:
                raise UsageError(f"a block of {QUOTES} has no end") from None
        return text

    def _line(self, prompt: str) -> str:
        if self._prompt is not None:
            self._prompt.err.write(prompt)
        data = b"" if self._endless else self._file.readline(MAX_BYTES + 1)
        if not data:
            raise EOFError
        if len(data) > MAX_BYTES:
            self._endless = True
            raise UsageError(f"a line of stdin is longer than {size_text(MAX_BYTES)}; the rest is not read")
        return decoded(data, "a line of stdin", UsageError).removesuffix("\n").removesuffix("\r")


class Editor:
    """prompt_toolkit's line editor: history, completion, and paste as one block."""

    edits = True

    def __init__(self, history: Path, complete: Complete, keyboard: Keyboard | None = None, *, kept: bool) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.shortcuts import CompleteStyle

        self._keyboard = keyboard
        self._history = _history(history, kept=kept)
        self._session: PromptSession[str] = PromptSession(
            message=PROMPT,
            multiline=True,
            history=self._history,
            completer=_completer(complete),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            input_processors=[_visible_line()],
            key_bindings=_bindings(),
            prompt_continuation=lambda _width, _line, _wraps: MORE,
            enable_suspend=True,  # Ctrl-Z
            enable_open_in_editor=False,  # Ctrl-G does it in every editing mode
            tempfile_suffix=".md",
            reserve_space_for_menu=0,
            erase_when_done=False,
        )

    def read(self, start: str = "") -> str:
        """The next line; `start` is its first text, for editing. Raises EOFError, KeyboardInterrupt and UsageError."""
        try:
            return sound("the line", self._session.prompt(default=start))
        finally:
            if self._keyboard is not None:
                self._keyboard.hold()

    def type(self, keys: str) -> None:
        """Feed these keys to the next prompt, before any other."""
        from prompt_toolkit.input.typeahead import store_typeahead
        from prompt_toolkit.input.vt100_parser import Vt100Parser
        from prompt_toolkit.key_binding import KeyPress

        pressed: list[KeyPress] = []
        parser = Vt100Parser(pressed.append)
        parser.feed_and_flush(keys)
        store_typeahead(self._session.app.input, pressed)

    def remember(self, *, wanted: bool) -> None:
        """Set whether messages are saved in the history on disk from now on."""
        self._history.wanted = wanted  # type: ignore[attr-defined]


MessageSource: TypeAlias = Lines | Editor


def _history(path: Path, *, kept: bool) -> FileHistory:
    """The history in `path`, which only its owner can read; in memory until it is to be kept."""
    from prompt_toolkit.history import FileHistory

    class OwnerOnly(FileHistory):
        wanted = kept

        def load_history_strings(self) -> Iterable[str]:
            try:  # as a list: the generator would fail later, while the prompt is drawn
                return list(super().load_history_strings()) if kept else ()
            except OSError:
                return ()

        def store_string(self, string: str) -> None:
            if not self.wanted or len(string) > MAX_REMEMBERED:
                return
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.is_symlink():  # a link is the user's own, often to the null device
                    open_own(path, 0o600).close()
                    path.chmod(0o600)  # for a file of an earlier version
                super().store_string(string)
            except OSError:
                self.wanted = False  # a full or read-only disk does not end the chat

    return OwnerOnly(os.fspath(path))


def _completer(complete: Complete) -> Any:
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.document import Document

    class Offers(Completer):
        def get_completions(self, document: Document, complete_event: object) -> Iterable[Completion]:
            for text, start, meaning in complete(document.text_before_cursor):
                yield Completion(text, start, display=in_one_line(text), display_meta=in_one_line(meaning))

    return Offers()


def _visible_line() -> Processor:
    """Shows a line as `visible` does: it may come from a saved chat, a file name, or a paste."""
    from prompt_toolkit.formatted_text import StyleAndTextTuples
    from prompt_toolkit.formatted_text.utils import fragment_list_to_text
    from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
    from prompt_toolkit.layout.utils import explode_text_fragments

    class VisibleInput(Processor):
        def apply_transformation(self, ti: TransformationInput) -> Transformation:
            line = fragment_list_to_text(ti.fragments)
            if not HIDDEN.search(line):
                return Transformation(ti.fragments)
            letters = explode_text_fragments(ti.fragments)
            texts = [visible(char, line[max(n - N_BEFORE, 0) : n]) for n, char in enumerate(line)]
            starts = list(accumulate(map(len, texts), initial=0))
            shown: StyleAndTextTuples = [(style, text) for (style, *_), text in zip(letters, texts, strict=True)]
            return Transformation(shown, lambda n: starts[min(n, len(line))], lambda n: bisect_right(starts, n) - 1)

    return VisibleInput()


def _bindings() -> Any:
    """Enter sends, unless a block in triple quotes is open; Alt-Enter or Ctrl-J makes a new line; Ctrl-G edits."""
    from prompt_toolkit.application import run_in_terminal
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.keys import Keys

    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    @bindings.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add(Keys.Vt100MouseEvent)
    def _(event: KeyPressEvent) -> None:
        """Ignore it: the mouse is not used, and prompt_toolkit fails on a typed `ESC[31m`, which it takes for one."""

    @bindings.add("c-g")
    def _(event: KeyPressEvent) -> None:
        try:
            editor()
        except SpecllamaError as error:
            run_in_terminal(partial(say_error, error, stream_of(sys.stderr)))
        else:
            event.current_buffer.open_in_editor()

    return bindings
