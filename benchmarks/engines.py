"""Checks the settings that `specllama export` writes against the engines: every name, and the values from a list.

    python benchmarks/engines.py                      # all that can be checked
    python benchmarks/engines.py sglang transformers

vLLM, SGLang and transformers: the newest wheel is downloaded (vLLM: 340 MB) and its source is read, not imported.
llama-server: the options of `llama-server --help`, of the program that benchmarks/peers.py builds. TensorRT-LLM has no
wheel on PyPI.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from peers import programs

from specllama.base.errors import PairError
from specllama.core.sampling import SamplingParams
from specllama.files.model import HubSource
from specllama.pairs.engines import ENGINES, ExportedModel, ExportedPair

_TARGET = ExportedModel(label="t", original="user/target", gguf=HubSource("user/target", "t.gguf"), n_vocab=1000)
_DRAFT = ExportedModel(label="d", original="user/draft", gguf=Path("d.gguf"), n_vocab=1000)
_PAIR = ExportedPair(
    title="pair", target=_TARGET, draft=_DRAFT, by_text=False, n_draft=4, reason="", params=SamplingParams(), n_ctx=4096
)
PAIRS = (
    _PAIR,
    replace(_PAIR, params=SamplingParams(temperature=0.0)),
    replace(_PAIR, draft=replace(_DRAFT, n_vocab=900), by_text=True),
)


@dataclass(frozen=True, slots=True)
class Wheel:
    """The source in a wheel."""

    version: str
    files: Mapping[str, str]  # by path

    @classmethod
    def of(cls, package: str) -> Wheel:
        """The newest wheel of a package, downloaded."""
        with tempfile.TemporaryDirectory() as folder:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            subprocess.run([*pip, "-d", folder, package], check=True)
            (path,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(path) as packed:
                files = {name: packed.read(name).decode() for name in packed.namelist() if name.endswith(".py")}
            return cls(path.name.split("-")[1], files)

    def tree(self, path: str) -> ast.Module:
        return ast.parse(self.files[path])

    def fields(self, path: str, name: str = "") -> set[str]:
        """The annotated fields of a class in a file, or of all its classes."""
        kinds = [node for node in ast.walk(self.tree(path)) if isinstance(node, ast.ClassDef)]
        return {
            line.target.id
            for kind in kinds
            if name in ("", kind.name)
            for line in kind.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        }

    def words(self, path: str) -> set[str]:
        """All texts of a file that are values."""
        return {node.value for node in ast.walk(self.tree(path)) if _is_text(node)}


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def bodies(name: str) -> Iterator[str]:
    """The engine's file for each pair that it can run."""
    for pair in PAIRS:
        with suppress(PairError):
            ENGINES[name].require(pair)
            yield ENGINES[name].body(pair)


def settings(name: str) -> Iterator[dict[str, Any]]:
    """What the engine's file holds for each pair that it can run."""
    yield from map(yaml.safe_load, bodies(name))


def missing(kind: str, wanted: set[str], known: set[str]) -> Iterator[str]:
    yield from (f"no {kind} {name}" for name in sorted(wanted - known))


def check_vllm() -> tuple[str, list[str]]:
    """The version, and what it does not know."""
    wheel, problems = Wheel.of("vllm"), list[str]()
    speculative = "vllm/config/speculative.py"
    for found in settings("vllm"):
        ours = found["speculative-config"]
        flags = {key.replace("-", "_") for key in found}
        problems += missing("option", flags, wheel.fields("vllm/engine/arg_utils.py", "EngineArgs"))
        problems += missing("field", set(ours), wheel.fields(speculative, "SpeculativeConfig"))
        values = {value for key, value in ours.items() if isinstance(value, str) and key != "model"}
        problems += missing("value", values, wheel.words(speculative))
        problems += missing("setting", set(found["override-generation-config"]), wheel.words("vllm/config/model.py"))
    return wheel.version, problems


def check_sglang() -> tuple[str, list[str]]:
    wheel, problems = Wheel.of("sglang"), list[str]()
    folder = "sglang/srt/arg_groups/fields/"
    known = set().union(*(wheel.fields(path) for path in wheel.files if path.startswith(folder)))
    algorithms = {
        target.id
        for node in ast.walk(wheel.tree("sglang/srt/speculative/spec_info.py"))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for found in settings("sglang"):
        problems += missing("option", {key.replace("-", "_") for key in found}, known)
        problems += missing("algorithm", {found["speculative-algorithm"]}, algorithms)
        problems += missing("value", {found["sampling-defaults"]}, wheel.words(f"{folder}serving.py"))
    return wheel.version, problems


def check_transformers() -> tuple[str, list[str]]:
    wheel, problems = Wheel.of("transformers"), list[str]()
    config = wheel.tree("transformers/generation/configuration_utils.py")
    known = {node.attr for node in ast.walk(config) if isinstance(node, ast.Attribute)}
    utils = wheel.tree("transformers/generation/utils.py")
    known |= {node.arg for node in ast.walk(utils) if isinstance(node, ast.arg)}
    for pair in PAIRS:
        script = ast.parse(ENGINES["transformers"].body(pair))
        for call in (node for node in ast.walk(script) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr in ("generate", "update"):
                problems += missing("setting", {word.arg for word in call.keywords if word.arg}, known)
    return wheel.version, problems


def check_llama_server() -> tuple[str, list[str]]:
    server, problems = programs() / "llama-server", list[str]()

    def said(option: str) -> str:
        done = subprocess.run([server, option], capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    shown = said("--help")
    known, types = set(re.findall(r"--?[a-z][\w-]*", shown)), re.search(r"--spec-type (\S+)", shown)
    for words in map(str.split, bodies("llama-server")):
        problems += missing("option", {word for word in words if word.startswith("--")}, known)
        drafters = set(types[1].split(",")) if types else set[str]()
        problems += missing("drafter", {words[words.index("--spec-type") + 1]}, drafters)
    version = re.search(r"commit (\w+)", said("--version"))
    return version[1] if version else "unknown", problems


CHECKS: Mapping[str, Callable[[], tuple[str, list[str]]]] = {
    "vllm": check_vllm,
    "sglang": check_sglang,
    "transformers": check_transformers,
    "llama-server": check_llama_server,
}


def main() -> int:
    failed = False
    for name in sys.argv[1:] or CHECKS:
        version, problems = CHECKS[name]()
        failed = failed or bool(problems)
        verdict = "; ".join(dict.fromkeys(problems)) or "it knows every setting"
        print(f"{name} {version} (files say: {ENGINES[name].checked}): {verdict}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
