"""Ours against llama.cpp's own `llama-server`, plain and with a draft, and against `llama-bench`: one interleaved run.

    python benchmarks/servers.py [--rounds 3] [--k 4] [--predict 64] [--prompts code,question]

Same pair, prompts, K, threads, context and build flags; greedy. For every prompt and round each arm answers in turn:
our loop and the server, without and with a draft. Each server is a process that stays up, is idle while others work,
and caches no prompt. "First" is the time from the first prompt token to the first token of the answer; it contains the
draft's prefill in the server, but not in our loop, where the draft reads the prompt in the second step. "Decode" is
steady decoding: theirs after the first token, ours after the second step, both without the draft's prefill. "Whole" is
all tokens over all time. Loading and HTTP are not counted.

Then `llama-bench` and our loop without a draft read 512 tokens and write 64 from an empty context, round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from loop import N_CTX, Timing, opened, ours, spread
from peers import programs
from prompts import PROMPTS

from specllama import Engine, llama
from specllama.chat.conversation import Conversation, Message
from specllama.drafters.model import ModelDrafter

READ, WRITTEN = 512, 64  # tokens of llama-bench's two tests
START_S = 60.0  # limit for the start of a server


def served(url: str, tokens: list[int], n_predict: int, **more: object) -> Timing:
    """One greedy answer of a server, without its prompt cache. `more`: other fields of the request."""
    question = {"prompt": tokens, "n_predict": n_predict, "temperature": 0, "cache_prompt": False, "stream": False}
    question |= more
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        found: dict[str, Any] = json.load(reply)
    timings = found["timings"]
    assert timings["prompt_n"] == len(tokens), f"it read {timings['prompt_n']} tokens of {len(tokens)}"
    n, prompt_s, decode_s = timings["predicted_n"], timings["prompt_ms"] / 1000, timings["predicted_ms"] / 1000
    drafted = timings.get("draft_n")
    rate = timings["draft_n_accepted"] / drafted if drafted else None
    # The server's clock starts at the first token, so that token is not counted.
    return Timing((n - 1) / decode_s, n / (prompt_s + decode_s), prompt_s, found["content"].encode(), rate)


@contextmanager
def serving(program: Path, arguments: list[str]) -> Iterator[str]:
    """The address of a server that runs until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [str(program), "--host", "127.0.0.1", "--port", str(port), *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until = time.monotonic() + START_S
        while True:
            assert process.poll() is None, f"{program.name} ended with {process.returncode}"
            assert time.monotonic() < until, f"{program.name} is not up after {START_S:.0f} s"
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=2):
                    break
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def bench(program: Path, model: Path, n_threads: int) -> dict[str, float]:
    """Tokens per second of the two tests of llama-bench, after its warm-up."""
    done = subprocess.run(
        [str(program), "-m", str(model), "-p", str(READ), "-n", str(WRITTEN), "-r", "1", "-t", str(n_threads), "-o",
         "json"],
        capture_output=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return {"read" if test["n_prompt"] else "written": test["avg_ts"] for test in json.loads(done.stdout)}


def ratios(mine: list[Timing], theirs: list[Timing], what: str) -> str:
    """Median and range of ours over theirs, round by round."""
    return spread([getattr(a, what) / getattr(b, what) for a, b in zip(mine, theirs, strict=True)])


def middle(answers: list[Timing], what: str) -> float:
    return statistics.median(getattr(answer, what) for answer in answers)


def compare_servers(plain: Engine, drafting: Engine, servers: dict[str, str], talk: Conversation,
                    args: argparse.Namespace) -> None:  # fmt: skip
    rows = []
    for name in args.prompts.split(","):
        tokens = talk.tokens([Message("user", PROMPTS[name])])
        runs: dict[str, list[Timing]] = {arm: [] for arm in ("ours plain", "plain", "ours draft", "draft")}
        for round_ in range(args.rounds + 1):  # round 0 warms up
            assert isinstance(drafting.drafter, ModelDrafter)
            drafting.drafter.model.truncate(0)
            turns: list[tuple[str, Callable[[], Timing]]] = [
                ("ours plain", partial(ours, plain, tokens, args.predict)),
                ("plain", partial(served, servers["plain"], tokens, args.predict)),
                ("ours draft", partial(ours, drafting, tokens, args.predict)),
                ("draft", partial(served, servers["draft"], tokens, args.predict)),
            ]
            # The order is reversed every other time, because the machine warms up.
            found = {arm: answer() for arm, answer in turns[:: -1 if round_ % 2 else 1]}
            for arm, answer in found.items():
                print(f"{name} {round_} {arm}: first {answer.first_s:.2f} s, decode {answer.decode:.2f} t/s, "
                      f"whole {answer.whole:.2f}", file=sys.stderr)  # fmt: skip
                if round_:
                    runs[arm].append(answer)
        for arm, label in (("plain", "plain"), ("draft", f"K = {args.k}")):
            mine, theirs = runs[f"ours {arm}"], runs[arm]
            rates = " / ".join(
                "-" if each.acceptance is None else f"{each.acceptance:.2f}" for each in (mine[0], theirs[0])
            )
            rows.append(
                f"| {name}, {len(tokens)} tokens | {label} | {middle(mine, 'decode'):.1f} "
                f"| {middle(theirs, 'decode'):.1f} | {ratios(mine, theirs, 'decode')} "
                f"| {ratios(mine, theirs, 'whole')} | {ratios(mine, theirs, 'first_s')} | {rates} "
                f"| {'yes' if all(a.text == b.text for a, b in zip(mine, theirs, strict=True)) else 'no'} |"
            )
    print("| prompt | draft | ours t/s | llama-server t/s | ours / theirs, decode | whole | time to the first token "
          "| accepted / drafted, ours / theirs | same text |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    print("\n".join(rows))


def compare_bench(plain: Engine, program: Path, model: Path, args: argparse.Namespace) -> None:
    assert isinstance(plain.target, llama.LlamaModel)
    text = plain.target.vocab.tokenize("The wind over the harbour turned. " * READ, special=False)
    mine: dict[str, list[float]] = {"read": [], "written": []}
    theirs: dict[str, list[float]] = {"read": [], "written": []}

    def measured() -> dict[str, float]:
        return {
            "read": READ / ours(plain, text[:READ], 1).first_s,
            "written": ours(plain, text[:1], WRITTEN + 1, may_end=False).decode,
        }

    for round_ in range(args.rounds + 1):
        if round_ % 2:  # the second one meets a warmer machine
            found, other = measured(), bench(program, model, args.threads)
        else:
            other, found = bench(program, model, args.threads), measured()
        print(f"llama-bench {round_}: ours {found}, theirs {other}", file=sys.stderr)
        for test in found if round_ else ():
            mine[test].append(found[test])
            theirs[test].append(other[test])
    print("\n| test | ours t/s | llama-bench t/s | ours / theirs |\n|---|---|---|---|")
    for test, label in (("read", f"pp{READ}"), ("written", f"tg{WRITTEN}")):
        both = [a / b for a, b in zip(mine[test], theirs[test], strict=True)]
        speeds = [statistics.median(each[test]) for each in (mine, theirs)]
        print(f"| {label} | {speeds[0]:.1f} | {speeds[1]:.1f} | {spread(both)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--predict", type=int, default=64)
    parser.add_argument("--prompts", default="code,question")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", choices=("server", "bench"), help="one of the two comparisons")
    args = parser.parse_args()

    folder = programs()
    threads, build = str(args.threads), llama.build_info()
    with opened(args.threads) as pair:
        print(f"{pair.name}, {args.predict} tokens at most, {threads} threads, temperature 0, {args.rounds} rounds "
              f"after one of warm-up; llama-cpp-python {build.bindings}, "
              f"Python {platform.python_version()}\n")  # fmt: skip
        plain, drafting = Engine(pair.target), Engine(pair.target, ModelDrafter(pair.draft, n_max=args.k))
        if args.only != "bench":
            talk = Conversation(pair.target.vocab, pair.target.chat_template)
            program = folder / "llama-server"
            common = ["-m", str(pair.target_path), "-c", str(N_CTX), "-np", "1", "-t", threads, "-tb", threads,
                      "--cache-ram", "0"]  # fmt: skip
            with_draft = ["-md", str(pair.draft_path), "-td", threads, "-tbd", threads, "--spec-type", "draft-simple",
                          "--spec-draft-n-max", str(args.k), "--spec-draft-p-min", "0"]  # fmt: skip
            with serving(program, common) as one, serving(program, [*common, *with_draft]) as two:
                compare_servers(plain, drafting, {"plain": one, "draft": two}, talk, args)
        if args.only != "server":
            compare_bench(plain, folder / "llama-bench", pair.target_path, args)


if __name__ == "__main__":
    main()
