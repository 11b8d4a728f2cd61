"""Options: what is allowed, what is refused and how, aliases, the environment, and words that were joined."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import typer
from typer.main import get_command

from specllama.base.errors import UsageError
from specllama.chat.settings import SETTINGS, Settings, changed, from_json, to_json
from specllama.cli.args.grouping import with_options
from specllama.cli.args.options import (
    DraftOptions,
    FormatOptions,
    HardwareOptions,
    ModelOptions,
    OutputOptions,
    PromptOptions,
    SamplingOptions,
)
from specllama.cli.chat.command import _settings as chat_settings
from specllama.cli.command import SILENT, CommandWithHelp
from specllama.cli.loading import ask_of
from specllama.drafters.length import AUTO_LENGTH, DraftLength

Groups = dict[str, object]


@pytest.fixture(scope="module")
def parse() -> Callable[..., Groups]:
    """The option groups that a command line makes."""
    seen: Groups = {}

    @with_options
    def command(
        prompt: PromptOptions,
        models: ModelOptions,
        drafting: DraftOptions,
        sampling: SamplingOptions,
        formats: FormatOptions,
        hardware: HardwareOptions,
        output: OutputOptions,
    ) -> None:
        seen.update(locals())

    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command(cls=CommandWithHelp)(command)
    made = get_command(app)

    def run(*args: str) -> Groups:
        seen.clear()
        made.main(list(args), prog_name="specllama", standalone_mode=False)
        return dict(seen)

    return run


def test_without_options_every_default_is_llama_cpps(parse: Callable[..., Groups]) -> None:
    """A default that differs from the tool people know, so that the same command answers differently."""
    groups = parse("hi")
    sampling = groups["sampling"]
    assert isinstance(sampling, SamplingOptions)
    assert (sampling.temp, sampling.top_k, sampling.top_p, sampling.min_p) == (0.8, 40, 0.95, 0.05)
    assert (sampling.repeat_penalty, sampling.repeat_last_n, sampling.seed, sampling.predict) == (1.0, 64, -1, -1)
    hardware = groups["hardware"]
    assert isinstance(hardware, HardwareOptions)
    assert hardware.cache_type_k_draft == hardware.cache_type_v_draft == "f16"  # whatever -ctk is (FIELD_CASES 28)


@pytest.mark.parametrize(
    ("args", "group", "field", "value"),
    [
        (["--draft-max", "7"], "drafting", "spec_draft_n_max", DraftLength(7)),
        (["--draft-max", "auto"], "drafting", "spec_draft_n_max", AUTO_LENGTH),
        (["--draft", "7"], "drafting", "spec_draft_n_max", DraftLength(7)),
        (["--num-draft-tokens", "7"], "drafting", "spec_draft_n_max", DraftLength(7)),
        (["--draft-p-min", "0.5"], "drafting", "spec_draft_p_min", 0.5),
        (["-m", "a", "--draft-model", "b"], "models", "model_draft", "b"),
        (["-m", "a", "--spec-draft-model", "b"], "models", "model_draft", "b"),
        (["--spec-draft-hf", "u/r"], "models", "hf_repo_draft", "u/r"),
        (["--gpu-layers", "3"], "hardware", "gpu_layers", "3"),
        (["--n-gpu-layers", "all"], "hardware", "gpu_layers", "all"),
        (["--temperature", "0"], "sampling", "temp", 0.0),
        (["--max-tokens", "5"], "sampling", "predict", 5),
        (["-r", "END"], "sampling", "stop", ["END"]),
        (["--reverse-prompt", "END"], "sampling", "stop", ["END"]),
        (["--system", "be brief"], "prompt", "system_prompt", "be brief"),
        (["-sys", "be brief"], "prompt", "system_prompt", "be brief"),
        (["-ngld", "all"], "hardware", "gpu_layers_draft", "all"),
        (["--no-live"], "output", "live", False),
        (["-n5"], "sampling", "predict", 5),
        (["-s", "-1"], "sampling", "seed", -1),
        (["--seed", "0"], "sampling", "seed", 0),
        (["--spec-type", "draft-simple,none"], "drafting", "spec_type", "draft-simple,none"),
    ],
)
def test_a_name_that_other_tools_use_works(
    parse: Callable[..., Groups], args: list[str], group: str, field: str, value: object
) -> None:
    """An alias that is parsed into another option, or into nothing."""
    assert getattr(parse(*args, "hi")[group], field) == value


def test_aliases_are_not_shown_in_the_help_text(
    parse: Callable[..., Groups], capsys: pytest.CaptureFixture[str]
) -> None:
    """Four names for one thing on every line of the help text."""
    parse("--help-all")
    shown = capsys.readouterr().out
    words = {word.strip(",") for word in shown.split()}
    assert not words & {name for _, name in SILENT}
    assert {"-md", "--model-draft", "--spec-draft-n-max", "-ngl", "PROMPT"} <= words


@pytest.mark.parametrize(
    ("args", "found", "allowed"),
    [
        (["--temp", "nan"], "--temp is nan", "a number of at least 0"),
        (["--seed", "1.5"], "--seed is 1.5", "from -1 to 18446744073709551615"),
        (["--ctx-size", "3"], "--ctx-size is 3", "a whole number from 16 to 2147483647 or 0"),
        (["--threads", "0"], "--threads is 0", "a whole number from 1 to 1024"),
        (["-ngl", "most"], "--gpu-layers is most", "a whole number of layers, auto or all"),
        (["-ngl", "-1"], "--gpu-layers is -1", "a whole number of layers, auto or all"),
        (["-ctk", "q3"], "--cache-type-k is q3", "one of f32, f16"),
        (["-fa", "yes"], "--flash-attn is yes", "one of on, off, auto"),
        (["--spec-draft-n-max", "car"], "--spec-draft-n-max is car", "a whole number from 0 to 64, or auto"),
        (["--logit-bias", "15043"], "--logit-bias is 15043", "ID=V"),
        (["--logit-bias", "5=inf"], "--logit-bias is 5=inf", "ID=V"),
        (["--logit-bias", "x=1"], "--logit-bias is x=1", "ID=V"),
        (["--system-prompt", "caf\udce9"], "--system-prompt is not", "UTF-8 text"),
        (["caf\udce9"], "the prompt is not", "UTF-8 text"),
        (["--stop", r"\x4"], r"--stop \x4", "invalid escape sequence"),
        (["--color", "green"], "--color is green", "one of auto, always, never"),
        (["--spec-type", "auto,none"], "--spec-type is auto,none", "expected auto alone"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_range(
    parse: Callable[..., Groups], args: list[str], found: str, allowed: str
) -> None:
    """A bad value that gets as far as the sampler, or an error that does not say what would be right."""
    with pytest.raises(UsageError) as error:
        parse(*args, "hi")
    assert found in str(error.value)
    assert allowed in str(error.value)


# Each setting of a chat that is also an option: the option, and a good and a bad value as they are typed.
DOORS = {
    "temp": ("--temp", "0.5", "-1"),
    "top-k": ("--top-k", "7", "1.5"),
    "top-p": ("--top-p", "0.5", "1.1"),
    "min-p": ("--min-p", "0.5", "nan"),
    "repeat-penalty": ("--repeat-penalty", "1.1", "0"),
    "presence-penalty": ("--presence-penalty", "-1", "inf"),
    "frequency-penalty": ("--frequency-penalty", "-1", "x"),
    "repeat-last-n": ("--repeat-last-n", "-1", "-2"),
    "logit-bias": ("--logit-bias", "65-5", "65"),
    "seed": ("--seed", "3", str(2**64)),
    "predict": ("--predict", "9", "0"),
    "stop": ("--stop", r"a\nb", r"\ud800"),
    "spec-draft-n-max": ("--spec-draft-n-max", "3", "65"),
    "spec-draft-p-min": ("--spec-draft-p-min", "0.5", "2"),
    "draft-temp": ("--draft-temp", "0.5", "-1"),
    "verify-rule": ("--verify-rule", "match", "tree"),
}


@pytest.mark.parametrize("name", DOORS)
def test_options_chat_and_files_take_and_refuse_the_same_values(parse: Callable[..., Groups], name: str) -> None:
    """`--stop "\\n"` was a newline and `/set stop \\n` was not; a file had what could never be saved again."""
    option, good, bad = DOORS[name]
    groups = parse(f"{option}={good}", "hi")
    drafting = ask_of(groups["models"], groups["drafting"], groups["hardware"]).drafting
    optioned = chat_settings(groups["sampling"], groups["formats"], drafting)
    typed = changed(Settings(), name, good)
    field = SETTINGS[name].get
    if name != "spec-draft-n-max":  # the models are loaded for it
        assert field(optioned) == field(typed)
    assert field(from_json(json.loads(json.dumps(to_json(typed))), Settings())) == field(typed)
    for door in (
        lambda: parse(f"{option}={bad}", "hi"),
        lambda: changed(Settings(), name, bad),
        lambda: from_json({name: bad}, Settings()),
    ):
        with pytest.raises(UsageError, match=name.removeprefix("draft-")):
            door()


def test_an_unknown_strategy_is_refused_with_those_that_exist(parse: Callable[..., Groups]) -> None:
    """`--spec-type lookup` that silently decodes plainly."""
    with pytest.raises(UsageError, match="is prompt-cache") as error:
        parse("--spec-type", "prompt-cache", "hi")
    assert "draft-simple" in error.value.hint
    assert "none (plain decoding)" in error.value.hint


@pytest.mark.parametrize(
    ("word", "long", "short"),
    [("-mdfile.gguf", "-md file.gguf", "-m dfile.gguf"), ("-ngl99", "-ngl 99", "-n gl99"), ("-tb4", "-tb 4", "-t b4")],
)
def test_a_value_joined_to_a_long_name_with_one_dash_is_refused(
    parse: Callable[..., Groups], word: str, long: str, short: str
) -> None:
    """`-mdfile` taken as `-m dfile`: the draft silently becomes the target."""
    with pytest.raises(UsageError, match="needs a space") as error:
        parse("-q", word, "hi")
    assert long in error.value.hint
    assert short in error.value.hint


@pytest.mark.parametrize("args", [["--stop", "-mdx"], ["-n5"], ["-md=file", "-m", "a"], ["-qn5"], ["--", "-mdx"]])
def test_what_only_looks_like_a_joined_value_is_let_through(parse: Callable[..., Groups], args: list[str]) -> None:
    """A check so eager that values and prompts with a dash are refused too."""
    assert parse(*args, *([] if "--" in args else ["hi"]))


def test_stop_strings_understand_escape_sequences(parse: Callable[..., Groups]) -> None:
    r"""A stop at a newline that cannot be written in a shell, or a `\\n` that becomes one."""
    sampling = parse("--stop", r"\n\n", "--stop", r"a\tb", "--stop", r"C:\\n", "--stop", "終わり。é", "hi")["sampling"]
    assert isinstance(sampling, SamplingOptions)
    assert sampling.stop == ["\n\n", "a\tb", "C:\\n", "終わり。é"]


def test_logit_bias_takes_llama_cpps_spelling_too(parse: Callable[..., Groups]) -> None:
    """`15+1` read as the token 15+1, or refused."""
    sampling = parse("--logit-bias", "15=1.5", "--logit-bias", "16-2", "--logit-bias", "17=-inf", "hi")["sampling"]
    assert isinstance(sampling, SamplingOptions)
    assert sampling.params.logit_bias == {15: 1.5, 16: -2.0, 17: float("-inf")}


@pytest.mark.parametrize(
    "args",
    [
        ["--json", "--jsonl"],
        ["--raw", "-sys", "be brief"],
        ["--pair", "a", "-m", "b"],
        ["--pair", "a", "-md", "b"],
        ["-m", "a", "-hf", "u/r"],
        ["-m", "a", "-md", "b", "-hfd", "u/r"],
    ],
)
def test_options_that_exclude_each_other_are_refused(parse: Callable[..., Groups], args: list[str]) -> None:
    """Two options, one of them silently ignored."""
    with pytest.raises(UsageError, match="exclude each other"):
        parse(*args, "hi")


def test_every_option_reads_its_variable(parse: Callable[..., Groups], monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is documented and not read; checked for values, flags and lists."""
    for name, value in (("TEMP", "0.25"), ("CTX_SIZE", "777"), ("RAW", "1"), ("STOP", "END"), ("LIVE", "0")):
        monkeypatch.setenv(f"SPECLLAMA_{name}", value)
    groups = parse("hi")
    assert groups["sampling"].temp == 0.25  # type: ignore[attr-defined]
    assert groups["sampling"].stop == ["END"]  # type: ignore[attr-defined]
    assert groups["hardware"].ctx_size == 777  # type: ignore[attr-defined]
    assert groups["prompt"].raw is True  # type: ignore[attr-defined]
    assert groups["output"].live is False  # type: ignore[attr-defined]
    assert parse("--temp", "0.5", "hi")["sampling"].temp == 0.5  # type: ignore[attr-defined]


def test_a_bad_value_in_a_variable_is_refused_like_one_on_the_command_line(
    parse: Callable[..., Groups], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback because of an old variable."""
    monkeypatch.setenv("SPECLLAMA_TOP_P", "2")
    with pytest.raises(UsageError, match="--top-p is 2, expected a number from 0 to 1"):
        parse("hi")


def test_a_flag_beats_a_variable_that_excludes_it(
    parse: Callable[..., Groups], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPECLLAMA_PAIR in a profile that makes every `-m` fail."""
    monkeypatch.setenv("SPECLLAMA_PAIR", "some-pair")
    monkeypatch.setenv("SPECLLAMA_JSONL", "1")
    groups = parse("-m", "file.gguf", "--json", "hi")
    assert (groups["models"].pair, groups["models"].model) == (None, "file.gguf")  # type: ignore[attr-defined]
    assert groups["output"].format == "json"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (["-m", ""], "--model"),
        (["-m", "a", "-md", ""], "--model-draft"),
        (["--pair", ""], "--pair"),
        (["-hf", ""], "--hf-repo"),
        (["-hfd", ""], "--hf-repo-draft"),
        (["-f", ""], "--file"),
        (["-c", ""], "--ctx-size"),
        (["--stop", ""], "--stop"),
    ],
)
def test_an_empty_value_is_refused_by_name(parse: Callable[..., Groups], args: list[str], name: str) -> None:
    """`-md "$DRAFT"` with DRAFT unset, which answers with another draft and says nothing."""
    with pytest.raises(UsageError, match=f"^{name} is empty") as caught:
        parse(*args, "hi")
    assert "shell variable" in caught.value.hint


def test_an_empty_system_prompt_is_none_at_all(parse: Callable[..., Groups]) -> None:
    """llama.cpp's way to switch a system prompt off, refused."""
    prompt = parse("-sys", "", "hi")["prompt"]
    assert isinstance(prompt, PromptOptions)
    assert prompt.system_prompt == ""
