"""What Python passes to the compiled kernels and takes from them; the library is a few functions here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from specllama.base.errors import BackendError
from specllama.kernels import library
from specllama.kernels.library import HOST_FUNCTIONS, attach, self_test

ADDRESSES = {name: 1000 + 8 * i for i, name in enumerate(HOST_FUNCTIONS)}
PATH = Path("kernels.so")


class Function:
    """A function of a library: ctypes lets its types be set."""

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call
        self.restype: object = None
        self.argtypes: object = None

    def __call__(self, *args: object) -> object:
        return self._call(*args)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the library by functions; without any, it cannot be loaded."""

    def replace(**functions: Callable[..., object]) -> None:
        def load(path: str) -> object:
            assert path == str(PATH)
            if not functions:
                raise OSError("no such file")
            return SimpleNamespace(**{f"specllama_kernels_{name}": Function(each) for name, each in functions.items()})

        monkeypatch.setattr(library.ctypes, "CDLL", load)

    return replace


def test_every_address_is_handed_over_in_its_place(loaded: Callable[..., None]) -> None:
    """Prevents: a call of another function of ggml, or of a null pointer, with the first weights."""
    given: list[int] = []

    def entry(host: object, reason: object) -> bytes:
        words = ctypes.cast(host, ctypes.POINTER(ctypes.c_size_t))  # type: ignore[arg-type]
        given.extend(words[i] for i in range(len(HOST_FUNCTIONS) + 1))
        return b"avxvnni"

    packed = 2**40 + 1
    switched: list[object] = []
    loaded(attach=entry, packed=lambda: packed, enable=lambda *given: switched.append(given))
    kernels = attach(PATH, ADDRESSES, 7)
    assert given == [*ADDRESSES.values(), 7]
    assert (kernels.isa, kernels.n_packed) == ("avxvnni", packed)
    assert kernels._library.specllama_kernels_packed.restype is ctypes.c_int64
    entry_of = kernels._library.specllama_kernels_attach
    pointer_to_text = ctypes.POINTER(ctypes.c_char_p)
    assert (entry_of.restype, entry_of.argtypes[1]) == (ctypes.c_char_p, pointer_to_text), "no address is cut"
    kernels.enable(3)
    kernels.enable(2, coarse_head=True)
    kernels.enable(0, is_mapped=True)
    assert switched == [(3, 0, 0), (2, 1, 0), (0, 0, 1)]


def test_a_library_that_does_not_fit_is_told_with_its_reason(loaded: Callable[..., None]) -> None:
    """Prevents: a traceback at the start of every command, or kernels that were refused in use."""

    def refuse(host: object, reason: object) -> None:
        ctypes.cast(reason, ctypes.POINTER(ctypes.c_char_p))[0] = b"another layout"  # type: ignore[arg-type]

    loaded(attach=refuse)
    with pytest.raises(BackendError, match="another layout"):
        attach(PATH, ADDRESSES, 7)
    loaded(attach=lambda host, reason: None)
    with pytest.raises(BackendError, match="used"):
        attach(PATH, ADDRESSES, 7)
    for functions in ({}, {"other": print}):
        loaded(**functions)
        with pytest.raises(BackendError, match="loaded"):
            attach(PATH, ADDRESSES, 7)
        assert "loaded" in self_test(PATH)


@pytest.mark.parametrize(("isa", "passed"), [("", None), ("all", b"all")])
@pytest.mark.parametrize(("finds", "told"), [(None, ""), (b"", ""), (b"a wrong product", "a wrong product")])
def test_the_self_tests_words_are_passed_on(
    monkeypatch: pytest.MonkeyPatch, isa: str, passed: bytes | None, finds: bytes | None, told: str
) -> None:
    """Prevents: a failed test that counts as passed."""
    asked: list[bytes | None] = []
    test = Function(lambda wanted: asked.append(wanted) or finds)
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: SimpleNamespace(specllama_kernels_self_test=test))
    assert self_test(PATH, isa) == told
    assert (test.restype, test.argtypes) == (ctypes.c_char_p, [ctypes.c_char_p]), "no address is cut"
    assert asked == [passed]
