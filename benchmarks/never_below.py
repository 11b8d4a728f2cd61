"""Is the default ever slower than plain decoding, from the first answer on?

    python benchmarks/never_below.py --output FILE.jsonl [--prompts 8] [--kinds default,hopeless,itself,alone]
    python benchmarks/never_below.py --report FILE.jsonl

Every kind of pair begins without a profile: its first answer measures it, as in `specllama run`, and that time counts.
What `run` measures behind its first answer does not count: nothing waits.
Each prompt is answered plainly and with the default settings, in turn, from empty KV caches, with the same number of
tokens; end tokens are forbidden. Plain decoding uses its fastest kernel path, if `specllama tune` found one. A ratio is
the time of plain decoding over that of the default: of decoding, and of the whole answer with prompt and measuring.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bars_arms import RULE, SAMPLER, plain_options, published_draft
from replay import two_layers
from rows import append, mend, rows_of

from specllama import Engine, Finished, RandomChooser, llama
from specllama.bench.plan import spread
from specllama.chat.conversation import Conversation, Message
from specllama.core.no_drafter import NoDrafter
from specllama.core.types import Cancel, Drafter
from specllama.llama import LlamaModel
from specllama.pairs.ask import Ask, Drafting, Names
from specllama.pairs.learning import Lesson
from specllama.pairs.setup import Listener, Models, Setup, choose, load_models, prepare
from specllama.prompts.load import BenchPrompt, built_in
from specllama.tuning.first_use import FirstUse

SMALL = "SmolLM2-135M-Instruct.Q4_1"
KINDS = ("default", "hopeless", "itself", "alone")
BAR, WORST, WORST_FROM = 0.98, 0.90, 64


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt at one temperature, answered twice. Times in seconds."""

    kind: str
    prompt: str
    temperature: float
    first: bool  # the first answer of this pair, which measured it
    n_tokens: int
    plain_decode_s: float
    plain_whole_s: float
    decode_s: float
    whole_s: float
    measure_s: float  # part of `whole_s`
    n_drafted: int
    n_accepted: int

    @property
    def decode(self) -> float:
        return self.plain_decode_s / self.decode_s

    @property
    def whole(self) -> float:
        return self.plain_whole_s / self.whole_s


@contextmanager
def named(kind: str) -> Iterator[Names]:
    """The models of a kind."""
    published = published_draft()
    assert published.draft is not None
    target = str(published.target.path)
    if kind == "hopeless":  # the published draft with its first and last layer only
        with two_layers(published.draft.path) as path:
            yield Names(target=target, draft=str(path))
    else:
        yield {"default": Names(), "itself": Names(target=SMALL, draft=SMALL), "alone": Names(target=target)}[kind]


class Kind:
    """The loaded models of a kind, and what they learned."""

    def __init__(self, setup: Setup, models: Models, plain: LlamaModel) -> None:
        self.setup, self.models, self.plain = setup, models, plain
        self.talk = Conversation(models.target.vocab, setup.target.template)

    def answer(self, target: LlamaModel, drafter: Drafter, tokens: Sequence[int], temperature: float, n: int,
               seed: int, lesson: Lesson | None = None) -> tuple[float, Finished]:  # fmt: skip
        """(seconds, last event) of an answer from empty KV caches."""
        for model in (target, self.models.draft):
            if model is not None:
                model.truncate(0)
        params = replace(SAMPLER, temperature=temperature, logit_bias=dict.fromkeys(target.end_tokens, -math.inf))
        began, event = time.perf_counter(), None
        for event in Engine(target, drafter, rule=RULE).generate(tokens, params, RandomChooser(seed), max_tokens=n):
            if lesson is not None:
                lesson.take(event)
        assert isinstance(event, Finished)
        return time.perf_counter() - began, event

    def plainly(self, tokens: Sequence[int], temperature: float, n: int, seed: int) -> tuple[float, Finished]:
        return self.answer(self.plain, NoDrafter(), tokens, temperature, n, seed)

    def measure(self, *, hurried: bool) -> float:
        """Seconds of measuring the pair, or what is left of it, if it is due."""
        began = time.perf_counter()
        self.setup = FirstUse(self.setup, self.models, hurried=hurried).finish()
        took = time.perf_counter() - began
        say(f"measured in {took:.2f} s: {self.setup.profile and self.setup.profile.costs}")
        return took

    def by_default(self, tokens: Sequence[int], temperature: float, n: int, seed: int) -> tuple[float, Finished]:
        settings = self.setup.settings(Drafting(), greedy=temperature == 0.0)
        drafter = self.models.drafter(self.setup.strategy, settings)
        lesson = Lesson(self.setup, settings.policy, greedy=temperature == 0.0)
        took, event = self.answer(self.models.target, drafter, tokens, temperature, n, seed, lesson)
        self.setup = lesson.learned()
        drafter.close()
        return took, event


@contextmanager
def opened(names: Names) -> Iterator[Kind]:
    """The models, as a newcomer has them: without a profile."""
    ask = Ask(names=names)
    tuned = prepare(choose(ask, Listener()), Listener())
    with tempfile.TemporaryDirectory() as state, ExitStack() as owned:
        owned.enter_context(patch.dict(os.environ, XDG_STATE_HOME=state))
        setup = prepare(choose(ask, Listener()), Listener())
        models = owned.enter_context(load_models(setup, Listener(), Cancel()))
        alone = replace(plain_options(tuned, "best"), max_block=setup.target_options.max_block)
        plain = models.target
        if alone != setup.target_options:
            plain = owned.enter_context(llama.load(setup.target.path, alone))
        yield Kind(setup, models, plain)


def run(kind: str, prompts: Sequence[BenchPrompt], args: argparse.Namespace) -> None:
    with named(kind) as names, opened(names) as here:
        warm = here.talk.tokens([Message("user", "Hello.")])
        here.plainly(warm, 0.0, 4, 0)  # the first pass reads the file from the disk
        first = True
        for number, prompt in enumerate(prompts):
            tokens = here.talk.tokens([Message("user", prompt.turns[0])])
            for at, temperature in enumerate(map(float, args.temperatures.split(","))):
                seed, measure_s = 1 + number, 0.0
                plain_first = (number + at) % 2 == 0
                if plain_first:
                    plain = here.plainly(tokens, temperature, args.predict, seed)
                if first:
                    measure_s = here.measure(hurried=True)
                ours = here.by_default(tokens, temperature, args.predict, seed)
                if first:
                    here.measure(hurried=False)
                if not plain_first:
                    plain = here.plainly(tokens, temperature, args.predict, seed)
                (took_s, event), (plain_s, other) = ours, plain
                stats = event.stats
                row = Row(kind, prompt.id, temperature, first, stats.n_emitted, other.stats.decode_s, plain_s,
                          stats.decode_s, took_s + measure_s, measure_s, stats.n_drafted,
                          stats.n_accepted)  # fmt: skip
                append(args.output, "run", asdict(row))
                say(f"{kind}, {prompt.id} at {temperature:g}: decode {row.decode:.2f}, whole {row.whole:.2f}, "
                    f"{row.n_accepted} of {row.n_drafted} accepted{', measured' if first else ''}")  # fmt: skip
                first = False


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(fmean(map(math.log, ratios)))


def report(path: Path) -> None:
    """Print a table with the bars, one row for each class of prompts."""
    rows = [Row(**row["run"]) for row in rows_of(path) if row["kind"] == "run"]
    classes = {prompt.id: prompt.category for prompt in built_in()}
    heads = ("pair", "class", "temperature", "answers", "decode", "median", "worst", "whole", "worst")
    print(f"| {' | '.join(heads)} | first answer, whole | bars |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    groups = defaultdict[tuple[str, str, float], list[Row]](list)
    for row in rows:
        groups[row.kind, classes[row.prompt], row.temperature].append(row)
    for (kind, class_, temperature), seen in groups.items():
        long = [row for row in seen if row.n_tokens >= WORST_FROM]
        decode, whole = [row.decode for row in seen], [row.whole for row in seen]
        worst = min((min(row.decode, row.whole) for row in long), default=1.0)
        holds = "yes" if min(_mean(decode), _mean(whole)) >= BAR and worst >= WORST else "no"
        first = ", ".join(f"{row.whole:.2f} ({row.measure_s:.2f} s)" for row in seen if row.first) or "-"
        print(f"| {kind} | {class_} | {temperature:g} | {len(seen)} | {_mean(decode):.3f} | {median(decode):.2f} "
              f"| {min(decode):.2f} | {_mean(whole):.3f} | {min(whole):.2f} | {first} | {holds} |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the file that every pair of answers is appended to")
    parser.add_argument("--report", type=Path, help="only print the table of a file")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--predict", type=int, default=64)
    args = parser.parse_args()
    if (args.output is None) == (args.report is None):
        parser.error("--output FILE or --report FILE")
    if args.output is not None:
        llama.set_log(None)
        mend(args.output)
        for kind in args.kinds.split(","):
            run(kind, spread(built_in())[: args.prompts], args)
    report(args.output or args.report)


if __name__ == "__main__":
    main()
