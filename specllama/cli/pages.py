"""The first page of each command's help: examples, and the options that most people need."""

from __future__ import annotations

from dataclasses import dataclass

_PAIR = ("PAIR", "--model", "--model-draft")


@dataclass(frozen=True, slots=True)
class Page:
    """What `--help` shows in 24 lines of 80 columns; `--help-all` shows everything."""

    examples: tuple[str, ...]
    common: tuple[str, ...] | None = None  # long names, or metavars of arguments; None = all


PAGES = {
    "": Page(
        ('specllama run "Explain tail calls."', "specllama chat", "specllama run --help-all"),
        (),  # so that the commands fit the screen
    ),
    "run": Page(
        (
            'specllama run "Explain tail calls." --seed 7 --seed-mode same',
            'git diff | specllama run -x "Fix the bug. Print the file."',
            "specllama run -m target.gguf -md draft.gguf --json-schema person.json -f m.txt",
        ),
        (
            "--file",
            "--system-prompt",
            "--pair",
            "--model",
            "--model-draft",
            "--temp",
            "--predict",
            "--extract",
            "--json",
        ),
    ),
    "chat": Page(
        (
            "specllama chat",
            'specllama chat --pair qwen3-4b -sys "Answer yes or no." --grammar yes-no.gbnf',
            "specllama chat --load notes.json",
        ),
        ("--system-prompt", "--load", "--pair", "--model", "--model-draft", "--temp", "--ctx-size"),
    ),
    "batch": Page(
        (
            "specllama batch prompts.jsonl -o answers.jsonl",
            'specllama batch m.csv --template "Spam? {text}" --regex "yes|no" -o a.jsonl',
            "specllama batch prompts.jsonl -o answers.jsonl --resume",
        ),
        (
            "PROMPTS",
            "--output",
            "--resume",
            "--template",
            "--model",
            "--predict",
            "--parallel",
        ),
    ),
    "check": Page(
        (
            "specllama check qwen2.5-coder-7b",
            "specllama check -m target.gguf -md draft.gguf --probe",
            "specllama check --draft-for target.gguf",
        ),
        (*_PAIR, "--draft-for", "--hub", "--probe"),
    ),
    "tune": Page(
        ("specllama tune", "specllama tune --quick qwen2.5-coder-7b", "specllama tune -m target.gguf -md draft.gguf"),
        (*_PAIR, "--ctx-size", "--quick", "--json"),
    ),
    "audit": Page(
        (
            "specllama audit --quick",
            "specllama audit -m target.gguf -md draft.gguf --rollback window",
            "specllama audit --self-test",
        ),
        (*_PAIR, "--quick", "--self-test", "--output"),
    ),
    "draft": Page(
        ("specllama draft make", "specllama draft make -m target.gguf draft.gguf --quant Q4_0", "specllama draft list")
    ),
    "draft make": Page(
        (
            "specllama draft make",
            "specllama draft make -m target.gguf draft.gguf --quant Q4_0",
            "specllama draft make qwen3-4b --vocab 32k --measure",
        ),
        ("WHAT", "--model", "--quant", "--vocab"),
    ),
    "draft list": Page(("specllama draft list", "specllama draft list --json")),
    "draft remove": Page(("specllama draft remove qwen-q4_0", "specllama draft remove qwen-q4_0 --yes")),
    "bench": Page(
        (
            "specllama bench -m target.gguf -md draft.gguf --rollback kept,saved -o ways.md",
            "specllama bench --parallel 1,2,4,8,16 -o parallel.md",
            "specllama bench compare before.json after.json",
        ),
        (*_PAIR, "--budget", "--output"),
    ),
    "export": Page(
        (
            "specllama export qwen3-8b --to vllm",
            "specllama export qwen3-8b --to vllm,sglang,llama-server -o qwen3-8b",
            "specllama export -m target.gguf -md draft.gguf --to llama-server",
        ),
        (*_PAIR, "--to", "--output", "--original", "--temp"),
    ),
    "models": Page(
        (
            "specllama models list",
            "specllama models pull qwen2.5-coder-7b",
            "specllama models add mine -m target.gguf -md draft.gguf",
        )
    ),
    "models list": Page(("specllama models list", "specllama models list --json")),
    "models show": Page(
        ("specllama models show qwen3-4b", "specllama models show Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M")
    ),
    "models pull": Page(
        ("specllama models pull qwen3-4b", "specllama models pull Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M")
    ),
    "models path": Page(("specllama models path qwen3-4b", "specllama models path Qwen3-4B-Q4_K_M")),
    "models verify": Page(("specllama models verify", "specllama models verify qwen3-4b")),
    "models import": Page(("specllama models import", "specllama models import --json")),
    "models remove": Page(("specllama models remove qwen3-4b", "specllama models remove Qwen3-4B-Q4_K_M --yes")),
    "models add": Page(
        (
            "specllama models add mine -m target.gguf -md draft.gguf",
            "specllama models add mine -m qwen3-4b -md user/repo:Q4_0 -c 8192",
        )
    ),
    "config": Page(("specllama config", "specllama config temp 0.6", "specllama config temp --unset")),
    "templates": Page(("specllama templates", "specllama templates summary --edit", "specllama templates summary")),
    "logs": Page(("specllama logs", "specllama logs -n 20 --json")),
    "doctor": Page(("specllama doctor", "specllama doctor --fix")),
}
