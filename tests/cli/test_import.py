"""`specllama models import`: models that other programs left on this disk."""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from specllama.cli.models import importing
from specllama.files.catalog import load_catalog
from specllama.files.other_apps import found_models
from specllama.pairs.check import Candidate
from specllama.pairs.find_drafts import FoundDraft, judge
from tests import tiny
from tests.cli.conftest import EVIL, Run, record_of


@pytest.fixture
def disk(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a target of ollama, a draft of LM Studio, a copy in the Hub's cache, and much that is no model."""
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(own_home))
    target, draft = tiny.write_pair(own_home, n_layer=4, n_ff=256)
    small = tiny.write_model(own_home / "small.gguf", n_layer=1)
    _into_ollama(own_home, target, "library/big/7b")
    studio = own_home / ".lmstudio" / "models" / "maker" / "small-GGUF"
    studio.mkdir(parents=True)
    small.rename(studio / "small-Q4_K_M.gguf")
    (studio / "mmproj-small.gguf").write_bytes(b"GGUF")
    (studio / "broken.gguf").write_bytes(b"no model")
    snapshot = own_home / "hf" / "hub" / "models--user--copy-GGUF" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "copy.gguf").symlink_to(studio / "small-Q4_K_M.gguf")
    cache = own_home / "cache" / "llama.cpp"
    cache.mkdir(parents=True)
    draft.rename(cache / "user_other_other.gguf")
    tiny.trust(studio / "small-Q4_K_M.gguf")  # no child process for a check
    tiny.trust(cache / "user_other_other.gguf")
    return own_home


def _into_ollama(home: Path, path: Path, name: str) -> Path:
    """Move a model into ollama's folder, as ollama stores it."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    models = home / ".ollama" / "models"
    blob = models / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    path.rename(blob)
    tiny.trust(blob)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": f"sha256:{64 * '0'}"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"},
    ]
    _manifest(models, name, json.dumps({"layers": layers}))
    return blob


def _manifest(models: Path, name: str, text: str) -> None:
    path = models / "manifests" / "registry.ollama.ai" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_models_of_four_programs_are_found_once_each(disk: Path) -> None:
    """Prevents: gigabytes fetched again that ollama already has; a file listed twice by two names."""
    found = {(each.program, each.name) for each in found_models()}
    assert found == {
        ("ollama", "big:7b"),
        ("LM Studio", "maker/small-GGUF/small-Q4_K_M.gguf"),
        ("LM Studio", "maker/small-GGUF/broken.gguf"),
        ("llama.cpp", "user_other_other.gguf"),
    }


def test_pairs_are_offered_with_a_command_that_works(specllama: Run, disk: Path) -> None:
    """Prevents: a list of files and no way to use them; a change of another program's files."""
    theirs = [path for path in disk.rglob("*") if ".ollama" in path.parts or ".lmstudio" in path.parts]
    before = [(path.stat().st_size, path.stat().st_mtime_ns) for path in theirs]
    result = specllama("models", "import", "--json")
    data = record_of(result)
    assert {each["name"] for each in data["models"]} == {
        "big:7b",
        "maker/small-GGUF/small-Q4_K_M.gguf",
        "user_other_other.gguf",
    }
    assert "broken.gguf" in result.err
    pair = next(each for each in data["pairs"] if each["name"] == "big-7b")
    assert Path(pair["draft"]).name == "small-Q4_K_M.gguf"
    words = shlex.split(pair["command"])
    assert words[:3] == ["specllama", "models", "add"]
    assert specllama(*words[1:]).code == 0
    added = load_catalog().pairs["big-7b"]
    assert str(added.target.sources[0]) == f"file {pair['target']}"
    assert "sha256" not in added.target.name
    assert specllama("check", "big-7b").code == 0
    again = record_of(specllama("models", "import", "--json"))
    assert "big-7b" not in [each["name"] for each in again["pairs"]]
    assert [(path.stat().st_size, path.stat().st_mtime_ns) for path in theirs] == before


def test_a_pair_of_any_name_is_not_offered_again(specllama: Run, disk: Path) -> None:
    """Prevents: a command that adds the same two files under a second name."""
    before = record_of(specllama("models", "import", "--json"))["pairs"]
    pair = next(each for each in before if each["name"] == "big-7b")
    assert specllama("models", "add", "mine", "-m", pair["target"], "-md", pair["draft"]).code == 0
    after = record_of(specllama("models", "import", "--json"))["pairs"]
    assert [each["target"] for each in after] == [each["target"] for each in before if each is not pair]


def test_a_pair_is_judged_with_a_context_that_its_target_was_trained_for(
    specllama: Run, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: memory counted for a context that `run` does not use; a warning at every draft."""
    targets: list[Candidate] = []

    def spy(target: Candidate, *rest: Any) -> FoundDraft:
        targets.append(target)
        return judge(target, *rest)

    monkeypatch.setattr(importing, "judge", spy)
    assert specllama("models", "import", "--json").code == 0
    assert targets
    assert all(each.options.n_ctx == each.header.n_ctx_train < 4096 for each in targets)


def test_a_pipe_gets_one_line_each(specllama: Run, disk: Path) -> None:
    """Prevents: a drawn table for `cut` and `grep`."""
    rows = [line.split("\t") for line in specllama("models", "import").out.splitlines()]
    assert {len(row) for row in rows} == {5}
    assert {row[0] for row in rows} == {"model", "pair"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"layers": 1}',
        '{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../secret"}]}',
        '{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": ["x"]}]}',
        "[" * 5000,
        "\udcff",
    ],
)
def test_a_manifest_is_not_trusted(specllama: Run, own_home: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Prevents: a path out of ollama's folder, a traceback for a damaged file, and escape sequences of a name."""
    monkeypatch.setenv("HOME", str(own_home))
    monkeypatch.setenv("OLLAMA_MODELS", str(own_home / "ollama"))
    path = own_home / "ollama" / "manifests" / "r" / "library" / EVIL.replace("/", "") / "latest"
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    result = specllama("models", "import")
    assert (result.code, result.out) == (0, "")
    assert "\x1b" not in result.err
    assert "looked in" in result.err


def test_a_name_cannot_forge_a_row(specllama: Run, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a file of another program that writes to the terminal."""
    monkeypatch.setenv("HOME", str(own_home))
    place = own_home / "cache" / "llama.cpp"
    place.mkdir(parents=True)
    tiny.write_model(place / f"{EVIL}.gguf")
    result = specllama("models", "import")
    assert len(result.out.splitlines()) == 1
    assert "\x1b" not in result.out
