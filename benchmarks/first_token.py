"""Time to the first token: ours with a draft loaded, against llama.cpp's `llama-completion` without a draft.

    python benchmarks/first_token.py [--rounds 7]

Same target, prompts, threads and build flags, interleaved in one run. Theirs is the program's prompt eval time; ours is
`SpecStats.prompt_s`, from the first prompt token to the first token of the answer.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from loop import opened, ours, printed, spread
from peers import programs
from prompts import PROMPTS

from specllama import Engine
from specllama.chat.conversation import Conversation, Message
from specllama.drafters.model import ModelDrafter

PROMPT_TIME = re.compile(rb"prompt eval time = +([\d.]+) ms / +(\d+) tokens")


def theirs(program: Path, model: Path, prompt: str, n_threads: int) -> tuple[float, int]:
    """Seconds of llama-completion's prompt pass, and the tokens it read."""
    ms, n_tokens = PROMPT_TIME.findall(printed(program, model, prompt, 2, n_threads, "-no-cnv", "--perf"))[-1]
    return float(ms) / 1000, int(n_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    program = programs() / "llama-completion"
    print("| prompt | tokens | ours, ms | llama.cpp, ms | ours / llama.cpp |\n|---|---|---|---|---|")
    every: list[float] = []
    with opened(args.threads) as pair:
        engine = Engine(pair.target, ModelDrafter(pair.draft, n_max=4))
        talk = Conversation(pair.target.vocab, pair.target.chat_template)
        for name, text in PROMPTS.items():
            message = [Message("user", text)]
            prompt, tokens = talk.text(message), talk.tokens(message)
            mine, other = [], []
            for round_ in range(args.rounds + 1):  # round 0 warms up
                pair.draft.truncate(0)
                a = ours(engine, tokens, 8).first_s
                b, n_read = theirs(program, pair.target_path, prompt, args.threads)
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
