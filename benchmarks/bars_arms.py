"""The arms of `bars.py`: ours on loaded models, as in `specllama run`; llama.cpp's as its own programs."""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from specllama import Engine, Finished, RandomChooser, SamplingParams, TokenEvent, llama
from specllama.chat.conversation import Conversation, Message
from specllama.core.no_drafter import NoDrafter
from specllama.core.types import Cancel, Drafter
from specllama.drafters import DraftSettings
from specllama.drafters.length import DraftLength
from specllama.llama import LlamaModel, LoadOptions
from specllama.pairs.ask import Ask, Drafting
from specllama.pairs.setup import N_CTX, Listener, Models, Setup, choose, load_models, prepare
from specllama.prompts import load as bench_prompts
from specllama.prompts.load import BenchPrompt
from specllama.tuning.first_use import FirstUse

RULE = Drafting().rule
SAMPLER = SamplingParams(temperature=1.0)  # theirs get the same filters
# The classes, and how many of the first prompts of each file they take.
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
    """The prompts of a class, chosen before any measurement."""
    return [prompt for name, n in SOURCES[group] for prompt in bench_prompts.built_in([name])[:n]]


@dataclass(frozen=True, slots=True)
class Said:
    """The figures of one answer; see `bars_report.Run`."""

    n_tokens: int
    decode_s: float
    n_drafted: int
    n_accepted: int
    text: str
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ours:
    """Our models as `specllama run` loads them, and the target for plain decoding."""

    setup: Setup  # of `auto`
    models: Models
    plain: LlamaModel
    talk: Conversation

    @property
    def n_threads(self) -> int:
        return self.models.target.plan.n_threads

    def drafter(self, arm: str, *, greedy: bool) -> Drafter:
        if arm == "ours plain":
            return NoDrafter()
        policy = self.setup.policy(greedy=greedy)
        return self.models.drafter(self.setup.strategy, DraftSettings(length=self.setup.length, policy=policy))


def prepared() -> Setup:
    """The default pair as in `specllama run`."""
    return prepare(choose(Ask(), Listener()), Listener())


def published_draft() -> Setup:
    """The same pair with its published draft at a fixed length, as theirs uses it."""
    ask = Ask(drafting=Drafting(spec_type="draft-simple", length=DraftLength(3)))
    return prepare(choose(ask, Listener()), Listener())


def plain_options(setup: Setup, wanted: str) -> LoadOptions:
    """Load options of plain decoding: the fastest kernel path of the profile ("best"), or those of `auto` ("same")."""
    path = None if setup.profile is None or wanted == "same" else setup.profile.plain_path
    return setup.target_options if path is None else path.applied(setup.target_options)


@contextmanager
def opened(plain_path: str) -> Iterator[Ours]:
    """Our models, loaded; the target twice if plain decoding has another kernel path."""
    llama.set_log(None)
    setup = prepared()
    with ExitStack() as owned:
        models = owned.enter_context(load_models(setup, Listener(), Cancel()))
        setup = FirstUse(setup, models).finish()
        plain = models.target
        if (alone := plain_options(setup, plain_path)) != setup.target_options:
            plain = owned.enter_context(llama.load(setup.target.path, alone))
        yield Ours(setup, models, plain, Conversation(models.target.vocab, setup.target.template))


def ours(here: Ours, arm: str, tokens: Sequence[int], temperature: float, n_predict: int, seed: int) -> Said:
    """One answer of `n_predict` tokens without an end. The target may have the prompt cached, the draft never."""
    target = here.plain if arm == "ours plain" else here.models.target
    if here.models.draft is not None:
        here.models.draft.truncate(0)
    params = replace(SAMPLER, temperature=temperature, logit_bias=dict.fromkeys(target.end_tokens, -math.inf))
    drafter = here.drafter(arm, greedy=params.greedy)
    engine = Engine(target, drafter, rule=RULE)
    said, stats = list[int](), None
    for event in engine.generate(tokens, params, RandomChooser(seed), max_tokens=n_predict):
        if isinstance(event, TokenEvent):
            said.append(event.token)
        elif isinstance(event, Finished):
            stats = event.stats
    drafter.close()
    assert stats is not None, "the engine's last event is always Finished"
    text = b"".join(map(target.vocab.piece, said)).decode("utf-8", "replace")
    n_tokens = stats.n_emitted - stats.n_first
    return Said(n_tokens, stats.decode_s, stats.n_drafted, stats.n_accepted, text, tuple(said))


def told(output: bytes) -> tuple[int, float, int, int]:
    """(tokens, seconds, drafted, accepted) after the prompt, from the output of one of their programs.

    llama-speculative-simple prints them. For llama-completion the time is the total without the prompt, sampling
    included, and the tokens are the passes after the prompt.
    """
    if found := DECODED.search(output):
        drafted = DRAFTED.search(output)
        assert drafted is not None, "no line about drafted tokens"
        return int(found[1]), float(found[2]), int(drafted[1]), int(drafted[2])
    times = {kind: float(ms) / 1000 for kind, ms, _ in PERF.findall(output)}
    evals = EVALS.findall(output)
    assert evals, "no line about the eval time"
    return int(evals[-1]), times[b"total"] - times[b"prompt eval"], 0, 0


@dataclass(frozen=True, slots=True)
class Theirs:
    """llama.cpp's own programs with the published pair."""

    folder: Path
    target: Path
    draft: Path
    n_threads: int

    def run(self, arm: str, prompt: str, temperature: float, n_predict: int, seed: int) -> Said:
        """One answer of `n_predict` tokens in a new process; the last block may add some.

        Sampler, seed and forbidden ends are as ours. Loading and the prompt are not part of its figures.
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
                # It stops only after more tokens than -n.
                command = [self.folder / "llama-speculative-simple", *common, "-n", str(n_predict - 1),
                           "-md", str(self.draft), "-td", threads, "-tbd", threads, "--spec-type", "draft-simple",
                           "--spec-draft-n-max", k, "--spec-draft-p-min", "0"]  # fmt: skip
            done = subprocess.run(list(map(str, command)), capture_output=True, check=True, stdin=subprocess.DEVNULL)
        n, seconds, n_drafted, n_accepted = told(done.stdout + b"\n" + done.stderr)
        return Said(n, seconds, n_drafted, n_accepted, done.stdout.decode("utf-8", "replace"))


def published(folder: Path, n_threads: int) -> Theirs:
    """Their programs with the default pair and its published draft."""
    setup = published_draft()
    assert setup.draft is not None
    return Theirs(folder, setup.target.path, setup.draft.path, n_threads)


def texts(here: Ours, prompt: BenchPrompt) -> tuple[list[int], str]:
    """A prompt with the chat template, as tokens and as text."""
    message = [Message("user", prompt.turns[0])]
    return here.talk.tokens(message), here.talk.text(message)
