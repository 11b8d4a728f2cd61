"""Downloads from the Hub, through the real library and a server on 127.0.0.1."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from specllama.base.errors import (
    ChecksumMismatch,
    DiskFull,
    DownloadError,
    GatedRepository,
    SourceUnavailable,
)
from specllama.files import hub, hub_cache
from specllama.files.inventory import checksum_of
from specllama.files.model import HubSource, Model, ModelFile, PathSource, Source
from specllama.files.pins import pins
from tests.homes import BODY, FILE, REPO, Watch, file_size_limit
from tests.hubserver import HubServer


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def model(*sources: Source, body: bytes | None = BODY, file: str = FILE) -> Model:
    """A model with those sources, pinned to `body` unless that is None."""
    size, digest = (None, None) if body is None else (len(body), sha256(body))
    return Model(file.removesuffix(".gguf"), file, size, digest, "none", sources or (HubSource(REPO, file),))


def put(server: HubServer, body: bytes = BODY, file: str = FILE) -> None:
    server.repo(REPO).files[file] = body


def fetch_repo(spec: str, **options: Any) -> hub.Fetched:
    """As `models pull user/repo[:quant]` does."""
    return hub.fetch(hub.repo_model(spec, **options), **options)


def cached_files(home: Path) -> list[Path]:
    """All large files in the shared cache."""
    return [path for path in (home / "hf").rglob("*") if path.is_file() and path.stat().st_size > 1000]


@pytest.fixture
def dead_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_ENDPOINT is a port without a server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{probe.getsockname()[1]}")


def test_a_hub_file_goes_into_the_shared_cache_with_its_commit(hub_server: HubServer, home: Path, watch: Watch) -> None:
    """Prevents: a second copy beside the one that hf and llama.cpp use; a commit that is not recorded."""
    put(hub_server)
    fetched = hub.fetch(model(), watch=watch)
    assert fetched.path.read_bytes() == BODY
    assert fetched.path.is_relative_to(home / "hf" / "hub" / "models--maker--tiny-GGUF" / "snapshots")
    assert fetched == hub.Fetched(fetched.path, f"Hub {REPO}", sha256(BODY), hub_server.repo(REPO).commit)
    assert (f"fetching {FILE}", len(BODY)) in watch.begun
    assert watch.n_bytes == 2 * len(BODY), "each byte counts once when received and once when checked"
    assert watch.n_open == 0


def test_a_cached_model_is_found_without_a_network_and_read_once(hub_server: HubServer, watch: Watch) -> None:
    """Prevents: a start that waits for the Hub, or hashes a gigabyte each time (case 39)."""
    put(hub_server)
    path = hub.fetch(model()).path
    n_requests = len(hub_server.requests)
    assert hub.find(model()) == path
    assert hub.fetch(model(), watch=watch).source == hub.CACHE
    assert len(hub_server.requests) == n_requests
    assert watch.n_checked == 0


@pytest.mark.parametrize("way", ["flag", "variable"])
def test_offline_uses_the_cache_and_sends_no_request(
    hub_server: HubServer, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Prevents: requests in offline mode (case 39)."""
    put(hub_server)
    path = hub.fetch(model()).path
    n_requests = len(hub_server.requests)
    if way == "variable":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = way == "flag"
    assert hub.fetch(model(), offline=offline).path == path
    with pytest.raises(SourceUnavailable, match=r"other is not downloaded, .*offline"):
        hub.fetch(model(file="other.gguf"), offline=offline)
    with pytest.raises(SourceUnavailable, match="offline"):
        fetch_repo("somebody/else", offline=offline)
    assert len(hub_server.requests) == n_requests


@pytest.mark.usefixtures("dead_hub")
def test_a_dead_hub_is_noted_at_once_and_the_next_source_used(tmp_path: Path, watch: Watch) -> None:
    """Prevents: minutes of silent retries; giving up although another source has the file; lost reasons."""
    local = tmp_path / FILE
    both = model(HubSource(REPO, FILE), PathSource(local))
    with pytest.raises(DownloadError, match=rf"Connection refused.*{FILE} does not exist") as caught:
        hub.fetch(both, watch=watch)
    assert "check the network, or give local files: -m FILE" in caught.value.hint
    host = os.environ["HF_ENDPOINT"].removeprefix("http://")
    assert watch.notes == [f"{host} did not answer (Connection refused); trying the next source: file {local}"]
    local.write_bytes(BODY)
    start = time.monotonic()
    assert hub.fetch(both, watch=watch).path == local
    assert time.monotonic() - start < 30


def test_a_file_of_another_commit_counts_only_if_it_is_the_same(hub_server: HubServer) -> None:
    """Prevents: an old commit's file for a new pin of equal size; a second download of the same bytes."""
    put(hub_server)
    old = hub.fetch(model(HubSource(REPO, FILE, hub_server.repo(REPO).commit))).path
    other = HubSource(REPO, FILE, "1" * 40)
    assert hub.find(model(other)) == old, "its blob's name is the expected SHA-256"
    assert hub.find(model(other, body=BODY[::-1])) is None
    assert hub.find(model(other, body=None)) is None
    assert hub.find(model(HubSource(REPO, FILE), body=None)) == old, "neither commit nor SHA-256 is given"


def test_an_interrupted_download_is_followed_by_a_correct_one(
    hub_server: HubServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: half a file taken for a complete one (case 38)."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    put(hub_server)
    with pytest.raises(KeyboardInterrupt):
        hub.fetch(model(), watch=Watch(stop_after=len(BODY) // 2))
    assert hub.find(model()) is None
    assert hub.fetch(model()).path.read_bytes() == BODY
    assert {path.read_bytes() for path in cached_files(home)} == {BODY}


@pytest.mark.slow
def test_a_broken_connection_is_resumed(hub_server: HubServer, watch: Watch) -> None:
    """Prevents: a restart, or a file with a hole, after a dropped connection (case 38)."""
    put(hub_server)
    hub_server.cut_after = len(BODY) // 2
    assert hub.fetch(model(), watch=watch).path.read_bytes() == BODY
    assert hub_server.methods(FILE) == ["HEAD", "HEAD", "GET", "GET"]
    assert watch.notes == ["the connection broke: trying again"]


@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_a_damaged_cached_file_is_noticed_and_fetched_again(hub_server: HubServer, watch: Watch, damage: str) -> None:
    """Prevents: loading a file damaged by a full disk or a broken copy (case 38)."""
    put(hub_server)
    path = hub.fetch(model()).path
    blob = path.resolve()
    blob.write_bytes(BODY[:-5] if damage == "truncated" else b"?" + BODY[1:])
    assert (hub.find(model()) is None) == (damage == "truncated"), "`find` checks the size only"
    fetched = hub.fetch(model(), watch=watch)
    assert fetched.path.read_bytes() == BODY
    assert watch.notes == [f"{FILE} in the cache is damaged and is downloaded again"]


def test_a_damaged_file_of_an_unpinned_model_is_noticed_by_the_hubs_checksum(hub_server: HubServer) -> None:
    """Prevents: a damaged file accepted because models.toml has no SHA-256 for it."""
    put(hub_server)
    path = fetch_repo(REPO).path
    path.resolve().write_bytes(BODY[::-1])
    assert fetch_repo(REPO).path.read_bytes() == BODY


def test_a_file_with_another_announced_checksum_is_not_downloaded(hub_server: HubServer) -> None:
    """Prevents: a download of gigabytes that models.toml rejects."""
    put(hub_server, b"another file" * 1000)
    with pytest.raises(ChecksumMismatch, match=r"expected [0-9a-f]{64}"):
        hub.fetch(model())
    assert "GET" not in hub_server.methods(FILE)


def test_bytes_without_the_announced_checksum_are_not_kept(hub_server: HubServer, home: Path) -> None:
    """Prevents: a file changed in transit that is loaded because its name is right."""
    put(hub_server, BODY[::-1])
    hub_server.repo(REPO).etags[FILE] = sha256(BODY)
    with pytest.raises(ChecksumMismatch):
        hub.fetch(model())
    assert hub.find(model()) is None
    assert cached_files(home) == []


def test_a_file_of_another_announced_size_is_not_downloaded(hub_server: HubServer) -> None:
    """Prevents: gigabytes for an entry of a megabyte; a file that is never found by its size and fetched each time."""
    put(hub_server, BODY)
    hub_server.repo(REPO).sizes[FILE] = len(BODY) + 1
    with pytest.raises(ChecksumMismatch, match=r"has 307,201 bytes \(expected 307,200\)"):
        hub.fetch(model())
    assert "GET" not in hub_server.methods(FILE)


def test_bytes_behind_the_announced_end_are_not_written(hub_server: HubServer, home: Path) -> None:
    """Prevents: a disk filled by a server that sends more than it announced."""
    put(hub_server, bytes(3_000_000))
    hub_server.repo(REPO).sizes[FILE] = 1000
    with pytest.raises(SourceUnavailable, match="more than the announced 1 kB"):
        fetch_repo(REPO)
    assert cached_files(home) == []


def test_too_little_space_is_an_error_before_the_download(
    hub_server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: an error after half an hour (case 41)."""
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    put(hub_server)
    with pytest.raises(DiskFull, match=r"tiny-q4_k_m.gguf needs 307 kB, .* has 1 kB left") as caught:
        hub.fetch(model())
    assert "space" in caught.value.hint
    assert "GET" not in hub_server.methods(FILE)


def test_a_disk_that_fills_up_leaves_no_half_file(hub_server: HubServer, home: Path) -> None:
    """Prevents: a truncated file under the final name (case 41)."""
    put(hub_server)
    with file_size_limit(100_000), pytest.raises(DiskFull, match="no space left"):
        hub.fetch(model())
    assert hub.find(model()) is None
    assert cached_files(home) == []
    assert hub.fetch(model()).path.read_bytes() == BODY


def test_a_gated_repository_has_a_hint_in_one_line(hub_server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a page of HTTP for a licence that must be accepted (case 41)."""
    put(hub_server)
    hub_server.repo(REPO).gated, hub_server.repo(REPO).token = True, "hf_right"
    for token in (None, "hf_wrong"):
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(GatedRepository, match=f"{REPO} is gated") as caught:
            hub.fetch(model())
        assert "\n" not in str(caught.value) + caught.value.hint
        assert f"{hub_server.url}/{REPO}" in caught.value.hint
        assert "HF_TOKEN" in caught.value.hint
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert hub.fetch(model()).path.read_bytes() == BODY


def test_each_error_of_the_hub_has_its_own_message(hub_server: HubServer) -> None:
    """Prevents: the same message for a misspelt name, a missing file and a broken Hub."""
    put(hub_server)
    with pytest.raises(SourceUnavailable, match="no/where does not exist"):
        hub.fetch(model(HubSource("no/where", FILE)))
    with pytest.raises(SourceUnavailable, match=f"{REPO} has no file absent.gguf"):
        hub.fetch(model(HubSource(REPO, "absent.gguf")))
    with pytest.raises(SourceUnavailable, match=f"{REPO} has no revision 0000"):
        hub.fetch(model(HubSource(REPO, FILE, "0" * 40)))
    hub_server.status = 503
    with pytest.raises(SourceUnavailable, match=rf"127.0.0.1:\d+ answered 503 for {REPO}"):
        hub.fetch(model())


def test_after_a_gated_repository_the_next_source_is_used(hub_server: HubServer, watch: Watch) -> None:
    """Prevents: a demand for a licence although another source has the file."""
    put(hub_server)
    hub_server.repo(REPO).gated = True
    other = hub_server.repo("copy/tiny-GGUF")
    other.files[FILE] = BODY
    fetched = hub.fetch(model(HubSource(REPO, FILE), HubSource(other.name, FILE)), watch=watch)
    assert fetched.source == "Hub copy/tiny-GGUF"
    assert "next source: Hub copy/tiny-GGUF" in watch.notes[0]


def test_the_first_pull_of_an_unpinned_file_pins_it(hub_server: HubServer) -> None:
    """Prevents: an unpinned model that changes between two runs."""
    put(hub_server)
    repo, unpinned = hub_server.repo(REPO), model(body=None)
    first = hub.fetch(unpinned)
    old_commit, pin = repo.commit, pins()[f"{REPO}/{FILE}"]
    assert (pin.sha256, pin.size, pin.commit) == (sha256(BODY), len(BODY), old_commit)

    repo.older["old"] = dict(repo.files)
    put(hub_server, b"new" * 1000)
    assert hub.remove(unpinned) == [first.path]
    again = hub.fetch(unpinned)
    assert (again.path.read_bytes(), again.commit) == (BODY, old_commit)

    newest = hub.fetch(unpinned, update=True)
    assert newest.path.read_bytes() == b"new" * 1000
    assert pins()[f"{REPO}/{FILE}"].commit == newest.commit == repo.commit
    assert hub.fetch(unpinned).path == newest.path


def test_an_unpinned_file_that_another_tool_downloaded_is_pinned(hub_server: HubServer) -> None:
    """Prevents: a model that stays unpinned because hf or llama.cpp downloaded it first."""
    put(hub_server)
    fetch_repo(REPO)
    assert pins() == {}
    hub.fetch(model(body=None))
    assert pins()[f"{REPO}/{FILE}"].commit == hub_server.repo(REPO).commit


def test_an_unpinned_file_that_changed_at_its_recorded_commit_is_refused(hub_server: HubServer) -> None:
    """Prevents: a recorded checksum that is never compared."""
    put(hub_server)
    hub.fetch(model(body=None))
    hub.remove(model(body=None))
    hub_server.repo(REPO).etags[FILE] = "0" * 64
    with pytest.raises(ChecksumMismatch):
        hub.fetch(model(body=None))


def split_model() -> Model:
    """An unpinned model in three parts."""
    file = "big-q8_0-00001-of-00003.gguf"
    return Model(file[:-5], file, None, None, "none", (HubSource(REPO, f"Q8_0/{file}"),))


def test_all_parts_of_a_split_model_are_downloaded(hub_server: HubServer) -> None:
    """Prevents: a first part that loads and then lacks tensors (case 40)."""
    bodies = {f"Q8_0/big-q8_0-0000{i}-of-00003.gguf": bytes([i]) * 5000 for i in (1, 2, 3)}
    hub_server.repo(REPO).files.update(bodies)
    fetched = hub.fetch(split_model())
    assert fetched.path.name == "big-q8_0-00001-of-00003.gguf"
    assert fetched.sha256 == checksum_of(fetched.path)
    assert [path.read_bytes() for path in sorted(fetched.path.parent.iterdir())] == list(bodies.values())
    assert hub.find(split_model()) == fetched.path
    fetched.path.with_name("big-q8_0-00002-of-00003.gguf").unlink()
    assert hub.find(split_model()) is None
    assert hub.fetch(split_model()).path == fetched.path
    assert fetch_repo(f"{REPO}:Q8_0").path == fetched.path


def test_a_missing_part_is_named(hub_server: HubServer) -> None:
    """Prevents: a split model reported as complete with a part missing (case 40)."""
    hub_server.repo(REPO).files["Q8_0/big-q8_0-00001-of-00003.gguf"] = b"1" * 5000
    with pytest.raises(SourceUnavailable, match=r"has no file Q8_0/big-q8_0-00002-of-00003\.gguf"):
        hub.fetch(split_model())


def test_a_pinned_split_model_checks_every_part(hub_server: HubServer) -> None:
    """Prevents: checksums of parts that are never compared."""
    names = [f"big-q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    hub_server.repo(REPO).files.update(dict.fromkeys(names, b"x" * 5000))
    parts = (ModelFile(names[0], 5000, sha256(b"x" * 5000)), ModelFile(names[1], 5000, "0" * 64))
    pinned = Model(names[0][:-5], names[0], 10_000, None, "none", (HubSource(REPO, names[0]),), parts)
    with pytest.raises(ChecksumMismatch, match="big-q8_0-00002"):
        hub.fetch(pinned)


def quants(server: HubServer, *tags: str) -> None:
    server.repo(REPO).files.update({f"Tiny-{tag}.gguf": tag.encode() * 2000 for tag in tags})


def test_a_repository_is_downloaded_by_its_quantization(hub_server: HubServer) -> None:
    """Prevents: another quantization than the given one, which may be in any case."""
    quants(hub_server, "Q8_0", "Q4_K_M", "BF16", "mmproj-F16")
    assert fetch_repo(REPO).path.name == "Tiny-Q4_K_M.gguf"
    assert fetch_repo(f"{REPO}:q8_0").path.name == "Tiny-Q8_0.gguf"
    assert fetch_repo(f"{REPO}:Tiny-BF16.gguf").path.name == "Tiny-BF16.gguf"
    with pytest.raises(SourceUnavailable, match=f"{REPO}:Q2_K does not exist") as caught:
        fetch_repo(f"{REPO}:Q2_K")
    assert f"{REPO}:Q8_0, {REPO}:Q4_K_M, {REPO}:BF16" in caught.value.hint
    assert "mmproj" not in caught.value.hint


def test_a_cached_quantization_needs_no_request(hub_server: HubServer) -> None:
    """Prevents: `-hf` waiting for the Hub at each start; a default chosen from the cache only."""
    quants(hub_server, "Q8_0", "Q4_K_M")
    path = fetch_repo(f"{REPO}:Q8_0").path
    n_requests = len(hub_server.requests)
    assert fetch_repo(f"{REPO}:Q8_0").path == path
    assert len(hub_server.requests) == n_requests
    assert fetch_repo(REPO).path.name == "Tiny-Q4_K_M.gguf", "the cached Q8_0 is not the default"


def test_a_repository_works_from_the_cache_while_the_hub_is_down(
    hub_server: HubServer, monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    """Prevents: `-hf user/repo` failing without a network although a file is cached (case 39)."""
    quants(hub_server, "Q8_0")
    path = fetch_repo(REPO).path
    assert fetch_repo(REPO, offline=True).path == path
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert fetch_repo(REPO, watch=watch).path == path
    assert watch.notes == ["127.0.0.1:9 did not answer (Connection refused); using the cached files"]


def test_a_damaged_name_of_a_commit_is_no_error(hub_server: HubServer, home: Path) -> None:
    """Prevents: 'internal error' because of a file that another program wrote into the shared cache."""
    quants(hub_server, "Q4_K_M")
    path = fetch_repo(REPO).path
    (ref,) = (home / "hf").rglob("refs/main")
    ref.write_bytes(b"\xff\xfe" * 50)
    assert fetch_repo(REPO).path == path
    assert hub.find(hub.repo_model(REPO)) == path


def test_a_repository_is_never_pinned(hub_server: HubServer) -> None:
    """Prevents: a pin for a model without an entry, which then rejects an update."""
    quants(hub_server, "Q4_K_M")
    fetch_repo(REPO)
    hub_server.repo(REPO).files["Tiny-Q4_K_M.gguf"] = b"newer" * 1000
    assert fetch_repo(REPO).source == hub.CACHE
    assert fetch_repo(REPO, update=True).path.read_bytes() == b"newer" * 1000
    assert pins() == {}


def test_removing_a_model_keeps_the_files_of_others(hub_server: HubServer, home: Path) -> None:
    """Prevents: deleting another quantization, or a blob that another file uses."""
    quants(hub_server, "Q8_0", "Q4_K_M")
    hub_server.repo(REPO).files["Copy-Q5_0.gguf"] = b"Q8_0" * 2000  # the same bytes are one blob
    first, other = hub.repo_model(f"{REPO}:Q8_0"), fetch_repo(f"{REPO}:Q4_K_M").path
    hub.fetch(first)
    copy = fetch_repo(f"{REPO}:Q5_0").path
    hub_server.repo(REPO).older["tag"] = dict(hub_server.repo(REPO).files)
    hub_server.repo(REPO).files["README.md"] = b"a new commit"
    newer = Model(first.name, first.file, None, None, "none", (HubSource(REPO, first.file, "main"),))
    hub.fetch(newer, update=True)
    assert len(hub.remove(first)) == 2, "in every revision"
    assert [path.name for path in cached_files(home)].count("Tiny-Q8_0.gguf") == 0
    assert other.read_bytes() == b"Q4_K_M" * 2000
    assert copy.read_bytes() == b"Q8_0" * 2000
    assert hub.remove(first) == []


def test_a_file_named_by_its_path_is_never_removed_or_replaced(home: Path, tmp_path: Path) -> None:
    """Prevents: deleting the user's own file."""
    own = tmp_path / "own.gguf"
    own.write_bytes(BODY)
    mine = model(PathSource(own), file="own.gguf")
    assert hub.fetch(mine).path == own
    assert hub.remove(mine) == []
    own.write_bytes(BODY[:-1])
    with pytest.raises(ChecksumMismatch, match=r"own\.gguf does not have the size or SHA-256"):
        hub.fetch(mine)
    assert own.exists()


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"HF_HUB_CACHE": "/a/hub"}, "/a/hub"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c", "HF_HOME": ""}, "/c/huggingface/hub"),
    ],
)
def test_the_shared_cache_is_that_of_the_library(
    home: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: str
) -> None:
    """Prevents: two separate caches."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub_cache.cache_dir() == Path(place)
