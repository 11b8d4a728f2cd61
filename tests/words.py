"""A vocabulary of whole words that reads special tokens as llama.cpp does; for tests of prompts."""

from __future__ import annotations

import re

# White space at a border joins into one token, so it shows whether a text was tokenised at once or in pieces.
WORD = re.compile(r"\s+|\w+|[^\w\s]")


class WordVocab:
    """Special tokens and words, numbered as they come.

    With `special`, the longest special texts are found first, then what lies between is tokenised, piece by piece;
    `space_prefix` puts a space before each piece, as SentencePiece models do after a special token; `swallow`: special
    tokens swallow the white space after them, as Phi-3's do.
    """

    def __init__(self, *special, bos=None, eos=None, add_bos=False, space_prefix=False, swallow=False):
        self._special = special
        self._entries: list[tuple[bool, str]] = [(True, text) for text in special]
        self._space = " " if space_prefix else ""
        self._swallow = swallow
        self.bos = None if bos is None else self._id(True, bos)
        self.eos = None if eos is None else self._id(True, eos)
        self.add_bos = add_bos

    def special_texts(self):
        return self._special

    def text(self, token):
        return self._entries[token][1]

    def tokenize(self, text, *, special, bos=False):
        assert not bos
        pieces = [(False, text)] if text else []
        for name in sorted(self._special, key=lambda name: -len(name.encode())) if special else ():
            pieces = [part for piece in pieces for part in self._split(piece, name)]
        return [token for is_special, piece in pieces for token in self._tokens(is_special, piece)]

    def special_in(self, tokens):
        """The texts of the special tokens among `tokens`."""
        return [self.text(token) for token in tokens if self._entries[token][0]]

    def written(self, tokens):
        """The text that `tokens` stand for."""
        return "".join(map(self.text, tokens))

    def _split(self, piece, name):
        is_special, text = piece
        if is_special:
            return [piece]
        first, *rest = text.split(name)
        parts = [first, *(part.lstrip() if self._swallow else part for part in rest)]
        between = [[(False, part)] if part else [] for part in parts]
        return between[0] + [entry for part in between[1:] for entry in [(True, name), *part]]

    def _tokens(self, is_special, piece):
        if is_special:
            return [self._id(True, piece)]
        return [self._id(False, word) for word in WORD.findall(self._space + piece)]

    def _id(self, is_special, text):
        entry = (is_special, text)
        if entry not in self._entries:
            self._entries.append(entry)
        return self._entries.index(entry)
