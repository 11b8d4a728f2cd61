"""Real model files for the tests marked `model`: skipped where they are not here, failed where they must be.

`SPECLLAMA_REQUIRE_MODELS=1` (set by `make test`) turns a missing file into a failure, so that a green run means that
everything ran.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specllama.files import hub
from specllama.files.catalog import load_catalog
from specllama.kernels import build
from specllama.llama import LlamaModel, LoadOptions, load, tested_kernels

TARGET = "qwen2.5-coder-1.5b-instruct-q4_k_m"
DRAFT = "qwen2.5-coder-0.5b-instruct-q4_k_m"
SMALL = "SmolLM2-135M-Instruct.Q4_1"
WINDOWED = "gemma-3-270m-q4_k_m"


@functools.cache
def find_model(name: str) -> Path | None:
    """Where the file of this model lies, if it is here; nothing is fetched."""
    return hub.find(load_catalog().model(name))


def path_of(name: str) -> Path:
    """The file of this model, or the end of the test."""
    path = find_model(name)
    if path is not None:
        return path
    told = f"{name} is not here; `specllama models pull {name}` fetches it"
    if os.environ.get("SPECLLAMA_REQUIRE_MODELS") == "1":
        pytest.fail(told)
    pytest.skip(told)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a minute come first: at the end they would keep one worker busy while the others have nothing to do."""
    items.sort(key=lambda item: item.path.name != "test_tune_real.py")


@pytest.fixture(scope="session", autouse=True)
def a_core_of_its_own(worker_id: str) -> None:
    """Two processes that compute with all cores each would wait for one another at every barrier of llama.cpp.

    As many threads as cores are allowed is the program's default, so programs that tests start follow.
    """
    if worker_id == "master" or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    n_workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    mine = cores[int(worker_id.removeprefix("gw")) :: n_workers]
    if mine:
        os.sched_setaffinity(0, mine)


@pytest.fixture(scope="session", autouse=True)
def kernels_are_tested() -> None:
    """As `run` does before it loads a model: without their test our kernels are not used."""
    if os.environ.get("SPECLLAMA_REQUIRE_MODELS") == "1" and not build.unsupported():
        assert tested_kernels.problem() == ""


@pytest.fixture(scope="session")
def model_file() -> Callable[[str], Path]:
    """A function from a model's name to its file."""
    return path_of


@pytest.fixture(scope="session")
def open_model(model_file: Callable[[str], Path]) -> Iterator[Callable[..., LlamaModel]]:
    """A function from a model's name (and LoadOptions) to the loaded model, emptied; each is loaded once."""
    loaded: dict[tuple[object, ...], LlamaModel] = {}

    def open_one(name: str, **options: object) -> LlamaModel:
        key = (name, *sorted(options.items()))
        if key not in loaded:
            loaded[key] = load(model_file(name), LoadOptions(**options))  # type: ignore[arg-type]
        loaded[key].truncate(0)
        return loaded[key]

    yield open_one
    for model in loaded.values():
        model.close()
