"""Our loop against llama.cpp's own `llama-speculative-simple`: same pair, prompts, K, threads, build flags; greedy.

    python benchmarks/loop.py [--rounds 3] [--k 4] [--predict 128] [--prompts code,summary]

One run, interleaved: for every round and prompt plain decoding in our loop, our loop, and theirs. "Decode" is steady
decoding: theirs as reported by the program, which starts when both models have read the prompt; ours from the third
step on, because our draft reads the prompt in the second step. "Whole" is the whole answer, with the prompt of both
models. Loading is not counted.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers import programs
from prompts import PROMPTS

from specllama import Engine, RandomChooser, SamplingParams, llama
from specllama.chat.conversation import Conversation, Message
from specllama.core.events import Finished, StepEvent, TokenEvent
from specllama.drafters.model import ModelDrafter
from specllama.files import hub
from specllama.files.catalog import load_catalog
from specllama.llama import crash_test as probe

N_CTX = 4096
COUNTS = re.compile(rb"(encoded|decoded) +(\d+) tokens in +([\d.]+) seconds")


@dataclass(frozen=True)
class Timing:
    decode: float  # tokens per second
    whole: float
    first_s: float  # until the first token
    text: bytes
    acceptance: float | None = None


@dataclass(frozen=True)
class Opened:
    """The default pair, loaded with the same context and threads as theirs."""

    name: str
    target: llama.LlamaModel
    draft: llama.LlamaModel
    target_path: Path
    draft_path: Path


@contextmanager
def opened(n_threads: int) -> Iterator[Opened]:
    pair = load_catalog().pair()
    target_path, draft_path = hub.fetch(pair.target).path, hub.fetch(pair.draft).path
    options = llama.LoadOptions(
        n_ctx=N_CTX, n_threads=n_threads, n_threads_batch=n_threads,
        use_extra_bufts=probe.installed().use_extra_bufts,
    )  # fmt: skip
    with llama.load(target_path, options) as target, llama.load(draft_path, options) as draft:
        yield Opened(pair.name, target, draft, target_path, draft_path)


def ours(engine: Engine, tokens: list[int], n_predict: int, *, may_end: bool = True) -> Timing:
    """One greedy answer from an empty KV cache, of exactly `n_predict` tokens unless it may end."""
    engine.target.truncate(0)
    bias = {} if may_end else dict.fromkeys(engine.target.end_tokens, float("-inf"))
    params = SamplingParams(temperature=0.0, logit_bias=bias)
    said, n_steady, steady_s = list[int](), 0, 0.0
    for event in engine.generate(tokens, params, RandomChooser(0), max_tokens=n_predict):
        if isinstance(event, TokenEvent):
            said.append(event.token)
            n_steady += event.step >= 2
        elif isinstance(event, StepEvent) and event.step >= 2:
            steady_s += event.step_s
    assert isinstance(engine.target, llama.LlamaModel)
    assert isinstance(event, Finished)
    text, stats = b"".join(map(engine.target.vocab.piece, said)), event.stats
    whole = len(said) / (stats.prompt_s + stats.decode_s)
    return Timing(n_steady / steady_s if steady_s else 0.0, whole, stats.prompt_s, text, stats.acceptance_rate)


def printed(program: Path, model: Path, prompt: str, n_predict: int, n_threads: int, *more: str) -> bytes:
    """The output of a program of llama.cpp for one greedy answer."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(prompt)
        file.flush()
        threads = str(n_threads)
        done = subprocess.run(
            [str(program), "-m", str(model), "-bf", file.name, "-n", str(n_predict), "--temp", "0", "-c", str(N_CTX),
             "-t", threads, "-tb", threads, "--log-colors", "off", *more],
            capture_output=True,
            check=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    return done.stdout + done.stderr


def theirs(program: Path, target: Path, draft: Path, prompt: str, k: int, n_predict: int, n_threads: int) -> Timing:
    """One greedy answer of llama-speculative-simple."""
    threads = str(n_threads)
    text = printed(
        program, target, prompt, n_predict, n_threads, "-md", str(draft), "-td", threads, "-tbd", threads,
        "--spec-type", "draft-simple", "--spec-draft-n-max", str(k), "--spec-draft-p-min", "0",
    )  # fmt: skip
    counts = {kind: (int(n), float(s)) for kind, n, s in COUNTS.findall(text)}
    (_, encode_s), (n_decoded, decode_s) = counts[b"encoded"], counts[b"decoded"]
    return Timing(n_decoded / decode_s, n_decoded / (encode_s + decode_s), encode_s, text)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--predict", type=int, default=128)
    parser.add_argument("--prompts", default=",".join(PROMPTS))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()

    program = programs() / "llama-speculative-simple"
    rows: list[str] = []
    every: dict[str, list[float]] = {"decode": [], "whole": [], "plain": []}
    with opened(args.threads) as pair:
        plain, speculative = Engine(pair.target), Engine(pair.target, ModelDrafter(pair.draft, n_max=args.k))
        talk = Conversation(pair.target.vocab, pair.target.chat_template)
        for name in args.prompts.split(","):
            message = [Message("user", PROMPTS[name])]
            prompt, tokens = talk.text(message), talk.tokens(message)
            runs: dict[str, list[Timing]] = {"plain": [], "ours": [], "theirs": []}
            for round_ in range(args.rounds + 1):  # round 0 warms up
                found = {
                    "plain": ours(plain, tokens, args.predict),
                    "ours": ours(speculative, tokens, args.predict),
                    "theirs": theirs(
                        program, pair.target_path, pair.draft_path, prompt, args.k, args.predict, args.threads
                    ),
                }
                pair.draft.truncate(0)
                for arm, timing in found.items():
                    print(f"{name} {round_} {arm}: {timing.decode:.2f} t/s decode, {timing.whole:.2f} whole",
                          file=sys.stderr)  # fmt: skip
                    if round_:
                        runs[arm].append(timing)
            agrees = all(runs["ours"][0].text in run.text for run in runs["theirs"])
            ratios = {
                "decode": [a.decode / b.decode for a, b in zip(runs["ours"], runs["theirs"], strict=True)],
                "whole": [a.whole / b.whole for a, b in zip(runs["ours"], runs["theirs"], strict=True)],
                "plain": [a.decode / b.decode for a, b in zip(runs["ours"], runs["plain"], strict=True)],
            }
            for kind, values in ratios.items():
                every[kind] += values
            speed = {arm: statistics.median(run.decode for run in found) for arm, found in runs.items()}
            acceptance = runs["ours"][0].acceptance or 0.0
            rows.append(
                f"| {name} | {len(tokens)} | {speed['plain']:.1f} | {speed['ours']:.1f} | {speed['theirs']:.1f} "
                f"| {acceptance:.2f} | {spread(ratios['decode'])} | {spread(ratios['whole'])} "
                f"| {spread(ratios['plain'])} | {'yes' if agrees else 'no'} |"
            )
    build = llama.build_info()
    print(f"\n{pair.name}, K = {args.k}, {args.predict} tokens, {args.threads} threads, temperature 0, "
          f"{args.rounds} rounds after one of warm-up; llama-cpp-python {build.bindings}, "
          f"Python {platform.python_version()}\n")  # fmt: skip
    print("| prompt | prompt tokens | plain t/s | ours t/s | llama.cpp t/s | accepted / drafted "
          "| ours / llama.cpp, decode | ours / llama.cpp, whole | ours / plain, decode | same text |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    print(f"| **all** | | | | | | **{spread(every['decode'])}** | **{spread(every['whole'])}** "
          f"| **{spread(every['plain'])}** | |")  # fmt: skip


if __name__ == "__main__":
    main()
