"""Trees against those of llama.cpp's `examples/speculative`: same pair, prompts, threads and build flags, in turn.

    python benchmarks/tree_peer.py [--rounds 2] [--nodes 8] [--predict 64]

Theirs: `llama-speculative`, up to four sequences (-np 4) of so many drafted tokens, with the default split at 0.1.
Ours: a fixed tree of so many nodes. "Tokens a pass" is emitted tokens over passes of the target; theirs from its
counters n_predict and n_accept. Above temperature 0 their answers do not follow the target's law (benchmarks/bias.py).
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers import programs
from prompts import PROMPTS

from specllama import Engine, RandomChooser, SamplingParams, llama
from specllama.chat.conversation import Conversation, Message
from specllama.core.events import Finished
from specllama.drafters import REGISTRY, DraftSettings
from specllama.drafters.length import DraftLength
from specllama.files import hub
from specllama.files.catalog import load_catalog
from specllama.llama import crash_test

N_CTX, N_LINES = 4096, 4
COUNTERS = re.compile(rb"(n_drafted|n_accept|n_predict) += +(\d+)")
DECODED = re.compile(rb"decoded +(\d+) tokens in +([\d.]+) seconds")


def theirs(
    program: Path, target: Path, draft: Path, k: int, n: int, prompt: str, temperature: float
) -> dict[str, float] | None:
    """Emitted and drafted tokens a pass, and tokens per second of one answer; None if the program ends by a signal."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(prompt)
        file.flush()
        done = subprocess.run(
            [str(program), "-m", str(target), "-md", str(draft), "-f", file.name, "-n", str(n), "-c", str(N_CTX),
             "-t", "2", "-tb", "2", "-td", "2", "-tbd", "2", "-np", str(N_LINES), "--spec-draft-n-max", str(k),
             "-s", "1", "--temp", str(temperature), "--top-k", "0", "--top-p", "1", "--min-p", "0",
             "--log-colors", "off"],
            capture_output=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    if done.returncode < 0:
        return None
    done.check_returncode()
    text = done.stdout + done.stderr
    counts = {name: int(value) for name, value in COUNTERS.findall(text)}
    n_passes = counts[b"n_predict"] - counts[b"n_accept"]
    (n_decoded, decode_s) = DECODED.findall(text)[0]
    return {
        "tokens a pass": counts[b"n_predict"] / n_passes,
        "drafted a pass": counts[b"n_drafted"] / n_passes,
        "t/s": int(n_decoded) / float(decode_s),
    }


def ours(engine: Engine, tokens: list[int], n: int, temperature: float) -> dict[str, float]:
    """The same of our loop, from empty KV caches."""
    engine.target.truncate(0)
    params = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
    *_, last = engine.generate(tokens, params, RandomChooser(1), max_tokens=n)
    assert isinstance(last, Finished), "the last event"
    stats = last.stats
    return {
        "tokens a pass": stats.n_emitted / stats.n_steps,
        "drafted a pass": stats.n_drafted / stats.n_steps,
        "t/s": stats.decode_tok_s or 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--predict", type=int, default=64)
    args = parser.parse_args()
    program = programs() / "llama-speculative"
    pair = load_catalog().pair()
    paths = hub.fetch(pair.target).path, hub.fetch(pair.draft).path
    extra = crash_test.installed().use_extra_bufts
    options = llama.LoadOptions(n_ctx=N_CTX, n_threads=2, n_threads_batch=2, use_extra_bufts=extra, max_leaves=16)
    found: dict[tuple[float, str], list[dict[str, float] | None]] = {}
    with llama.load(paths[0], options) as target, llama.load(paths[1], options) as draft:
        settings = DraftSettings(length=DraftLength(args.nodes), n_leaves=target.caps.max_leaves)
        engines = {
            f"ours, tree of {args.nodes}": Engine(target, REGISTRY["tree"].make(draft, settings)),
            f"ours, chain of {args.nodes}": Engine(target, REGISTRY["draft-simple"].make(draft, settings)),
        }
        talk = Conversation(target.vocab, target.chat_template)
        for turn in range(args.rounds):
            for name, text in PROMPTS.items():
                message = [Message("user", text)]
                for temperature in (0.0, 1.0):
                    arms = {arm: partial(ours, engine, talk.tokens(message), args.predict, temperature)
                            for arm, engine in engines.items()}  # fmt: skip
                    arms["llama.cpp, 4 sequences"] = partial(
                        theirs, program, *paths, args.nodes, args.predict, talk.text(message), temperature
                    )
                    order = list(arms) if turn % 2 == 0 else list(arms)[::-1]
                    for arm in order:
                        found.setdefault((temperature, arm), []).append(arms[arm]())
                        print(f"{name} {temperature:g} {arm}: {found[temperature, arm][-1]}", file=sys.stderr)
                        draft.truncate(0)
    print("| temperature | | tokens a pass | drafted a pass | t/s, median |\n|---|---|---|---|---|")
    for (temperature, arm), runs in sorted(found.items()):
        good = [run for run in runs if run is not None]
        if not good:
            print(f"| {temperature:g} | {arm} | ended by a signal, {len(runs)} of {len(runs)} | | |")
            continue
        means = [statistics.fmean(run[key] for run in good) for key in ("tokens a pass", "drafted a pass")]
        speed = statistics.median(run["t/s"] for run in good)
        ended = f" (ended by a signal: {len(runs) - len(good)} of {len(runs)})" if len(good) < len(runs) else ""
        print(f"| {temperature:g} | {arm}{ended} | {means[0]:.2f} | {means[1]:.1f} | {speed:.1f} |")


if __name__ == "__main__":
    main()
