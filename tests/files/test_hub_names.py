"""Choosing a file of a repository by its name."""

from __future__ import annotations

import pytest

from specllama.base.errors import ModelFileError, SourceUnavailable, UsageError
from specllama.files.repo_files import (
    RepoSpec,
    choose_file,
    is_settled_by,
    model_files,
    parse_spec,
    quant_of,
    split_names,
)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("user/repo", RepoSpec("user/repo")),
        ("user/repo:latest", RepoSpec("user/repo")),
        ("user/repo:Q4_K_M", RepoSpec("user/repo", quant="Q4_K_M")),
        ("user/repo:sub/x.gguf", RepoSpec("user/repo", file="sub/x.gguf")),
        ("user/repo.v1-GGUF:IQ3_XXS", RepoSpec("user/repo.v1-GGUF", quant="IQ3_XXS")),
    ],
)
def test_a_repository_is_parsed(text: str, spec: RepoSpec) -> None:
    """Prevents: a dot or a dash in a name taken for a separator."""
    assert parse_spec(text) == spec


@pytest.mark.parametrize("text", ["repo", "a/b/c", "user/repo:", "../x", "user/", "/x", "https://host/user/repo"])
def test_an_invalid_repository_is_refused(text: str) -> None:
    """Prevents: a typing error sent to the Hub, which answers 'not found'."""
    with pytest.raises(UsageError, match="not a repository"):
        parse_spec(text)


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("big-q8_0-00001-of-00003.gguf", "Q8_0"),
        ("sub/Model-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("x-IQ2_XXS.gguf", "IQ2_XXS"),
        ("x-BF16.gguf", "BF16"),
        ("Qwen3-8B.gguf", ""),
    ],
)
def test_the_quantization_is_read_from_the_name(name: str, quant: str) -> None:
    """Prevents: '8B' or an instruct suffix taken for a quantization."""
    assert quant_of(name) == quant


def test_only_loadable_files_count() -> None:
    """Prevents: a projector, a draft head or a second part loaded as the model."""
    names = ["README.md", "mmproj-x-F16.gguf", "x-imatrix.gguf", "mtp-x.gguf", "a-Q8_0-00002-of-00002.gguf", "b.GGUF"]
    assert model_files([*names, "a-Q8_0-00001-of-00002.gguf"]) == ["b.GGUF", "a-Q8_0-00001-of-00002.gguf"]


def test_the_default_quantization_is_that_of_llama_cpp() -> None:
    """Prevents: another file than llama.cpp's for the same name."""
    assert choose_file(RepoSpec("a/b"), ["m-BF16.gguf", "m-Q8_0.gguf", "m-Q4_K_M.gguf"]) == "m-Q4_K_M.gguf"
    assert choose_file(RepoSpec("a/b"), ["m-BF16.gguf", "m-Q8_0.gguf"]) == "m-Q8_0.gguf"
    assert choose_file(RepoSpec("a/b"), ["m-BF16.gguf", "m-Q2_K.gguf"]) == "m-BF16.gguf"
    with pytest.raises(SourceUnavailable, match="no GGUF model"):
        choose_file(RepoSpec("a/b"), ["model.safetensors"])


def test_an_ambiguous_quantization_lists_the_files() -> None:
    """Prevents: one of two models chosen by the order of their names."""
    names = ["base-Q4_K_M.gguf", "instruct-Q4_K_M.gguf"]
    with pytest.raises(SourceUnavailable, match="several files") as caught:
        choose_file(RepoSpec("a/b", quant="q4_k_m"), names)
    assert "a/b:base-Q4_K_M.gguf, a/b:instruct-Q4_K_M.gguf" in caught.value.hint
    assert choose_file(RepoSpec("a/b", file="INSTRUCT-q4_k_m.gguf"), names) == names[1]


def test_the_prefix_of_a_recipe_is_optional() -> None:
    """Prevents: UD-Q4_K_XL not found as Q4_K_XL; UD-Q4_K_M chosen for Q4_K_M."""
    names = ["m-UD-Q4_K_XL.gguf", "m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf"]
    assert choose_file(RepoSpec("a/b", quant="Q4_K_XL"), names) == names[0]
    assert choose_file(RepoSpec("a/b", quant="Q4_K_M"), names) == names[2]


@pytest.mark.parametrize(
    ("quant", "names", "found"),
    [
        ("Q4", ["m-Q4_K_M.gguf", "m-Q8_0.gguf"], "m-Q4_K_M.gguf"),
        ("q4_k", ["m-Q4_K_M.gguf", "m-Q4_0.gguf"], "m-Q4_K_M.gguf"),
        ("Q4", ["m-UD-Q4_K_XL.gguf", "m-IQ4_XS.gguf"], "m-UD-Q4_K_XL.gguf"),
        ("Q4_K_M", ["m-Q4_K_M.gguf", "m-Q4_K_M_L.gguf"], "m-Q4_K_M.gguf"),
        ("Q4", ["m-Q4_0.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf"], None),
        ("Q4", ["m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf"], None),
    ],
)
def test_the_beginning_of_a_quantization_is_enough_if_one_file_has_it(
    quant: str, names: list[str], found: str | None
) -> None:
    """Prevents: `:Q4` refused where one 4-bit file is there; several of them that are 'not there'."""
    spec = RepoSpec("a/b", quant=quant)
    if found is None:
        with pytest.raises(SourceUnavailable, match="several files") as caught:
            choose_file(spec, names)
        assert all(f"a/b:{name}" in caught.value.hint for name in names)
    else:
        assert choose_file(spec, names) == found
    for quant in ("Q", "Q40", "Q4_"):
        with pytest.raises(SourceUnavailable, match="does not exist"):
            choose_file(RepoSpec("a/b", quant=quant), names)


def test_only_a_full_quantization_is_settled_by_the_cache() -> None:
    """Prevents: a file that depends on what was fetched before."""
    names = ["m-UD-Q4_K_XL.gguf", "m-Q4_K_M.gguf"]
    settled = {quant: is_settled_by(RepoSpec("a/b", quant=quant), names) for quant in ("q4_k_m", "Q4_K_XL", "", "Q4_K")}
    assert settled == {"q4_k_m": True, "Q4_K_XL": True, "": True, "Q4_K": False}
    assert not is_settled_by(RepoSpec("a/b", quant="Q4"), names[1:])


def test_parts_follow_from_the_first_one_only() -> None:
    """Prevents: counting from zero, or one part too many (case 40)."""
    assert split_names("m-00001-of-00003.gguf") == tuple(f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3))
    assert split_names("m.gguf") == ("m.gguf",)
    with pytest.raises(ModelFileError, match=r"m-00003-of-00003\.gguf is part 3 of 3") as caught:
        split_names("m-00003-of-00003.gguf")
    assert "m-00001-of-00003.gguf" in caught.value.hint
    with pytest.raises(ModelFileError, match=r"part 1 of 99,999"):
        split_names("m-00001-of-99999.gguf")
