"""The arms of `bars.py`: ours on loaded models as `specllama run` makes them, llama.cpp's as its own programs."""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from specllama import Engine, Finished, RandomChooser, SamplingParams, StepEvent, TokenEvent, llama
from specllama.chat.conversation import Conversation, Message
from specllama.core.events import Event
from specllama.core.no_drafter import NoDrafter
from specllama.core.stats import SpecStats
from specllama.core.types import Cancel, Drafter
from specllama.drafters import REGISTRY, DraftSettings
from specllama.drafters.length import TUNED, DraftLength
from specllama.llama import LlamaModel, LoadOptions
from specllama.pairs.ask import Ask, Drafting
from specllama.pairs.draft_in_target_ids import DraftModel, in_target_ids
from specllama.pairs.setup import (
    N_CTX,
    Listener,
    Models,
    Setup,
    choose,
    load_models,
    prepare,
    profile_for,
)
from specllama.prompts import load as bench_prompts
from specllama.prompts.load import BenchPrompt

RULE = Drafting().rule
SAMPLER = SamplingParams(temperature=1.0)  # its filters are told to their programs, too
# The classes of the table and where their prompts come from: so many of the first of each file, as they come.
SOURCES = {
    "code": (("coding", 8),),
    "summary/RAG": (("summarization", 4), ("rag", 4)),
    "questions": (("qa", 8),),
    "story": (("writing", 8),),
}
DECODED = re.compile(rb"decoded +(\d+) tokens in +([\d.]+) seconds")
DRAFTED = re.compile(rb"n_drafted = (\d+)[\s\S]*?n_accept +=\s*(\d+)")
PERF = re.compile(rb"(prompt eval|total) time = +([\d.]+) ms / +(\d+) tokens")
EVALS = re.compile(rb" eval time = +[\d.]+ ms / +(\d+) runs")


def prompts_of(group: str) -> list[BenchPrompt]:
    """The prompts of a class, fixed before anything was measured."""
    return [prompt for name, n in SOURCES[group] for prompt in bench_prompts.built_in([name])[:n]]


@dataclass(frozen=True, slots=True)
class Said:
    """What one answer took; see `bars_report.Run`."""

    n_tokens: int
    decode_s: float
    n_steady: int
    steady_s: float
    n_drafted: int
    n_accepted: int
    text: str
    tokens: tuple[int, ...] = ()


# ---------------------------------------------------------------------------------------------------------------- ours


@dataclass(frozen=True, slots=True)
class Ours:
    """Our models as `specllama run` loads them, and what else the fixed arms need."""

    setup: Setup  # of `auto`
    models: Models
    published: DraftModel | None  # the pair's own draft, where a fixed arm wants it
    plain: LlamaModel  # what plain decoding runs on
    talk: Conversation

    @property
    def n_threads(self) -> int:
        return self.models.target.plan.n_threads

    def drafter(self, arm: str, *, greedy: bool) -> Drafter:
        """What drafts in an arm: `auto` is made of what `specllama run` makes it of, the others of fixed lengths."""
        words = arm.split()  # "ours", strategy, K
        if words[1] == "plain":
            return NoDrafter()
        if words[1] == "auto":
            policy = self.setup.policy(greedy=greedy, draft_temp=None)
            return self.models.drafter(self.setup.strategy, DraftSettings(length=self.setup.length, policy=policy))
        settings = DraftSettings(length=DraftLength(int(words[2][2:])), vocab_size=self.models.target.vocab_size)
        return REGISTRY[{"model": "draft-simple"}.get(words[1], words[1])].make(self.published, settings)


def prepared() -> Setup:
    """The default pair as `specllama run` sets it up; with room for long blocks also where it was not tuned."""
    setup = prepare(choose(Ask(), Listener()), Listener())
    return replace(setup, target_options=replace(setup.target_options, max_block=TUNED + 1))


def published_draft() -> Setup:
    """The same pair with its own draft at a fixed length."""
    ask = Ask(drafting=Drafting(spec_type="draft-simple", length=DraftLength(3)))
    return prepare(choose(ask, Listener()), Listener())


def plain_options(setup: Setup, wanted: str) -> LoadOptions:
    """How the target is loaded for plain decoding: on the kernel path on which that was fastest when the pair was tuned
    ("best"), or as `auto` has it ("same", and where nobody tuned).
    """
    path = None if setup.profile is None or wanted == "same" else setup.profile.plain_path
    return setup.target_options if path is None else path.applied(setup.target_options)


@contextmanager
def opened(*, with_draft: bool, plain_path: str) -> Iterator[Ours]:
    """Everything ours, loaded; the target twice where plain decoding has a kernel path of its own."""
    llama.set_log(None)
    setup, fixed = prepared(), published_draft()
    with ExitStack() as owned:
        models = owned.enter_context(load_models(setup, Listener(), Cancel()))
        published, plain = None, models.target
        if with_draft:
            # Its threads, and the draft's kernel path where it is this draft's.
            fixed = replace(fixed, profile=profile_for(fixed.draft, fixed, setup.profile))
            if setup.draft is not None and fixed.draft is not None and setup.draft.path == fixed.draft.path:
                published = models.draft
            else:
                assert fixed.draft is not None
                loaded = llama.load(fixed.draft.path, fixed.draft_options(models.target.n_ctx))
                published = in_target_ids(models.target, owned.enter_context(loaded))
        if (alone := plain_options(setup, plain_path)) != setup.target_options:
            plain = owned.enter_context(llama.load(setup.target.path, alone))
        yield Ours(setup, models, published, plain, Conversation(models.target.vocab, setup.target.template))


@dataclass(frozen=True, slots=True)
class Heard:
    """One answer of our engine. Steady is what lies behind the second step, in which our draft reads the prompt."""

    tokens: tuple[int, ...]
    n_steady: int
    steady_s: float
    stats: SpecStats


def hear(events: Iterable[Event]) -> Heard:
    """What the events of an answer that was not cancelled come to."""
    tokens, n_steady, steady_s, stats = list[int](), 0, 0.0, None
    for event in events:
        if isinstance(event, TokenEvent):
            tokens.append(event.token)
            n_steady += event.step >= 2
        elif isinstance(event, StepEvent) and event.step >= 2:
            steady_s += event.step_s
        elif isinstance(event, Finished):
            stats = event.stats
    assert stats is not None, "the engine's last event is always Finished"
    return Heard(tuple(tokens), n_steady, steady_s, stats)


def ours(here: Ours, arm: str, tokens: Sequence[int], temperature: float, n_predict: int, seed: int) -> Said:
    """One answer of `n_predict` tokens: ends are forbidden. The target may hold the prompt already, no draft does."""
    target = here.plain if arm == "ours plain" else here.models.target
    for draft in (here.models.draft, here.published):
        if draft is not None:
            draft.truncate(0)
    params = replace(SAMPLER, temperature=temperature, logit_bias=dict.fromkeys(target.end_tokens, -math.inf))
    drafter = here.drafter(arm, greedy=params.greedy)
    engine = Engine(target, drafter, rule=RULE)
    said = hear(engine.generate(tokens, params, RandomChooser(seed), max_tokens=n_predict))
    drafter.close()
    text, stats = b"".join(map(target.vocab.piece, said.tokens)).decode("utf-8", "replace"), said.stats
    return Said(stats.n_emitted - stats.n_first, stats.decode_s, said.n_steady, said.steady_s, stats.n_drafted,
                stats.n_accepted, text, said.tokens)  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- theirs


def told(output: bytes) -> tuple[int, float, int, int]:
    """(tokens, seconds, drafted, accepted) behind the prompt, from what one of their programs printed.

    llama-speculative-simple says so itself. Of llama-completion it is all but the prompt, its sampling included, over
    the passes that came behind it.
    """
    if found := DECODED.search(output):
        drafted = DRAFTED.search(output)
        assert drafted is not None, "it does not say what it drafted"
        return int(found[1]), float(found[2]), int(drafted[1]), int(drafted[2])
    times = {kind: float(ms) / 1000 for kind, ms, _ in PERF.findall(output)}
    evals = EVALS.findall(output)
    assert evals, "it does not say how long it took"
    return int(evals[-1]), times[b"total"] - times[b"prompt eval"], 0, 0


@dataclass(frozen=True, slots=True)
class Theirs:
    """llama.cpp's own programs with the published pair."""

    folder: Path
    target: Path
    draft: Path
    n_threads: int

    def run(self, arm: str, prompt: str, temperature: float, n_predict: int, seed: int) -> Said:
        """One answer in a process of its own, of `n_predict` tokens; a last block may add some.

        Sampler, seed and forbidden ends are set as ours. Loading and the prompt are not in what it reports.
        """
        threads, k = str(self.n_threads), arm.rpartition("K=")[2]
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
            file.write(prompt)
            file.flush()
            common = ["-m", str(self.target), "-bf", file.name, "-c", str(N_CTX), "-t", threads, "-tb", threads,
                      "--temp", f"{temperature:g}", "--top-k", str(SAMPLER.top_k), "--top-p", f"{SAMPLER.top_p:g}",
                      "--min-p", f"{SAMPLER.min_p:g}", "--repeat-penalty", "1", "--seed", str(seed), "--ignore-eos",
                      "--log-colors", "off"]  # fmt: skip
            if arm.endswith("plain"):
                command = [self.folder / "llama-completion", *common, "-n", str(n_predict), "-no-cnv", "--perf"]
            else:
                # It goes on until it has said more than it was told to.
                command = [self.folder / "llama-speculative-simple", *common, "-n", str(n_predict - 1),
                           "-md", str(self.draft), "-td", threads, "-tbd", threads, "--spec-type", "draft-simple",
                           "--spec-draft-n-max", k, "--spec-draft-p-min", "0"]  # fmt: skip
            done = subprocess.run(list(map(str, command)), capture_output=True, check=True, stdin=subprocess.DEVNULL)
        n, seconds, n_drafted, n_accepted = told(done.stdout + b"\n" + done.stderr)
        return Said(n, seconds, n, seconds, n_drafted, n_accepted, done.stdout.decode("utf-8", "replace"))


Answer = Callable[[str, list[int], str, float, int, int], Said]  # arm, prompt's tokens, its text, temperature, n, seed


def answering(here: Ours, there: Theirs) -> Answer:
    """Whoever the arm belongs to answers."""

    def answer(arm: str, tokens: list[int], text: str, temperature: float, n_predict: int, seed: int) -> Said:
        if arm.startswith("ours"):
            return ours(here, arm, tokens, temperature, n_predict, seed)
        return there.run(arm, text, temperature, n_predict, seed)

    return answer


def texts(here: Ours, prompt: BenchPrompt) -> tuple[list[int], str]:
    """A prompt in tokens and as text, with the template around it."""
    message = [Message("user", prompt.turns[0])]
    return here.talk.tokens(message), here.talk.text(message)
