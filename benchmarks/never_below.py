"""Is the default ever slower than plain decoding, from the first answer on?

    python benchmarks/never_below.py --output FILE.jsonl [--minutes 40] [--kinds itself,default,hopeless,alone]
    python benchmarks/never_below.py --output FILE.jsonl --repeat     # and then runs the answers below 0.90 twice more
    python benchmarks/never_below.py --report FILE.jsonl

Every kind of pair begins without a profile: its first answer measures it, as in `specllama run`, and that time counts.
What `run` measures behind an answer does not count: nothing waits. The profiles stay in FILE.state, so a command that
was stopped continues, with what is missing and what was learned.

For each prompt and temperature the target answers plainly, and each kind with this target with the default settings,
one after the other in an order that turns, from empty KV caches and with the same number of tokens; end tokens are
forbidden. Kinds share the loaded target with plain decoding, which uses its fastest kernel path, if `specllama tune`
found one. A ratio is the time of plain decoding over that of the default in the same turn: of decoding, and of the
whole answer with prompt and measuring. Prompts come class by class in turn, so a part of the answers has all classes.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import TypeAlias
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bars_arms import RULE, SAMPLER, plain_options, published_draft
from replay import two_layers
from rows import append, difference, mend, rows_of

from specllama import Engine, Finished, RandomChooser, llama
from specllama.base.cpu import this_cpu
from specllama.bench.plan import in_turn, spread
from specllama.chat.conversation import Conversation, Message
from specllama.core.no_drafter import NoDrafter
from specllama.core.stats import SpecStats
from specllama.core.types import Drafter
from specllama.llama import LlamaModel, LoadOptions, tested_kernels
from specllama.pairs.ask import Ask, Drafting, Names
from specllama.pairs.draft_in_target_ids import in_target_ids
from specllama.pairs.learning import Lesson
from specllama.pairs.setup import Listener, Models, Setup, choose, prepare
from specllama.prompts.load import BenchPrompt, built_in
from specllama.tuning.first_use import FirstUse

SMALL = "SmolLM2-135M-Instruct.Q4_1"
KINDS = ("itself", "default", "hopeless", "alone")
BAR, WORST, WORST_FROM, N_TRIES = 0.98, 0.90, 64, 3

Key: TypeAlias = tuple[str, str, float]  # (kind, prompt, temperature)


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt at one temperature, answered plainly and by a kind in the same turn. Times in seconds."""

    kind: str
    prompt: str
    temperature: float
    n_tokens: int
    plain_decode_s: float
    plain_whole_s: float
    decode_s: float
    whole_s: float
    measure_s: float  # part of `whole_s`; 0 = this answer did not measure the pair
    n_drafted: int
    n_accepted: int

    @property
    def key(self) -> Key:
        return self.kind, self.prompt, self.temperature

    @property
    def decode(self) -> float:
        return self.plain_decode_s / self.decode_s

    @property
    def whole(self) -> float:
        return self.plain_whole_s / self.whole_s


def asked(kind: str, folder: Path) -> Ask:
    """The models of a kind; `folder` keeps a draft that is made for it."""
    published = published_draft()
    assert published.draft is not None
    target, draft = str(published.target.path), folder / "two-layers.gguf"
    if kind == "hopeless" and not draft.exists():  # the published draft with its first and last layer only
        two_layers(published.draft.path, draft)
    return Ask(names={"default": Names(), "hopeless": Names(target=target, draft=str(draft)),
                      "itself": Names(target=SMALL, draft=SMALL), "alone": Names(target=target)}[kind])  # fmt: skip


@dataclass(frozen=True, slots=True)
class Task:
    """What is answered, and how."""

    tokens: Sequence[int]
    temperature: float
    n_tokens: int
    seed: int

    def answered(
        self, target: LlamaModel, models: Models | None, drafter: Drafter, lesson: Lesson | None = None
    ) -> tuple[float, SpecStats]:
        """(seconds, figures) of an answer from empty KV caches."""
        emptied(target, models)
        ends = dict.fromkeys(target.end_tokens, -math.inf)
        params = replace(SAMPLER, temperature=self.temperature, logit_bias=ends)
        engine, chooser = Engine(target, drafter, rule=RULE), RandomChooser(self.seed)
        began, event = time.perf_counter(), None
        for event in engine.generate(self.tokens, params, chooser, max_tokens=self.n_tokens):
            if lesson is not None:
                lesson.take(event)
        assert isinstance(event, Finished)
        return time.perf_counter() - began, event.stats


def emptied(target: LlamaModel, models: Models | None) -> None:
    target.truncate(0)
    if models is not None and models.draft is not None:
        models.draft.truncate(0)


@dataclass(slots=True)
class Kind:
    """The loaded models of a kind, and what they learned."""

    name: str
    setup: Setup
    models: Models

    def answered(self, task: Task) -> tuple[float, float, SpecStats]:
        """(seconds, those of measuring, figures) of an answer with the default settings, as `specllama run` gives it.

        Measures the pair before, if it is due, and again what is left of it behind the answer.
        """
        measure_s, greedy = 0.0, task.temperature == 0.0
        if self.setup.measures:
            emptied(self.models.target, self.models)
            began = time.perf_counter()
            self.setup = FirstUse(self.setup, self.models, hurried=True).finish()
            measure_s = time.perf_counter() - began
        settings = self.setup.settings(Drafting(), greedy=greedy)
        drafter = self.models.drafter(self.setup.strategy, settings)
        lesson = Lesson(self.setup, settings.policy, greedy=greedy)
        took_s, stats = task.answered(self.models.target, self.models, drafter, lesson)
        drafter.close()
        self.setup = setup = lesson.learned()
        if setup.draft is not None and setup.profile is not None:
            due = setup.profile.is_partial or setup.profile.is_due
            self.setup = FirstUse(replace(setup, completes=due), self.models).finish()
        return took_s + measure_s, measure_s, stats


@dataclass(frozen=True, slots=True)
class Group:
    """The kinds with one target."""

    plain: LlamaModel
    talk: Conversation
    kinds: Sequence[Kind]

    def turn(self, due: Sequence[Kind], prompt: BenchPrompt, task: Task, at: int) -> list[Row]:
        """The plain answer and those of the kinds that are due, in an order by `at`."""
        answers: dict[str, tuple[float, float, SpecStats]] = {}
        for kind in in_turn([None, *due], at):
            if kind is None:
                plain_s, plain = task.answered(self.plain, None, NoDrafter())
            else:
                answers[kind.name] = kind.answered(task)
        return [
            Row(name, prompt.id, task.temperature, stats.n_emitted, plain.decode_s, plain_s, stats.decode_s, took_s,
                measure_s, stats.n_drafted, stats.n_accepted)
            for name, (took_s, measure_s, stats) in answers.items()
        ]  # fmt: skip


def prepared(ask: Ask) -> Setup:
    return prepare(choose(ask, Listener()), Listener())


@contextmanager
def opened(asks: Mapping[str, Ask], tuned: Setup) -> Iterator[Group]:
    """The models of kinds with one target, loaded; the target once for all that load it in the same way.

    `tuned`: a setup by whose profile plain decoding takes its kernel path.
    """
    setups = {kind: prepared(ask) for kind, ask in asks.items()}
    targets: dict[LoadOptions, LlamaModel] = {}
    with ExitStack() as owned:

        def loaded(options: LoadOptions) -> LlamaModel:
            if options not in targets:
                targets[options] = owned.enter_context(llama.load(tuned.target.header, options))
            return targets[options]

        def of(setup: Setup) -> Models:
            target, draft, adapted = loaded(setup.target_options), None, None
            if setup.draft is not None:
                draft = owned.enter_context(llama.load(setup.draft.header, setup.draft_options(target.n_ctx)))
                adapted = in_target_ids(target, draft, strategy=setup.model_strategy)
                owned.callback(adapted.close)
            return Models(target, adapted, draft)

        kinds = [Kind(name, setup, of(setup)) for name, setup in setups.items()]
        plain = loaded(plain_options(replace(kinds[0].setup, profile=tuned.profile), "best"))
        yield Group(plain, Conversation(plain.vocab, tuned.target.template), kinds)


def run(
    asks: Mapping[str, Ask],
    state: Path,
    prompts: Sequence[BenchPrompt],
    temperatures: Sequence[float],
    wanted: Collection[Key],
    n_tokens: int,
    shift: int = 0,
) -> Generator[list[Row], None, None]:
    """The wanted answers, turn by turn. `state`: the folder of the profiles. `shift`: of the orders."""
    setups = {kind: prepared(ask) for kind, ask in asks.items() if any(key[0] == kind for key in wanted)}
    for path in dict.fromkeys(setup.target.path for setup in setups.values()):
        names = [kind for kind, setup in setups.items() if setup.target.path == path]
        tuned = next((setups[kind] for kind in names if setups[kind].profile is not None), setups[names[0]])
        with (
            patch.dict(os.environ, XDG_STATE_HOME=str(state)),
            opened({kind: asks[kind] for kind in names}, tuned) as group,
        ):
            warm = group.talk.tokens([Message("user", "Hello.")])
            Task(warm, 0.0, 4, 0).answered(group.plain, None, NoDrafter())  # the first pass reads the file
            for at, ((n, prompt), temperature) in enumerate(product(enumerate(prompts), temperatures)):
                due = [kind for kind in group.kinds if (kind.name, prompt.id, temperature) in wanted]
                if due:
                    tokens = group.talk.tokens([Message("user", prompt.turns[0])])
                    yield group.turn(due, prompt, Task(tokens, temperature, n_tokens, 1 + n), at + shift)


def tries(rows: Iterable[Row]) -> dict[Key, list[Row]]:
    """The answers of a file, and those that were repeated."""
    found = defaultdict[Key, list[Row]](list)
    for row in rows:
        found[row.key].append(row)
    return dict(found)


def is_low(row: Row) -> bool:
    return row.n_tokens >= WORST_FROM and min(row.decode, row.whole) < WORST


def still_low(seen: Sequence[Row]) -> bool:
    """True if the first try is low and the median of three, if there are three, is as well."""
    if not is_low(seen[0]):
        return False
    return len(seen) < N_TRIES or min(median(row.decode for row in seen), median(row.whole for row in seen)) < WORST


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def read(path: Path) -> tuple[Mapping[str, object] | None, list[Row]]:
    """(settings, answers) of a file."""
    settings, rows = None, []
    for row in rows_of(path):
        if row["kind"] == "settings":
            settings = row["settings"]
        elif row["kind"] == "run":
            rows.append(Row(**row["run"]))
    return settings, rows


def _mean(ratios: Sequence[float]) -> str:
    return f"{_geometric(ratios):.3f} ({min(ratios):.2f}-{max(ratios):.2f})"


def _geometric(ratios: Sequence[float]) -> float:
    return math.exp(fmean(map(math.log, ratios)))


def table(rows: Iterable[Row]) -> list[str]:
    """The bars of each kind and temperature, of all classes together and of each, and the low answers by name."""
    found = tries(rows)
    classes = {prompt.id: prompt.category for prompt in built_in()}
    groups = defaultdict[tuple[str, float], dict[str, list[list[Row]]]](lambda: defaultdict(list))
    for seen in found.values():
        groups[seen[0].kind, seen[0].temperature][classes[seen[0].prompt]].append(seen)
    heads = ("pair", "temperature", "class", "answers", "decode", "whole answer", "below 0.90 at first",
             "still, median of three", "whole answer that measured", "bars")  # fmt: skip
    head = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    whole, parts = [*head], ["", *head]
    for (kind, temperature), of_class in groups.items():
        held = {name: _holds(tried) for name, tried in of_class.items()}
        every = [seen for tried in of_class.values() for seen in tried]
        whole.append(_line(kind, temperature, "all", every, f"{sum(held.values())} of {len(held)} classes"))
        parts += [_line(kind, temperature, each, of_class[each], "yes" if held[each] else "no") for each in of_class]
    low = [seen for seen in found.values() if is_low(seen[0])]
    n_left = sum(len(seen) < N_TRIES for seen in low)
    lines = [
        *whole,
        *parts,
        "",
        f"Means are those of first tries. {len(low)} of {len(found)} answers were below {WORST:g} at first, in decode "
        f"or whole; {len(low) - n_left} ran twice more and count in the last bar by their medians of three, "
        f"{n_left} did not (--repeat).",
    ]
    if low:
        lines += ["", "| pair | temperature | prompt | decode | whole answer |", "|---|---|---|---|---|"]
    for seen in low:
        decode, whole = (
            ", ".join(f"{each:.2f}" for each in ratios)
            for ratios in zip(*((row.decode, row.whole) for row in seen), strict=True)
        )
        lines.append(f"| {seen[0].kind} | {seen[0].temperature:g} | {seen[0].prompt} | {decode} | {whole} |")
    return lines


def _line(kind: str, temperature: float, name: str, tried: Sequence[Sequence[Row]], bars: str) -> str:
    first = [seen[0] for seen in tried]
    measured = ", ".join(f"{row.whole:.2f} ({row.measure_s:.2f} s)" for row in first if row.measure_s) or "-"
    return (
        f"| {kind} | {temperature:g} | {name} | {len(first)} | {_mean([row.decode for row in first])} "
        f"| {_mean([row.whole for row in first])} | {sum(map(is_low, first))} | {sum(map(still_low, tried))} "
        f"| {measured} | {bars} |"
    )


def _holds(tried: Sequence[Sequence[Row]]) -> bool:
    """True if a class reaches all bars."""
    first = [seen[0] for seen in tried]
    means = (_geometric([row.decode for row in first]), _geometric([row.whole for row in first]))
    return min(means) >= BAR and not any(map(still_low, tried))


def settings(n_tokens: int) -> dict[str, object]:
    """What all answers of a file share."""
    kernels = tested_kernels.usable()
    return {
        "predict": n_tokens,
        "cpu": this_cpu().model,
        "bindings": llama.build_info().bindings,
        "kernels": None if kernels is None else kernels.parent.name,
    }


def measure(args: argparse.Namespace) -> None:
    """Answer what the file lacks, then repeat what was low, if asked."""
    path: Path = args.output
    then, rows = read(path)
    mend(path)
    if then is None:
        append(path, "settings", settings(args.predict))
    elif other := difference(then, settings(args.predict)):
        raise SystemExit(f"{path} has other settings: {other}")
    state = path.with_suffix(".state").resolve()
    state.mkdir(parents=True, exist_ok=True)
    prompts, temperatures = spread(built_in())[: args.prompts], [float(each) for each in args.temperatures.split(",")]
    asks = {kind: asked(kind, state) for kind in args.kinds.split(",")}
    until = time.monotonic() + 60 * args.minutes

    def answer(wanted: Collection[Key], state: Path, shift: int = 0) -> None:
        n_left = len(wanted)
        with closing(run(asks, state, prompts, temperatures, wanted, args.predict, shift)) as turns:
            while time.monotonic() < until and (turn := next(turns, [])):
                for row in turn:
                    n_left -= 1
                    append(path, "run", asdict(row))
                    measured = f", measured in {row.measure_s:.2f} s" if row.measure_s else ""
                    say(
                        f"{row.kind}, {row.prompt} at {row.temperature:g}: decode {row.decode:.2f}, whole "
                        f"{row.whole:.2f}, {row.n_accepted} of {row.n_drafted} accepted{measured}; {n_left} are left"
                    )
        if n_left:
            say(f"time is up, {n_left} answers are left: the same command continues")

    cells = {(kind, prompt.id, temperature) for kind, prompt, temperature in product(asks, prompts, temperatures)}
    answer(cells - set(tries(rows)), state)
    for shift in range(1, N_TRIES if args.repeat else 1):
        low = [seen for key, seen in tries(read(path)[1]).items() if key in cells and is_low(seen[0])]
        low = [seen for seen in low if len(seen) < N_TRIES]
        answer({seen[0].key for seen in low if not seen[0].measure_s}, state, shift)
        with tempfile.TemporaryDirectory() as fresh:  # these measure the pair again
            answer({seen[0].key for seen in low if seen[0].measure_s}, Path(fresh), shift)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the file that every answer is appended to")
    parser.add_argument("--report", type=Path, help="only print the table of a file")
    parser.add_argument("--repeat", action="store_true", help=f"run answers below {WORST:.2f} at first twice more")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no turn after this time")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--predict", type=int, default=64)
    args = parser.parse_args()
    if (args.output is None) == (args.report is None):
        parser.error("--output FILE or --report FILE")
    if args.output is not None:
        llama.set_log(None)
        measure(args)
    print("\n".join(table(read(args.output or args.report)[1])))


if __name__ == "__main__":
    main()
