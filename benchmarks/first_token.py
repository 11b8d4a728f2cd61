"""Time to the first token: ours with a draft loaded, against llama.cpp's `llama-completion` without one.

    python benchmarks/first_token.py [--rounds 7]

Same target, prompts, threads and build flags, interleaved in one run. Theirs is what the program reports as prompt eval
time plus its sampling; ours is `SpecStats.prompt_s`, from the first prompt token to the first token of the answer.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from loop import N_CTX, ours, spread
from peers import programs
from prompts import PROMPTS

from specllama import Engine, llama
from specllama.chat.conversation import Conversation, Message
from specllama.drafters.model import ModelDrafter
from specllama.files import hub
from specllama.files.catalog import load_catalog
from specllama.llama import crash_test as probe

PROMPT_TIME = re.compile(rb"prompt eval time = +([\d.]+) ms / +(\d+) tokens")


def theirs(program: Path, model: Path, prompt: str, n_threads: int) -> tuple[float, int]:
    """Seconds of llama-completion's prompt pass, and the tokens it read."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(prompt)
        file.flush()
        threads = str(n_threads)
        done = subprocess.run(
            [str(program), "-m", str(model), "-bf", file.name, "-n", "2", "--temp", "0", "-c", str(N_CTX), "-no-cnv",
             "-t", threads, "-tb", threads, "--log-colors", "off", "--perf"],
            capture_output=True,
            check=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    ms, n_tokens = PROMPT_TIME.findall(done.stdout + done.stderr)[-1]
    return float(ms) / 1000, int(n_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    program = programs() / "llama-completion"
    pair = load_catalog().pair()
    target_path, draft_path = hub.fetch(pair.target).path, hub.fetch(pair.draft).path
    options = llama.LoadOptions(
        n_ctx=N_CTX, n_threads=args.threads, n_threads_batch=args.threads,
        use_extra_bufts=probe.installed().use_extra_bufts,
    )  # fmt: skip
    print("| prompt | tokens | ours, ms | llama.cpp, ms | ours / llama.cpp |\n|---|---|---|---|---|")
    every: list[float] = []
    with llama.load(target_path, options) as target, llama.load(draft_path, options) as draft:
        engine = Engine(target, ModelDrafter(draft, n_max=4))
        talk = Conversation(target.vocab, target.chat_template)
        for name, text in PROMPTS.items():
            message = [Message("user", text)]
            prompt, tokens = talk.text(message), talk.tokens(message)
            mine, other = [], []
            for round_ in range(args.rounds + 1):  # round 0 warms up
                draft.truncate(0)
                a = ours(engine, tokens, 8).first_s
                b, n_read = theirs(program, target_path, prompt, args.threads)
                assert n_read == len(tokens), f"they read {n_read} tokens, we {len(tokens)}"
                if round_:
                    mine.append(a)
                    other.append(b)
            ratios = [a / b for a, b in zip(mine, other, strict=True)]
            every += ratios
            print(
                f"| {name} | {len(tokens)} | {1000 * statistics.median(mine):.0f} "
                f"| {1000 * statistics.median(other):.0f} | {spread(ratios)} |"
            )
    print(f"| **all** | | | | **{spread(every)}** |")


if __name__ == "__main__":
    main()
