"""Fetching from the Hub, through the real library and a server on 127.0.0.1."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from pathlib import Path

import pytest

from specllama.base.errors import (
    ChecksumMismatch,
    DiskFull,
    DownloadError,
    GatedRepository,
    ModelFileError,
    SourceUnavailable,
)
from specllama.files import hub, hub_cache
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


def cached_files(home: Path) -> list[Path]:
    """Everything in the shared cache that could be taken for a model."""
    return [path for path in (home / "hf").rglob("*") if path.is_file() and path.stat().st_size > 1000]


@pytest.fixture
def dead_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens where the Hub should be."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{probe.getsockname()[1]}")


# ---------------------------------------------------------------------------------------------------- the plain way


def test_a_hub_file_lands_in_the_shared_cache_with_its_commit(hub_server: HubServer, home: Path, watch: Watch) -> None:
    """Prevents: a second copy of every model beside the one that hf and llama.cpp use, and a commit nobody recorded."""
    put(hub_server)
    fetched = hub.fetch(model(), watch=watch)
    assert fetched.path.read_bytes() == BODY
    assert fetched.path.is_relative_to(home / "hf" / "hub" / "models--maker--tiny-GGUF" / "snapshots")
    assert fetched == hub.Fetched(fetched.path, f"Hub {REPO}", sha256(BODY), hub_server.repo(REPO).commit)
    assert (f"fetching {FILE}", len(BODY)) in watch.begun
    assert watch.n_bytes == 2 * len(BODY), "every byte is reported once when it comes and once when it is checked"
    assert watch.n_open == 0


def test_a_cached_model_is_found_without_a_network_and_read_once(hub_server: HubServer, watch: Watch) -> None:
    """Prevents: a start that waits for the Hub, or that hashes a gigabyte every time (case 39)."""
    put(hub_server)
    path = hub.fetch(model()).path
    n_requests = len(hub_server.requests)
    assert hub.find(model()) == path
    assert hub.fetch(model(), watch=watch).source == hub.CACHE
    assert len(hub_server.requests) == n_requests
    assert watch.n_checked == 0


@pytest.mark.parametrize("way", ["flag", "variable"])
def test_offline_takes_what_is_here_and_asks_nobody_for_the_rest(
    hub_server: HubServer, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Prevents: a request behind the back of somebody who forbade it (case 39)."""
    put(hub_server)
    path = hub.fetch(model()).path
    n_requests = len(hub_server.requests)
    if way == "variable":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = way == "flag"
    assert hub.fetch(model(), offline=offline).path == path
    with pytest.raises(SourceUnavailable, match="other is not here and the network may not be asked"):
        hub.fetch(model(file="other.gguf"), offline=offline)
    with pytest.raises(SourceUnavailable, match="not be asked"):
        hub.fetch_repo("somebody/else", offline=offline)
    assert len(hub_server.requests) == n_requests


def test_a_cached_model_starts_at_once_while_the_hub_is_down(
    hub_server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: needing the Hub for a file that is here (case 39)."""
    put(hub_server)
    path = hub.fetch(model()).path
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert hub.fetch(model()).path == path


@pytest.mark.usefixtures("dead_hub")
def test_a_hub_that_does_not_answer_is_told_at_once_and_the_next_source_taken(tmp_path: Path, watch: Watch) -> None:
    """Prevents: minutes of silent retries, and giving up although another source has the file."""
    local = tmp_path / FILE
    local.write_bytes(BODY)
    start = time.monotonic()
    fetched = hub.fetch(model(HubSource(REPO, FILE), PathSource(local)), watch=watch)
    assert time.monotonic() - start < 30
    assert fetched.path == local


@pytest.mark.usefixtures("dead_hub")
def test_the_note_names_the_host_the_reason_and_the_next_source(tmp_path: Path, watch: Watch) -> None:
    """Prevents: a silent change of source; and an error that hides what the first source said."""
    missing = PathSource(tmp_path / "nowhere.gguf")
    with pytest.raises(DownloadError) as caught:
        hub.fetch(model(HubSource(REPO, FILE), missing), watch=watch)
    host = os.environ["HF_ENDPOINT"].removeprefix("http://")
    assert watch.notes == [f"{host} did not answer (Connection refused); taking the next source: {missing}"]
    assert "Connection refused" in str(caught.value)
    assert "nowhere.gguf does not exist" in str(caught.value)


def test_a_file_of_another_commit_is_taken_only_if_it_is_the_same_one(hub_server: HubServer) -> None:
    """Prevents: an old commit's file for a new pin of equal size; and fetching again what another commit also has."""
    put(hub_server)
    old = hub.fetch(model(HubSource(REPO, FILE, hub_server.repo(REPO).commit))).path
    assert hub.find(model(HubSource(REPO, FILE, "1" * 40))) == old, (
        "the sum in its blob's name says that it is the same"
    )
    assert hub.find(model(HubSource(REPO, FILE, "1" * 40), body=BODY[::-1])) is None
    assert hub.find(model(HubSource(REPO, FILE, "1" * 40), body=None)) is None
    assert hub.find(model(HubSource(REPO, FILE), body=None)) == old, "nothing was said about commit and sum"


# ------------------------------------------------------------------------------------------------ things that break


def test_an_interrupted_download_is_followed_by_a_correct_one(
    hub_server: HubServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: half a file taken for a whole one (case 38)."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    put(hub_server)
    with pytest.raises(KeyboardInterrupt):
        hub.fetch(model(), watch=Watch(stop_after=len(BODY) // 2))
    assert hub.find(model()) is None
    assert hub.fetch(model()).path.read_bytes() == BODY
    assert {path.read_bytes() for path in cached_files(home)} == {BODY}


@pytest.mark.slow
def test_a_connection_that_breaks_at_half_is_taken_up_again(hub_server: HubServer, watch: Watch) -> None:
    """Prevents: starting over, or a file with a hole, after a dropped connection (case 38)."""
    put(hub_server)
    hub_server.cut_after = len(BODY) // 2
    assert hub.fetch(model(), watch=watch).path.read_bytes() == BODY
    assert hub_server.methods(FILE) == ["HEAD", "HEAD", "GET", "GET"]
    assert watch.notes == ["the connection broke: trying again"]


@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_a_damaged_cached_file_is_noticed_and_fetched_again(hub_server: HubServer, watch: Watch, damage: str) -> None:
    """Prevents: loading a file that a full disk or a broken copy has damaged (case 38)."""
    put(hub_server)
    path = hub.fetch(model()).path
    blob = path.resolve()
    blob.write_bytes(BODY[:-5] if damage == "truncated" else b"?" + BODY[1:])
    assert (hub.find(model()) is None) == (damage == "truncated"), "its size is seen at once, its bytes when it is read"
    fetched = hub.fetch(model(), watch=watch)
    assert fetched.path.read_bytes() == BODY
    assert watch.notes == [f"{FILE} in the cache is damaged and is fetched again"]


def test_a_damaged_file_of_an_unpinned_model_is_noticed_by_the_hubs_own_sum(hub_server: HubServer) -> None:
    """Prevents: trusting a cached file only because models.toml knows no sum for it."""
    put(hub_server)
    path = hub.fetch_repo(REPO).path
    path.resolve().write_bytes(BODY[::-1])
    assert hub.fetch_repo(REPO).path.read_bytes() == BODY


def test_a_file_that_the_hub_announces_with_another_sum_is_not_even_fetched(hub_server: HubServer) -> None:
    """Prevents: gigabytes of a file that models.toml does not mean."""
    put(hub_server, b"another file" * 1000)
    with pytest.raises(ChecksumMismatch, match=r"not [0-9a-f]{64} as expected"):
        hub.fetch(model())
    assert "GET" not in hub_server.methods(FILE)


def test_bytes_that_do_not_have_the_announced_sum_are_not_kept(hub_server: HubServer, home: Path) -> None:
    """Prevents: a file changed on the way, loaded because its name is right."""
    put(hub_server, BODY[::-1])
    hub_server.repo(REPO).etags[FILE] = sha256(BODY)
    with pytest.raises(ChecksumMismatch):
        hub.fetch(model())
    assert hub.find(model()) is None
    assert cached_files(home) == []


def test_too_little_room_is_told_before_the_download(
    hub_server: HubServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: finding out after half an hour (case 41)."""
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    put(hub_server)
    with pytest.raises(DiskFull, match=r"tiny-q4_k_m.gguf needs 307 kB, .* has 1 kB left") as caught:
        hub.fetch(model())
    assert "room" in caught.value.hint
    assert "GET" not in hub_server.methods(FILE)


def test_a_disk_that_fills_up_leaves_no_half_file(hub_server: HubServer, home: Path) -> None:
    """Prevents: a truncated file under the final name (case 41)."""
    put(hub_server)
    with file_size_limit(100_000), pytest.raises(DiskFull, match="no room left while writing"):
        hub.fetch(model())
    assert hub.find(model()) is None
    assert cached_files(home) == []
    assert hub.fetch(model()).path.read_bytes() == BODY


# ----------------------------------------------------------------------------------------------- what the Hub says


def test_a_gated_repository_says_in_one_line_what_to_do(hub_server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a page of HTTP for somebody who only has to accept a licence (case 41)."""
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


def test_each_refusal_has_its_own_words(hub_server: HubServer) -> None:
    """Prevents: 'an error occurred' for a misspelt name, a missing file and a broken Hub alike."""
    put(hub_server)
    absent = model(HubSource(REPO, "absent.gguf"))
    with pytest.raises(SourceUnavailable, match="no/where does not exist on the Hub, or is private"):
        hub.fetch(model(HubSource("no/where", FILE)))
    with pytest.raises(SourceUnavailable, match=f"{REPO} has no file absent.gguf"):
        hub.fetch(absent)
    with pytest.raises(SourceUnavailable, match=f"{REPO} has not the revision"):
        hub.fetch(model(HubSource(REPO, FILE, "0" * 40)))
    hub_server.status = 503
    with pytest.raises(SourceUnavailable, match=rf"127.0.0.1:\d+ answered 503 for {REPO}"):
        hub.fetch(model())


def test_a_gated_repository_is_no_obstacle_where_another_source_follows(
    hub_server: HubServer, tmp_path: Path, watch: Watch
) -> None:
    """Prevents: asking for a licence although the same bytes are to be had elsewhere."""
    put(hub_server)
    hub_server.repo(REPO).gated = True
    other = hub_server.repo("copy/tiny-GGUF")
    other.files[FILE] = BODY
    fetched = hub.fetch(model(HubSource(REPO, FILE), HubSource(other.name, FILE)), watch=watch)
    assert fetched.source == "Hub copy/tiny-GGUF"
    assert "taking the next source: Hub copy/tiny-GGUF" in watch.notes[0]


# ------------------------------------------------------------------------------------------------ unpinned and split


def test_the_first_pull_of_an_unpinned_file_records_what_later_ones_must_find(hub_server: HubServer) -> None:
    """Prevents: an unpinned model that silently becomes another one between two runs."""
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


def test_an_unpinned_file_that_another_tool_brought_is_recorded_too(hub_server: HubServer) -> None:
    """Prevents: a model that stays unpinned for ever because hf or llama.cpp fetched it first."""
    put(hub_server)
    hub.fetch_repo(REPO)
    assert pins() == {}
    hub.fetch(model(body=None))
    assert pins()[f"{REPO}/{FILE}"].commit == hub_server.repo(REPO).commit


def test_an_unpinned_file_that_changed_at_its_recorded_commit_is_refused(hub_server: HubServer) -> None:
    """Prevents: recording a sum and never looking at it again."""
    put(hub_server)
    hub.fetch(model(body=None))
    hub.remove(model(body=None))
    hub_server.repo(REPO).etags[FILE] = "0" * 64
    with pytest.raises(ChecksumMismatch):
        hub.fetch(model(body=None))


def split_model(n_parts: int = 3) -> Model:
    """An unpinned model in parts."""
    file = f"big-q8_0-00001-of-{n_parts:05}.gguf"
    return Model(file[:-5], file, None, None, "none", (HubSource(REPO, f"Q8_0/{file}"),))


def test_all_parts_of_a_split_model_are_fetched(hub_server: HubServer) -> None:
    """Prevents: a first part that loads and then misses its tensors (case 40)."""
    bodies = {f"Q8_0/big-q8_0-0000{i}-of-00003.gguf": bytes([i]) * 5000 for i in (1, 2, 3)}
    hub_server.repo(REPO).files.update(bodies)
    fetched = hub.fetch(split_model())
    assert fetched.path.name == "big-q8_0-00001-of-00003.gguf"
    assert fetched.sha256 == sha256(bytes([1]) * 5000)
    assert [path.read_bytes() for path in sorted(fetched.path.parent.iterdir())] == list(bodies.values())
    assert hub.find(split_model()) == fetched.path
    fetched.path.with_name("big-q8_0-00002-of-00003.gguf").unlink()
    assert hub.find(split_model()) is None
    assert hub.fetch(split_model()).path == fetched.path
    assert hub.fetch_repo(f"{REPO}:Q8_0").path == fetched.path


def test_a_missing_part_is_named(hub_server: HubServer) -> None:
    """Prevents: a split model reported as complete with a part missing (case 40)."""
    hub_server.repo(REPO).files["Q8_0/big-q8_0-00001-of-00003.gguf"] = b"1" * 5000
    with pytest.raises(SourceUnavailable, match=r"has no file Q8_0/big-q8_0-00002-of-00003\.gguf"):
        hub.fetch(split_model())


def test_asking_for_a_later_part_says_which_to_give(hub_server: HubServer) -> None:
    """Prevents: 'file not found' or a load error for somebody who picked the wrong part (case 40)."""
    hub_server.repo(REPO).files["big-q8_0-00001-of-00003.gguf"] = b"1"
    with pytest.raises(ModelFileError, match="is part 2 of a model in 3 files") as caught:
        hub.fetch_repo(f"{REPO}:big-q8_0-00002-of-00003.gguf")
    assert "give big-q8_0-00001-of-00003.gguf" in caught.value.hint


def test_a_pinned_split_model_checks_every_part(hub_server: HubServer) -> None:
    """Prevents: sums that are written down for each part and looked at for none."""
    names = [f"big-q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    hub_server.repo(REPO).files.update(dict.fromkeys(names, b"x" * 5000))
    parts = (ModelFile(names[0], 5000, sha256(b"x" * 5000)), ModelFile(names[1], 5000, "0" * 64))
    pinned = Model(names[0][:-5], names[0], 10_000, None, "none", (HubSource(REPO, names[0]),), parts)
    with pytest.raises(ChecksumMismatch, match="big-q8_0-00002"):
        hub.fetch(pinned)


# -------------------------------------------------------------------------------------------------- user/repo[:quant]


def quants(server: HubServer, *tags: str) -> None:
    server.repo(REPO).files.update({f"Tiny-{tag}.gguf": tag.encode() * 2000 for tag in tags})


def test_a_repository_is_fetched_by_its_quantisation(hub_server: HubServer) -> None:
    """Prevents: another quantisation than the one that was asked for, in whatever capitals."""
    quants(hub_server, "Q8_0", "Q4_K_M", "BF16", "mmproj-F16")
    assert hub.fetch_repo(REPO).path.name == "Tiny-Q4_K_M.gguf"
    assert hub.fetch_repo(f"{REPO}:q8_0").path.name == "Tiny-Q8_0.gguf"
    assert hub.fetch_repo(f"{REPO}:Tiny-BF16.gguf").path.name == "Tiny-BF16.gguf"
    with pytest.raises(SourceUnavailable, match=f"{REPO}:Q2_K is not there") as caught:
        hub.fetch_repo(f"{REPO}:Q2_K")
    assert f"{REPO}:Q8_0, {REPO}:Q4_K_M, {REPO}:BF16" in caught.value.hint
    assert "mmproj" not in caught.value.hint


def test_a_cached_quantisation_is_taken_without_asking(hub_server: HubServer) -> None:
    """Prevents: `-hf` waiting for the Hub at every start; and the cache deciding what only the Hub can know."""
    quants(hub_server, "Q8_0", "Q4_K_M")
    path = hub.fetch_repo(f"{REPO}:Q8_0").path
    n_requests = len(hub_server.requests)
    assert hub.fetch_repo(f"{REPO}:Q8_0").path == path
    assert len(hub_server.requests) == n_requests
    assert hub.fetch_repo(REPO).path.name == "Tiny-Q4_K_M.gguf", "what happens to be cached is not what was meant"


def test_a_repository_works_from_the_cache_while_the_hub_is_down(
    hub_server: HubServer, monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    """Prevents: `-hf user/repo` failing on a train although a file of it is here (case 39)."""
    quants(hub_server, "Q8_0")
    path = hub.fetch_repo(REPO).path
    assert hub.fetch_repo(REPO, offline=True).path == path
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert hub.fetch_repo(REPO, watch=watch).path == path
    assert watch.notes == ["127.0.0.1:9 did not answer (Connection refused); taking what is in the cache"]


def test_a_repository_is_followed_and_never_pinned(hub_server: HubServer) -> None:
    """Prevents: a name without an entry growing one in secret, and then refusing an update."""
    quants(hub_server, "Q4_K_M")
    hub.fetch_repo(REPO)
    hub_server.repo(REPO).files["Tiny-Q4_K_M.gguf"] = b"newer" * 1000
    assert hub.fetch_repo(REPO).source == hub.CACHE
    assert hub.fetch_repo(REPO, update=True).path.read_bytes() == b"newer" * 1000
    assert pins() == {}


# ---------------------------------------------------------------------------------------------------------- removing


def test_removing_a_model_leaves_what_others_have_in_the_cache(hub_server: HubServer, home: Path) -> None:
    """Prevents: deleting another quantisation, or another revision's file, along with the one that was meant."""
    quants(hub_server, "Q8_0", "Q4_K_M")
    hub_server.repo(REPO).files["Copy-Q5_0.gguf"] = b"Q8_0" * 2000  # the same bytes are one blob
    first, other = hub.repo_model(f"{REPO}:Q8_0"), hub.fetch_repo(f"{REPO}:Q4_K_M").path
    hub.fetch(first)
    copy = hub.fetch_repo(f"{REPO}:Q5_0").path
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
    """Prevents: deleting a file that was the user's before specllama came."""
    own = tmp_path / "own.gguf"
    own.write_bytes(BODY)
    mine = model(PathSource(own), file="own.gguf")
    assert hub.fetch(mine).path == own
    assert hub.remove(mine) == []
    own.write_bytes(BODY[:-1])
    with pytest.raises(ChecksumMismatch, match=r"own\.gguf does not have the size or SHA-256 that models.toml gives"):
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
def test_the_shared_cache_is_where_the_library_keeps_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: str
) -> None:
    """Prevents: two caches that do not know of each other."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub_cache.cache_dir() == Path(place)


def test_a_hub_that_is_down_with_an_empty_cache_has_a_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prevents: the fact alone, with nothing that a person could do about it."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SourceUnavailable, match="did not answer") as caught:
        hub.fetch_repo(REPO)
    assert "network" in caught.value.hint
    assert "-m FILE" in caught.value.hint
