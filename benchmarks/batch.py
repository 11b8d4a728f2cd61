"""Many requests at once: our pool against one after the other, and against `llama-server` with as many slots.

    python benchmarks/batch.py [--requests 64] [--parallel 8] [--predict 128] [--rounds 1]
    python benchmarks/batch.py --growth 500

The default pair with its profile, greedy, prompts of all classes, answers of at most `--predict` tokens. The requests
are cut into chunks of four times `--parallel`; every arm answers a chunk before the next one begins, in changing order:

| arm | |
|---|---|
| alone | one after the other, with drafts, as `specllama run` |
| ours | at once, with drafts |
| ours plain | at once, without drafts |
| server | `llama-server -np N --cont-batching`, with a client of N threads |

Loading is not counted. `llama-batched-bench` then runs once with N sequences that read as many tokens as the mean
prompt has, and write `--predict`.

`--growth N` answers so many requests in one pool and prints the memory of the process, and what was planned.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers import programs
from servers import serving

from specllama import Engine, RandomChooser, SamplingParams
from specllama.batch.open import MAX_ROWS, open_pool
from specllama.batch.pool import Pool
from specllama.batch.request import Request
from specllama.batch.stats import Spread
from specllama.bench.machine import rss
from specllama.bench.plan import spread
from specllama.chat.conversation import Conversation, Message
from specllama.core.events import TokenEvent
from specllama.core.types import Cancel
from specllama.pairs.ask import Ask, Drafting
from specllama.pairs.setup import Listener, Models, Setup, choose, load_models, prepare
from specllama.prompts.load import built_in

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Arm:
    """What an arm did with all chunks."""

    n_tokens: int = 0
    seconds: float = 0.0
    latency_s: list[float] = field(default_factory=list)
    chunks: list[float] = field(default_factory=list)  # tokens a second of each
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by request

    def add(self, seconds: float, answers: dict[int, tuple[int, ...]], latency_s: Sequence[float]) -> None:
        n_tokens = sum(map(len, answers.values()))
        self.n_tokens += n_tokens
        self.seconds += seconds
        self.chunks.append(n_tokens / seconds)
        self.latency_s += latency_s
        self.answers |= answers


Prompts = dict[int, list[int]]


@dataclass
class Bench:
    """The loaded pair and what every arm shares."""

    models: Models
    setup: Setup
    drafting: Drafting
    n_parallel: int
    n_predict: int

    def alone(self, prompts: Prompts) -> tuple[dict[int, tuple[int, ...]], list[float]]:
        """One after the other. The latency counts from the beginning of the chunk, as for the others."""
        answers, latency_s, began_s = {}, [], time.perf_counter()
        settings = self.setup.settings(self.drafting, greedy=True)
        with closing(self.models.drafter(self.setup.strategy, settings)) as drafter:
            engine = Engine(self.models.target, drafter, rule=self.drafting.rule, cost=self.setup.cost)
            for number, tokens in prompts.items():
                events = engine.generate(tokens, GREEDY, RandomChooser(0), max_tokens=self.n_predict)
                answers[number] = tuple(event.token for event in events if isinstance(event, TokenEvent))
                latency_s.append(time.perf_counter() - began_s)
        return answers, latency_s

    def pool(self, n_ctx: int) -> AbstractContextManager[Pool]:
        return open_pool(self.models, self.setup, self.drafting, n_ctx=n_ctx, n_slots=self.n_parallel)

    def pooled(self, pool: Pool, drafts: bool, prompts: Prompts) -> tuple[dict[int, tuple[int, ...]], list[float]]:
        answers, latency_s, began_s = {}, [], time.perf_counter()
        for done in pool.run(self.requests(prompts, drafts=drafts)):
            if done.error is not None:
                raise done.error
            assert isinstance(done.id, int)
            answers[done.id] = done.tokens
            latency_s.append(time.perf_counter() - began_s)
        return answers, latency_s

    def requests(self, prompts: Prompts, *, drafts: bool) -> Iterator[Request]:
        for number, tokens in prompts.items():
            yield Request(number, tokens, GREEDY, RandomChooser(0), max_tokens=self.n_predict, drafts=drafts)

    def served(self, url: str, prompts: Prompts) -> tuple[dict[int, tuple[int, ...]], list[float]]:
        """With as many threads as the server has slots."""
        began_s = time.perf_counter()

        def ask(item: tuple[int, list[int]]) -> tuple[int, tuple[int, ...], float]:
            number, tokens = item
            question = {"prompt": tokens, "n_predict": self.n_predict, "temperature": 0, "return_tokens": True}
            request = urllib.request.Request(
                f"{url}/completion", json.dumps(question).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request) as reply:
                found = json.load(reply)
            return number, tuple(found["tokens"]), time.perf_counter() - began_s

        with ThreadPoolExecutor(self.n_parallel) as threads:
            found = list(threads.map(ask, prompts.items()))
        return {number: tokens for number, tokens, _ in found}, [seconds for *_, seconds in found]


@contextmanager
def opened(args: argparse.Namespace, n_ubatch: int = 512) -> Iterator[tuple[Bench, list[list[int]]]]:
    """The pair, and the prompts of all classes in turn. `n_ubatch`: of the models' own passes."""
    ask, listener, cancel = Ask(), Listener(), Cancel()
    setup = prepare(choose(ask, listener), listener)
    assert setup.profile is not None, "tune the default pair first: specllama tune"
    # Of the models' own KV only the arm "alone" makes use, so it is short; `specllama batch` has the longest request's.
    setup = replace(setup, target_options=replace(setup.target_options, n_ctx=2048, n_ubatch=n_ubatch))
    with load_models(setup, listener, cancel) as models:
        talk = Conversation(models.target.vocab, setup.target.template)
        prompts = [talk.tokens([Message("user", prompt.turns[0])]) for prompt in spread(built_in())]
        yield Bench(models, setup, ask.drafting, args.parallel, args.predict), prompts


def compare(args: argparse.Namespace) -> None:
    folder = programs()
    with ExitStack() as stack:
        bench, prompts = stack.enter_context(opened(args))
        chosen = {number: prompts[number % len(prompts)] for number in range(args.requests)}
        n_ctx = max(map(len, chosen.values())) + args.predict
        plan = bench.models.target.plan
        threads = [str(plan.n_threads), str(plan.n_threads_batch)]
        server = stack.enter_context(
            serving(
                folder / "llama-server",
                ["-m", str(bench.setup.target.path), "-c", str(n_ctx * args.parallel), "-np", str(args.parallel), "-cb",
                 "--cache-ram", "0", "-t", threads[0], "-tb", threads[1]],
            )
        )  # fmt: skip
        arms = {name: Arm() for name in ("alone", "ours", "ours plain", "server")}
        chunks = cut(chosen, 4 * args.parallel)
        for turn, chunk in enumerate(chunks * args.rounds):
            for name in list(arms)[:: 1 if turn % 2 == 0 else -1]:
                with bench.pool(n_ctx) if "ours" in name else nullcontext() as pool:  # a new one has no prompts
                    began_s = time.perf_counter()
                    if pool is not None:
                        answers, latency_s = bench.pooled(pool, name == "ours", chunk)
                    else:
                        answers, latency_s = bench.alone(chunk) if name == "alone" else bench.served(server, chunk)
                    arms[name].add(time.perf_counter() - began_s, answers, latency_s)
                print(f"chunk {turn} {name}: {arms[name].chunks[-1]:.1f} t/s", file=sys.stderr)
        print(f"{args.requests} requests, {args.parallel} at once, answers of at most {args.predict} tokens, "
              f"{args.rounds} rounds, {', '.join(threads)} threads\n")  # fmt: skip
        print(table(arms))
    n_prompt = round(statistics.fmean(map(len, chosen.values())))
    print(batched(folder / "llama-batched-bench", bench.setup.target.path, n_prompt, args, threads))


def cut(prompts: Prompts, n: int) -> list[Prompts]:
    """The prompts in chunks of `n`."""
    numbers = list(prompts)
    return [{number: prompts[number] for number in numbers[at : at + n]} for at in range(0, len(numbers), n)]


def table(arms: dict[str, Arm]) -> str:
    lines = [
        "| arm | answers/min | t/s | of alone | of server, by chunk | latency: 50 / 95 / 99 % | text as alone |",
        "|---|---|---|---|---|---|---|",
    ]
    alone, server = arms["alone"], arms["server"]
    for name, arm in arms.items():
        found = Spread.of(arm.latency_s)
        assert found is not None
        ratios = sorted(a / b for a, b in zip(arm.chunks, server.chunks, strict=True))
        same = sum(arm.answers[number] == tokens for number, tokens in alone.answers.items())
        lines.append(
            f"| {name} | {60 * len(arm.latency_s) / arm.seconds:.1f} | {arm.n_tokens / arm.seconds:.1f} "
            f"| {arm.n_tokens / arm.seconds / (alone.n_tokens / alone.seconds):.2f} "
            f"| {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) "
            f"| {found.p50:.1f} / {found.p95:.1f} / {found.p99:.1f} s | {same}/{len(alone.answers)} |"
        )
    return "\n".join(lines)


def batched(program: Path, model: Path, n_prompt: int, args: argparse.Namespace, threads: Sequence[str]) -> str:
    """What llama-batched-bench reports for so many sequences of one length; it reads no prompts of ours."""
    n_ctx = (n_prompt + args.predict) * args.parallel
    done = subprocess.run(
        [str(program), "-m", str(model), "-c", str(n_ctx), "-npp", str(n_prompt), "-ntg", str(args.predict),
         "-npl", str(args.parallel), "-t", threads[0], "-tb", threads[1], "--output-format", "jsonl"],
        capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    written = args.parallel * args.predict / found["t"]
    return (f"llama-batched-bench, {n_prompt} tokens read and {args.predict} written by each of {args.parallel}: "
            f"{found['speed_tg']:.1f} t/s while writing, {written:.1f} t/s written in the whole time")  # fmt: skip


def growth(args: argparse.Namespace) -> None:
    """The memory over many requests in one pool: the longest prompts first, then short ones."""
    empty = rss()
    with opened(args, n_ubatch=MAX_ROWS) as (bench, prompts):  # as in `specllama batch`
        ordered = sorted(prompts, key=len)
        short, long = ordered[: 2 * args.parallel], ordered[-args.parallel :]
        n_ctx = max(map(len, long)) + args.predict
        asked = dict(enumerate(long + [short[number % len(short)] for number in range(args.growth - len(long))]))
        loaded = [model for model in (bench.models.target, bench.models.loaded_draft) if model is not None]
        with bench.pool(n_ctx) as pool:
            kv, compute = pool.stats.kv_bytes, pool.stats.compute_bytes
            planned = sum(model.plan.need.total for model in loaded) + kv + compute
            print(f"planned: {planned / 1e6:.1f} MB with the models; of the pool {kv / 1e6:.1f} of KV and "
                  f"{compute / 1e6:.1f} beside it")  # fmt: skip
            for number, done in enumerate(pool.run(bench.requests(asked, drafts=True)), 1):
                if done.error is not None:
                    raise done.error
                if number % max(args.growth // 10, 1) == 0:
                    print(f"{number} requests: {(rss() - empty) / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--predict", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--growth", type=int, help="answer so many requests and print the memory")
    args = parser.parse_args()
    growth(args) if args.growth else compare(args)


if __name__ == "__main__":
    main()
