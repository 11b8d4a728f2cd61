"""The arms of `bars.py`: ours on loaded models as `specllama run` makes them, llama.cpp's as its own programs."""

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
from specllama.drafters.length import TUNED, DraftLength
from specllama.llama import LlamaModel, LoadOptions
from specllama.pairs.ask import Ask, Drafting
from specllama.pairs.setup import N_CTX, Listener, Models, Setup, choose, load_models, prepare
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
    n_drafted: int
    n_accepted: int
    text: str
    tokens: tuple[int, ...] = ()


# ---------------------------------------------------------------------------------------------------------------- ours


@dataclass(frozen=True, slots=True)
class Ours:
    """Our models as `specllama run` loads them, and the target that decodes plainly."""

    setup: Setup  # of `auto`
    models: Models
    plain: LlamaModel  # what plain decoding runs on
    talk: Conversation

    @property
    def n_threads(self) -> int:
        return self.models.target.plan.n_threads

    def drafter(self, arm: str, *, greedy: bool) -> Drafter:
        """What drafts in an arm; `auto` is made as `specllama run` makes it."""
        if arm == "ours plain":
            return NoDrafter()
        policy = self.setup.policy(greedy=greedy)
        return self.models.drafter(self.setup.strategy, DraftSettings(length=self.setup.length, policy=policy))


def prepared() -> Setup:
    """The default pair as `specllama run` sets it up; with room for long blocks also where it was not tuned."""
    setup = prepare(choose(Ask(), Listener()), Listener())
    return replace(setup, target_options=replace(setup.target_options, max_block=TUNED + 1))


def published_draft() -> Setup:
    """The same pair with its own draft at a fixed length, as theirs uses it."""
    ask = Ask(drafting=Drafting(spec_type="draft-simple", length=DraftLength(3)))
    return prepare(choose(ask, Listener()), Listener())


def plain_options(setup: Setup, wanted: str) -> LoadOptions:
    """How the target is loaded for plain decoding: on its fastest kernel path as tuned ("best"), or as for `auto`
    ("same", and without a profile).
    """
    path = None if setup.profile is None or wanted == "same" else setup.profile.plain_path
    return setup.target_options if path is None else path.applied(setup.target_options)


@contextmanager
def opened(plain_path: str) -> Iterator[Ours]:
    """Everything ours, loaded; the target twice where plain decoding has a kernel path of its own."""
    llama.set_log(None)
    setup = prepared()
    with ExitStack() as owned:
        models = owned.enter_context(load_models(setup, Listener(), Cancel()))
        plain = models.target
        if (alone := plain_options(setup, plain_path)) != setup.target_options:
            plain = owned.enter_context(llama.load(setup.target.path, alone))
        yield Ours(setup, models, plain, Conversation(models.target.vocab, setup.target.template))


def ours(here: Ours, arm: str, tokens: Sequence[int], temperature: float, n_predict: int, seed: int) -> Said:
    """One answer of `n_predict` tokens: ends are forbidden. The target may hold the prompt already, no draft does."""
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
        return Said(n, seconds, n_drafted, n_accepted, done.stdout.decode("utf-8", "replace"))


def texts(here: Ours, prompt: BenchPrompt) -> tuple[list[int], str]:
    """A prompt in tokens and as text, with the template around it."""
    message = [Message("user", prompt.turns[0])]
    return here.talk.tokens(message), here.talk.text(message)
