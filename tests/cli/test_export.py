"""`specllama export`: the files for other engines, and the pairs that they cannot run."""

from __future__ import annotations

import ast
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from specllama.base.errors import PairError
from specllama.cli import export as export_command
from specllama.cli.export import file_text
from specllama.core.sampling import SamplingParams
from specllama.drafters.controller import CostProfile
from specllama.files.catalog import load_catalog
from specllama.files.model import HubSource
from specllama.llama.kernel_path import KernelPath
from specllama.pairs import profile as profiles
from specllama.pairs.check import this_machine
from specllama.pairs.draft_in_target_ids import VOCAB_MAP
from specllama.pairs.engines import ENGINES, ExportedModel, ExportedPair
from specllama.pairs.profile import FoundProfile, Habit, Profile
from tests import tiny
from tests.cli.conftest import EVIL, Pair, Run

pytestmark = pytest.mark.usefixtures("own_home")

ORIGINALS = ["--original", "user/Target", "--original-draft", "user/Draft"]
TARGET = ExportedModel(label="t.gguf", original="user/Target", gguf=HubSource("user/T-GGUF", "t.gguf"), n_vocab=100)
DRAFT = ExportedModel(label="d.gguf", original="user/Draft", gguf=Path("/models/d 1.gguf"), n_vocab=100)
PAIR = ExportedPair(
    title="Pair p",
    target=TARGET,
    draft=DRAFT,
    by_text=False,
    n_draft=5,
    reason="a test",
    params=SamplingParams(temperature=0.7),
    n_ctx=2048,
)
GREEDY = replace(PAIR, params=SamplingParams(temperature=0.0))
TRANSLATED = replace(PAIR, by_text=True, draft=replace(DRAFT, n_vocab=50))


def settings_of(name: str, pair: ExportedPair) -> dict[str, Any]:
    """The settings in a file of YAML."""
    found = yaml.safe_load(file_text(ENGINES[name], pair))
    assert isinstance(found, dict)
    return found


def keywords_of(pair: ExportedPair) -> dict[str, Any]:
    """Every keyword with a constant value in the script for transformers."""
    calls = [
        node for node in ast.walk(ast.parse(file_text(ENGINES["transformers"], pair))) if isinstance(node, ast.Call)
    ]
    words = [word for call in calls for word in call.keywords if word.arg is not None]
    return {word.arg or "": getattr(word.value, "value", word.value) for word in words}


def words_of(pair: ExportedPair) -> list[str]:
    """The words of the command in the script for llama-server."""
    return shlex.split(file_text(ENGINES["llama-server"], pair), comments=True)


def test_the_settings_of_vllm() -> None:
    """Prevents: a draft of another length or model, or a draft that vLLM draws in a way that accepts less."""
    found = settings_of("vllm", PAIR)
    assert (found["model"], found["max-model-len"]) == ("user/Target", 2048)
    assert found["speculative-config"] == {
        "method": "draft_model",
        "model": "user/Draft",
        "num_speculative_tokens": 5,
        "draft_sample_method": "probabilistic",
    }
    sampling = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.0}
    assert found["override-generation-config"] == sampling
    assert "max-model-len" not in settings_of("vllm", replace(PAIR, n_ctx=0))


def test_vllm_drafts_greedily_among_shared_tokens_for_two_vocabularies() -> None:
    """Prevents: a pair that vLLM refuses at the start, and settings that have no effect there."""
    found = settings_of("vllm", TRANSLATED)
    assert found["speculative-config"]["use_heterogeneous_vocab"] is True
    assert "draft_sample_method" not in found["speculative-config"]
    assert "min_p" not in found["override-generation-config"]


def test_the_settings_of_sglang_and_tensorrt_llm() -> None:
    """Prevents: a block of another length than the draft and one token, and a draft type under another name."""
    found = settings_of("sglang", PAIR)
    assert (found["model-path"], found["speculative-draft-model-path"]) == ("user/Target", "user/Draft")
    assert [found[f"speculative-{key}"] for key in ("num-steps", "num-draft-tokens", "eagle-topk")] == [5, 6, 1]
    found = settings_of("tensorrt-llm", PAIR)["speculative_config"]
    assert found == {"decoding_type": "Draft_Target", "max_draft_len": 5, "speculative_model": "user/Draft"}


def test_the_script_for_transformers() -> None:
    """Prevents: a script that does not parse, a draft length that adapts itself, a temperature of 0 that is refused."""
    found = keywords_of(PAIR)
    assert (found["num_assistant_tokens"], found["num_assistant_tokens_schedule"]) == (5, "constant")
    assert (found["assistant_confidence_threshold"], found["do_sample"], found["temperature"]) == (0.0, True, 0.7)
    assert "assistant_tokenizer" not in found
    greedy = keywords_of(GREEDY)
    assert greedy["do_sample"] is False
    assert "temperature" not in greedy
    assert "assistant_tokenizer" in keywords_of(TRANSLATED)
    assert ENGINES["transformers"].file.removesuffix(".py") != "transformers"  # `import transformers` would find it


def test_the_command_of_llama_server() -> None:
    """Prevents: another file of a repository, a path that the shell splits, sampling that is not the pair's."""
    words = words_of(PAIR)
    assert words[:2] == ["exec", "llama-server"]
    for option, value in [
        ("--hf-repo", "user/T-GGUF"),
        ("--hf-file", "t.gguf"),
        ("--model-draft", "/models/d 1.gguf"),
        ("--spec-type", "draft-simple"),
        ("--spec-draft-n-max", "5"),
        ("--temp", "0.7"),
        ("--ctx-size", "2048"),
    ]:
        assert words[words.index(option) + 1] == value
    assert words_of(GREEDY)[words_of(GREEDY).index("--temp") + 1] == "0"


@pytest.mark.parametrize(
    ("name", "pair"),
    [
        ("sglang", TRANSLATED),
        ("sglang", replace(PAIR, draft=replace(DRAFT, n_vocab=99))),
        ("tensorrt-llm", TRANSLATED),
        ("transformers", replace(PAIR, by_text=True)),
        ("llama-server", TRANSLATED),
        ("llama-server", replace(PAIR, draft=replace(DRAFT, n_vocab=300))),
        ("llama-server", replace(PAIR, draft=replace(DRAFT, is_cut=True))),
        ("llama-server", replace(PAIR, draft=replace(DRAFT, gguf=Path("/models/\x1b.gguf")))),
        ("vllm", replace(PAIR, target=replace(TARGET, original=None))),
        ("vllm", replace(PAIR, draft=replace(DRAFT, is_cut=True))),
    ],
)
def test_a_pair_that_an_engine_cannot_run(name: str, pair: ExportedPair) -> None:
    """Prevents: a file that the engine refuses, or that makes it draft tokens of another meaning."""
    with pytest.raises(PairError):
        ENGINES[name].require(pair)
    ENGINES[name].require(PAIR)


@pytest.mark.parametrize("name", ENGINES)
def test_names_of_files_stay_in_their_comment(name: str) -> None:
    """Prevents: a file name that adds a setting or a command to the file."""
    evil = f"{EVIL}\nmodel: x\n$(rm -rf x)"
    pair = replace(PAIR, title=evil, reason=evil)
    texts = [file_text(ENGINES[name], each).splitlines() for each in (PAIR, pair)]
    plain, odd = ([line for line in lines if not line.startswith("# ")] for lines in texts)
    assert plain == odd


@pytest.mark.parametrize("name", ENGINES)
def test_each_file_says_how_to_start_what_was_checked_and_what_differs(name: str) -> None:
    """Prevents: a file that claims more than it holds."""
    engine = ENGINES[name]
    for pair in (PAIR, GREEDY):
        text = file_text(engine, pair)
        assert text.count(engine.file) == 1
        assert f"Draft length 5: {PAIR.reason}." in text
        assert len(list(engine.notes(pair))) >= 2
        assert max(map(len, text.splitlines())) <= 120


def test_every_model_of_a_shipped_pair_has_an_original() -> None:
    """Prevents: a named pair that cannot be exported."""
    models = [model for pair in load_catalog().pairs.values() for model in (pair.target, pair.draft)]
    assert [model.name for model in models if model.original is None] == []


def export(specllama: Run, pair: Pair, *args: str) -> Any:
    return specllama("export", "-m", str(pair.target), "-md", str(pair.draft), *args)


def test_one_file_goes_to_stdout_and_several_to_a_folder(specllama: Run, pair: Pair, tmp_path: Path) -> None:
    """Prevents: two files in one stream, and paths that a script cannot read."""
    one = export(specllama, pair, *ORIGINALS, "--to", "vllm")
    assert (one.code, one.err) == (0, "")
    assert yaml.safe_load(one.out)["model"] == "user/Target"
    folder = tmp_path / "new" / "folder"
    several = export(specllama, pair, *ORIGINALS, "--to", "vllm,llama-server", "-o", str(folder))
    assert (several.code, several.err) == (0, "")
    assert several.out.splitlines() == [str(folder / "vllm.yaml"), str(folder / "llama-server.sh")]
    assert (folder / "vllm.yaml").read_text() == one.out
    assert str(pair.draft) in shlex.split((folder / "llama-server.sh").read_text(), comments=True)


@pytest.mark.parametrize("args", [[], ["--to", "ollama"], ["--to", "vllm,sglang"], ["--to", "vllm", "--original", "x"]])
def test_what_is_asked_must_be_clear(specllama: Run, pair: Pair, args: list[str]) -> None:
    """Prevents: a guess of the engine, or a name that is no repository."""
    assert export(specllama, pair, *args).code == 2


def test_the_folder_must_not_be_a_file(specllama: Run, pair: Pair) -> None:
    """Prevents: a failed write after the check."""
    assert export(specllama, pair, *ORIGINALS, "--to", "vllm", "-o", str(pair.draft)).code == 2


def test_an_unknown_original_is_an_error_and_never_a_guess(specllama: Run, tmp_path: Path) -> None:
    """Prevents: a made-up repository; what the original was trained from in its place."""
    hub = "https://huggingface.co/"
    base = {"general.base_model.0.repo_url": f"{hub}user/Base"}
    target = tiny.write_model(tmp_path / "t.gguf", extra={**base, "general.source.repo_url": f"{hub}user/Source"})
    draft = tiny.write_model(tmp_path / "d.gguf", seed=2, extra=base)
    args = ["export", "-m", str(target), "-md", str(draft), "--to", "vllm"]
    refused = specllama(*args)
    assert (refused.code, refused.out) == (1, "")
    assert "--original-draft" in refused.err
    found = yaml.safe_load(specllama(*args, "--original-draft", "user/Draft").out)
    assert (found["model"], found["speculative-config"]["model"]) == ("user/Source", "user/Draft")


def test_engines_with_one_reason_share_it_and_the_hint_stands_apart(specllama: Run, pair: Pair, tmp_path: Path) -> None:
    """Prevents: a remedy inside the reason, and one reason said for each engine."""
    folder = tmp_path / "out"
    refused = export(specllama, pair, "--to", "vllm,sglang,llama-server", "-o", str(folder))
    assert (refused.code, refused.out.splitlines()) == (1, [str(folder / "llama-server.sh")])
    reason, _, hint = refused.err.partition("hint:")
    assert reason.count("vLLM, SGLang: ") == 1
    assert "--original" not in reason
    assert hint.count("--original USER/REPO") == 1


@pytest.mark.parametrize("edited", ["vllm.yaml", "llama-server.sh"])
def test_an_edited_file_is_not_replaced(specllama: Run, pair: Pair, tmp_path: Path, edited: str) -> None:
    """Prevents: edits lost without a word, and one new file beside an old one."""
    args = [*ORIGINALS, "--to", "vllm,llama-server", "-o", str(tmp_path / "out")]
    assert [export(specllama, pair, *args).code for _ in range(2)] == [0, 0]
    (tmp_path / "out" / edited).write_text("mine\n")
    before = {path: path.read_text() for path in (tmp_path / "out").iterdir()}
    refused = export(specllama, pair, *args)
    assert (refused.code, refused.out) == (2, "")
    assert edited in refused.err
    assert {path: path.read_text() for path in (tmp_path / "out").iterdir()} == before


def test_the_script_finds_its_models_from_any_folder(
    specllama: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: paths that hold only in the folder where the export ran."""
    (tmp_path / "my models").mkdir()
    target, draft = (tiny.write_model(tmp_path / "my models" / name) for name in ("t.gguf", "d.gguf"))
    monkeypatch.chdir(tmp_path)
    found = export(specllama, Pair(target.relative_to(tmp_path), draft.relative_to(tmp_path)), "--to", "llama-server")
    words = shlex.split(found.out, comments=True)
    paths = [words[words.index(option) + 1] for option in ("--model", "--model-draft")]
    assert paths == [str(target), str(draft)]


def test_a_draft_that_does_not_fit_is_1_as_in_check_and_nothing_is_written(
    specllama: Run, strangers: Pair, tmp_path: Path
) -> None:
    """Prevents: a configuration of a pair that drafts nonsense."""
    folder = tmp_path / "out"
    args = [*ORIGINALS, "--to", "vllm,llama-server", "-o", str(folder)]
    checked = specllama("check", "-m", str(strangers.target), "-md", str(strangers.draft))
    refused = export(specllama, strangers, *args)
    assert (refused.code, refused.out) == (checked.code, "") == (1, "")
    assert not folder.exists()


def test_the_engines_that_can_run_a_translated_pair_get_their_files(
    specllama: Run, strangers: Pair, tmp_path: Path
) -> None:
    """Prevents: one engine that stops the files of the others, and a failure with exit code 0."""
    args = [*ORIGINALS, "--spec-type", "draft-tli", "--to", ",".join(ENGINES), "-o", str(tmp_path / "out")]
    found = export(specllama, strangers, *args)
    assert found.code == 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"vllm.yaml", "run-transformers.py"}
    for title in ("SGLang", "TensorRT-LLM", "llama-server"):
        assert title in found.err


def test_a_trimmed_draft_is_seen_in_its_file(specllama: Run, tmp_path: Path) -> None:
    """Prevents: a draft whose ids mean other tokens to llama-server."""
    vocabulary = tiny.letters(20)
    target = tiny.write_model(tmp_path / "t.gguf", vocabulary=vocabulary)
    draft = tiny.write_model(tmp_path / "d.gguf", vocabulary=vocabulary, extra={VOCAB_MAP: list(range(20))})
    assert export(specllama, Pair(target, draft), "--to", "llama-server").code == 1


def test_the_memory_of_this_machine_does_not_matter(
    specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a laptop that cannot export a pair for a server."""
    monkeypatch.setattr(export_command, "this_machine", lambda: replace(this_machine(), memory_free=1))
    assert export(specllama, pair, *ORIGINALS, "--to", "vllm").code == 0


def length_of(specllama: Run, pair: Pair, *args: str) -> int:
    found = yaml.safe_load(export(specllama, pair, *ORIGINALS, "--to", "vllm", *args).out)
    length = found["speculative-config"]["num_speculative_tokens"]
    assert isinstance(length, int)
    return length


def test_the_draft_length_follows_from_the_measured_acceptance(
    specllama: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: one length for every pair; the acceptance at another temperature."""
    target, draft = tmp_path / "t.gguf", tmp_path / "d.gguf"
    tiny.write_model(target, n_layer=8)
    tiny.write_model(draft, n_layer=1, seed=2)
    pair = Pair(target, draft)
    assert length_of(specllama, pair) == 4
    costs = CostProfile(verify=((1, 1.0), (2, 9.0)), draft=((1, 0.9),))
    habits = (Habit(greedy=True, acceptance=0.9, confidence=0.9), Habit(greedy=False, acceptance=0.3, confidence=0.3))
    paths = {"target_path": KernelPath(), "draft_path": KernelPath()}
    known = Profile(made="2026-01-02", step_s=0.1, costs=costs, habits=habits, **paths)
    monkeypatch.setattr(profiles, "find", lambda _subject: FoundProfile(known))
    assert length_of(specllama, pair) < 3 < 5 < length_of(specllama, pair, "--temp", "0")
    assert "tuned 2026-01-02" in export(specllama, pair, *ORIGINALS, "--to", "vllm").out
