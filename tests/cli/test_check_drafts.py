"""`specllama check --draft-for`: the drafts for a target, best first, and why other models do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specllama.core.stats import expected_speedup
from specllama.derive.candidates import pass_bytes
from specllama.drafters.controller import CostProfile
from specllama.llama import LoadOptions, read_header
from specllama.llama.kernel_path import KernelPath
from specllama.pairs import profile as profiles
from specllama.pairs.find_drafts import FoundDraft, size_in_name
from specllama.pairs.profile import Habit, Profile, ProfileKey
from tests import tiny
from tests.cli.conftest import Result, Run, Terminal
from tests.hubserver import HubServer

pytestmark = pytest.mark.usefixtures("own_home")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A target several times larger than its drafts."""
    return tiny.write_model(tmp_path / "target.gguf", n_embd=128, n_ff=256, extra={"general.name": "Tiny 7B"})


@pytest.fixture
def folder(tmp_path: Path, target: Path) -> Path:
    """Candidates of every kind, one of them in a subfolder."""
    place = tmp_path / "models"
    (place / "sub").mkdir(parents=True)
    tiny.write_model(place / "good.gguf", n_embd=32, extra={"general.name": "Tiny 1B"})
    tiny.write_model(place / "sub" / "stranger.gguf", n_embd=32, extra={"general.name": "Other 1B"})
    tiny.write_model(place / "large.gguf", n_embd=96, extra={"general.name": "Tiny 3B"})
    tiny.write_model(place / "larger.gguf", n_embd=256)
    tiny.write_model(place / "foreign.gguf", n_vocab=14)
    tiny.cut(tiny.write_model(place / "broken.gguf"), 1000)
    (place / "notes.txt").write_text("no model")
    (place / "mmproj-x.gguf").write_bytes(b"GGUF")
    (place / "same.gguf").symlink_to(target)
    return place


def found(result: Result) -> list[dict[str, Any]]:
    return json.loads(result.out)["candidates"]


def test_a_folder_is_searched_and_the_best_comes_first(specllama: Run, target: Path, folder: Path) -> None:
    """Prevents: candidates without an order or without a reason."""
    result = specllama("check", "--draft-for", str(target), "--scan", str(folder))
    lines = [line.split("\t") for line in result.out.splitlines()]
    assert result.code == 0
    expected = [
        ("in", "good.gguf", ""),
        ("in", "sub/stranger.gguf", "family"),
        ("in", "large.gguf", "size"),
        ("out", "foreign.gguf", "token ids differ"),
        ("out", "broken.gguf", "truncated"),
        ("out", "larger.gguf", "smaller than the target"),
    ]
    assert [(line[0], Path(line[1]).as_posix()) for line in lines] == [row[:2] for row in expected]
    assert all(reason in line[5] for line, (_, _, reason) in zip(lines, expected, strict=True))
    assert [bool(line[4]) for line in lines] == [True] * 3 + [False] * 3
    assert result.err.splitlines()[0] == "3 of 6 fit target.gguf"
    best = f"specllama run -m {target} -md {folder / 'good.gguf'}"
    assert result.err.splitlines()[-1].endswith(best)
    candidates = found(specllama("check", "--draft-for", str(target), "--scan", str(folder), "--json"))
    assert [(each["name"], each["fits"]) for each in candidates] == [(line[1], line[0] == "in") for line in lines]


def test_the_context_is_that_of_the_other_commands(specllama: Run, target: Path, folder: Path) -> None:
    """Prevents: a warning at every candidate about a context that the user did not ask for."""
    for options, warned in (([], False), (["-c", "4096"], True)):
        candidates = found(specllama("check", "--draft-for", str(target), "--scan", str(folder), "--json", *options))
        assert {"context" in each["reason"] for each in candidates if each["fits"]} == {warned}


def test_measured_costs_decide_the_order(specllama: Run, target: Path, folder: Path, plain_environment: None) -> None:
    """Prevents: a draft that is small and slow before one that pays on this machine."""
    small = tiny.write_model(folder / "small.gguf", n_embd=16, n_ff=32, extra={"general.name": "Tiny 0.5B"})
    verify = ((1, 1.0), (5, 1.5))
    for draft, c in ((small, 0.9), (folder / "good.gguf", 0.05)):
        costs = CostProfile(verify=verify, draft=((1, c), (2, c)))
        paths = {"target_path": KernelPath(), "draft_path": KernelPath()}
        profile = Profile(made="2026-01-02", step_s=0.1, costs=costs, habits=(Habit(True, 0.9, 0.9),), **paths)
        profiles.save(ProfileKey(target, LoadOptions(), draft, LoadOptions()), profile)
    told = found(specllama("check", "--draft-for", str(target), "--scan", str(folder), "--json"))
    by_name = {each["name"]: each for each in told}
    assert told[0]["name"] == "good.gguf"
    assert told[0]["gain"] == pytest.approx(sum(0.9**i for i in range(5)) / (4 * 0.05 + 1.5))
    assert by_name["small.gguf"]["gain"] == 1.0, "plain decoding, where no length pays"
    assert by_name["small.gguf"]["profile"] == "2026-01-02"
    # T(n) of the measured pairs also holds for other drafts of this target.
    large = by_name["large.gguf"]
    assert large["ratio"] == pytest.approx(
        pass_bytes(read_header(folder / "large.gguf")) / pass_bytes(read_header(target))
    )
    assert large["profile"] is None
    assert large["gain"] == pytest.approx(max(expected_speedup(0.8, k, large["ratio"], 1 + k / 8) for k in range(1, 5)))


def test_the_profile_of_the_same_options_is_used(
    specllama: Run, target: Path, folder: Path, plain_environment: None
) -> None:
    """Prevents: a pair that was measured, shown by a rule of thumb because a number of threads is given."""
    draft, one = folder / "good.gguf", LoadOptions(n_threads=1)
    costs = CostProfile(verify=((1, 1.0), (5, 1.5)), draft=((1, 0.05), (2, 0.05)))
    paths = {"target_path": KernelPath(), "draft_path": KernelPath()}
    profiles.save(ProfileKey(target, one, draft, one), Profile(made="2026-01-02", step_s=0.1, costs=costs, **paths))
    for options, made in ((["-t", "1"], "2026-01-02"), ([], None)):
        told = found(specllama("check", "--draft-for", str(target), "--scan", str(folder), "--json", *options))
        assert {each["name"]: each["profile"] for each in told}["good.gguf"] == made
        pair = ["check", "-m", str(target), "-md", str(draft), *options]
        assert json.loads(specllama(*pair, "--json").out)["profile"] == made
        assert ("2026-01-02" in specllama(*pair).err) == (made is not None)


def test_assumed_costs_promise_nothing(specllama: Run, target: Path, folder: Path, plain_environment: None) -> None:
    """Prevents: a gain shown as measured that rests on costs nothing measured; a mixed list without its note."""
    costs = CostProfile(verify=((1, 1.0), (4, 3.0), (8, 3.1)), draft=((1, 0.05), (2, 0.05)), assumed=(8,))
    paths = {"target_path": KernelPath(), "draft_path": KernelPath()}
    profile = Profile(made="2026-01-02", step_s=0.1, costs=costs, habits=(Habit(True, 1.0, 1.0),), **paths)
    profiles.save(ProfileKey(target, LoadOptions(), folder / "good.gguf", LoadOptions()), profile)
    result = specllama("check", "--draft-for", str(target), "--scan", str(folder))
    assert len(result.err.splitlines()) == 3
    gains = {
        each["name"]: each["gain"]
        for each in found(specllama("check", "--draft-for", str(target), "--scan", str(folder), "--json"))
    }
    assert gains["good.gguf"] == pytest.approx(4 / (3 * 0.05 + 3.0))
    assert gains["large.gguf"] < 1.1


def test_without_a_place_the_models_of_this_machine_are_searched(specllama: Run, target: Path, own_home: Path) -> None:
    """Prevents: a user who has to know the cache folders."""
    assert specllama("check", "--draft-for", str(target)).code == 1
    for place in (own_home / "cache" / "specllama" / "models", own_home / "hf" / "hub" / "models--a--b" / "snapshots"):
        place.mkdir(parents=True)
        tiny.write_model(place / f"{place.name}.gguf", n_embd=32)
    result = specllama("check", "--draft-for", str(target), "--json")
    assert (result.code, {each["name"] for each in found(result)}) == (0, {"models.gguf", "snapshots.gguf"})


def test_the_hub_is_searched_for_smaller_models_of_the_family(
    specllama: Run, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a search that downloads the models, or looks at every size and family."""
    small = tiny.write_model(tmp_path / "small.gguf", n_embd=32, extra={"general.name": "Tiny 0.01M"})
    foreign = tiny.write_model(tmp_path / "foreign.gguf", n_embd=32, n_vocab=14)
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        for repo, path in {
            "a/Tiny-0.01M-GGUF": small,
            "a/Tiny-0.02M-GGUF": foreign,
            "a/Tiny-70B-GGUF": small,
            "a/Tiny-GGUF": small,
            "a/Other-0.01M-GGUF": small,
        }.items():
            server.repo(repo).files["model-Q4_K_M.gguf"] = path.read_bytes()
        result = specllama("check", "--draft-for", str(target), "--hub", "--json")
        offline = specllama("check", "--draft-for", str(target), "--hub", "--offline")
    assert [(each["name"], each["fits"]) for each in found(result)] == [
        ("a/Tiny-0.01M-GGUF", True),
        ("a/Tiny-0.02M-GGUF", False),
    ]
    assert offline.code == 2
    assert not list((tmp_path / "hf").rglob("*.gguf"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--draft-for", "{target}", "-md", "x"], "--draft-for"),
        (["--draft-for", "{target}", "--scan", "/nowhere"], "not a folder"),
        (["--draft-for", "{target}", "--scan", ".", "--hub"], "exclude each other"),
        (["--draft-for", "nothing"], "there is no file, pair or model named"),
        (["--draft-for", "{encoder}"], "does not generate text"),
        (["--scan", "."], "--draft-for TARGET"),
    ],
)
def test_what_cannot_be_searched_is_2(
    specllama: Run, target: Path, tmp_path: Path, args: list[str], words: str
) -> None:
    """Prevents: 'nothing fits' although nothing was examined (case 20)."""
    encoder = tiny.write_model(tmp_path / "encoder.gguf", extra={"llama.attention.causal": False})
    result = specllama("check", *(arg.format(target=target, encoder=encoder) for arg in args))
    assert (result.code, result.out) == (2, "")
    assert words in result.err


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 100])
def test_on_a_terminal_each_candidate_has_its_whole_name(
    terminal: Callable[..., Terminal], target: Path, folder: Path, columns: int
) -> None:
    """Prevents: names that are cut or folded, so that they cannot be used."""
    shown = terminal("check", "--draft-for", str(target), "--scan", str(folder), columns=columns)
    assert shown.finish() == 0
    firsts = [line.split()[0] for line in shown.display.text_lines]
    names = ["good.gguf", "sub/stranger.gguf", "large.gguf", "foreign.gguf", "broken.gguf", "larger.gguf"]
    assert [word for word in firsts if word in names] == names


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct-GGUF", 5e8),
        ("ggml-org/gemma-3-270m-GGUF", 2.7e8),
        ("x/Llama-3.2-1B", 1e9),
        ("x/phi-4-mini-GGUF", None),
        ("x/Mixtral-8x7B", None),
        ("x/model-4bit", None),
    ],
)
def test_a_size_is_read_from_a_name(name: str, size: float | None) -> None:
    """Prevents: examining the 70B repositories first."""
    assert size_in_name(name) == (None if size is None else pytest.approx(size))


def test_a_fitting_draft_of_the_wrong_size_comes_after_the_others() -> None:
    """Prevents: a draft of a thousandth of the target's size at the top of the list."""
    right, large, tiny_one, out = (
        FoundDraft("a", True, "", 20, 0.2, 3),
        FoundDraft("b", True, "", 50, 0.5, 0),
        FoundDraft("c", True, "", 1, 0.001, 0),
        FoundDraft("d", False, "no", 10, 0.1, 0),
    )
    assert sorted([out, tiny_one, large, right], key=lambda each: each.order) == [right, tiny_one, large, out]


def test_a_file_name_cannot_steer_the_screen(specllama: Run, target: Path, folder: Path) -> None:
    """Prevents: a file name that clears the screen or forges a line."""
    (folder / "good.gguf").rename(folder / "a\x1b[2J\nin\tfake.gguf")
    result = specllama("check", "--draft-for", str(target), "--scan", str(folder))
    assert "\x1b" not in result.out
    lines = [line.split("\t") for line in result.out.splitlines()]
    assert {len(line) for line in lines} == {6}
    assert r"a\x1b[2J\x0ain\x09fake.gguf" in [line[1] for line in lines]
