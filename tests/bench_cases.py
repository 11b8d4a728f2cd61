"""Shared by the tests of the benchmark: runs with known speeds, and a whole benchmark on fake models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from specllama.bench.job import BenchEvent, BenchJob, Loaded
from specllama.bench.plan import Wishes
from specllama.bench.report import (
    Arm,
    BenchPlan,
    BenchReport,
    BenchRun,
    Condition,
    Load,
    Machine,
    PairCosts,
    PlannedPrompt,
)
from specllama.bench.run import bench
from specllama.bench.stats import Sizes, picks, rows
from specllama.bench.verdict import verdict
from specllama.core.stats import SpecStats
from specllama.core.types import Cancel, Caps
from specllama.drafters.controller import CostProfile
from specllama.drafters.length import DraftLength
from specllama.prompts.load import BenchPrompt
from tests.fakes import FakeModel, Hook, RandomTable

MACHINE = Machine(
    cpu="a CPU",
    features=("AVX2",),
    n_cores=2,
    n_threads=4,
    memory=8 << 30,
    memory_bytes_s=20e9,
    gpus=(),
    system="a system",
    power="mains",
    load=0.01,
)
# T(n) = 1 + 0.1 (n - 1), c = 0.1: with every token accepted K = 4 gives 5 / (0.4 + 1.4).
COSTS = CostProfile(verify=((1, 1.0), (17, 2.6)), draft=((1, 0.1), (2, 0.1)))
PLAIN = Arm(name="plain")
VOCAB = 12


def lengths(*each: int | str) -> tuple[DraftLength, ...]:
    return tuple(DraftLength.check("length", one) for one in each)


def arm_of(k: int, **changes: Any) -> Arm:
    """An arm of a draft model with a fixed length."""
    return replace(Arm(name=f"K={k}", draft=0, spec_type="draft-simple", n_max=k), **changes)


def prompts_of(n: int, category: str = "coding") -> tuple[PlannedPrompt, ...]:
    """Prompts of one class; every second one is in the half that picks."""
    return tuple(PlannedPrompt(id=f"p{i}", category=category, language="en", picks=i % 2 == 0) for i in range(n))


def plan_of(
    arms: Sequence[Arm],
    prompts: Sequence[PlannedPrompt],
    *,
    temperatures: Sequence[float] = (0.0,),
    n_repetitions: int = 1,
) -> BenchPlan:
    """A plan without limits."""
    return BenchPlan(
        loads=(Load(),),
        drafts=("draft",),
        arms=tuple(arms),
        conditions=tuple(Condition(temperature=each, n_predict=101) for each in temperatures),
        prompts=tuple(prompts),
        n_repetitions=n_repetitions,
        fixed_length=True,
        delay_s=0.0,
        budget_s=None,
        expected_s=1.0,
        note="a plan",
    )


def run_of(
    arm: int, prompt: int, tok_s: float, *, condition: int = 0, repetition: int = 0, prompt_s: float = 1.0,
    n_drafted: int = 0, n_accepted: int = 0, n_rejected: int = 0,
) -> BenchRun:  # fmt: skip
    """100 tokens after the first pass, at `tok_s`."""
    seconds = 100.0 / tok_s
    stats = SpecStats(
        n_prompt=50,
        n_emitted=101,
        n_first=1,
        n_from_draft=n_accepted,
        n_steps=101 - n_accepted,
        n_spec_steps=n_drafted and 101 - n_accepted,
        n_drafted=n_drafted,
        n_accepted=n_accepted,
        n_rejected=n_rejected,
        drafted_at=[n_drafted] if n_drafted else [],
        accepted_at=[n_accepted] if n_drafted else [],
        prompt_s=prompt_s,
        draft_s=0.25 * seconds,
        eval_s=0.5 * seconds,
        sample_s=0.125 * seconds,
        kv_s=0.0625 * seconds,
        decode_s=seconds,
    )
    steps = (seconds / 100,) * 100
    return BenchRun(
        arm=arm, condition=condition, prompt=prompt, repetition=repetition, reason="length", stats=stats, steps_s=steps,
        rss=1000 + arm, gpu_bytes=None,
    )  # fmt: skip


def report_of(plan: BenchPlan, runs: Sequence[BenchRun], **changes: Any) -> BenchReport:
    """The report computed from `runs`."""
    costs = (PairCosts(load=0, draft=0, step_s=0.1, profile=COSTS, noise=0.1),)
    report = BenchReport(
        made="2026-01-02T03:04:05+00:00",
        command="specllama bench",
        settings={"temp": [0.0]},
        versions={"specllama": "0", "llama_cpp": "1"},
        target={"file": "target.gguf", "sha256": "aa"},
        drafts=({"file": "draft.gguf", "sha256": "bb"},),
        machine=MACHINE,
        plan=plan,
        runs=tuple(runs),
        costs=costs,
        insights=(),
        rows=rows(plan, runs, costs, Sizes(target=1_000_000_000, drafts=(250_000_000,), memory_bytes_s=20e9)),
        picks=picks(plan, runs),
        verdict="",
    )
    report = replace(report, **changes)
    return replace(report, verdict=verdict(report))


@dataclass
class Stage:
    """Fake models for a whole benchmark; every evaluation advances the clock `now`."""

    now: float = 0.0
    eval_s: float = 0.001
    load_s: float = 0.0
    opened: list[int] = field(default_factory=list)
    models: list[FakeModel] = field(default_factory=list)
    n_drafts: int = 1
    n_ctx: int = 256
    n_ctx_draft: int | None = None
    end_tokens: frozenset[int] = frozenset({0})
    on_eval: Callable[[], None] = lambda: None

    def hook(self) -> Hook:
        """Moves the clock."""

        def called(_number: int, name: str) -> None:
            if name == "eval":
                self.now += self.eval_s
                self.on_eval()

        return called

    def model(self, seed: int) -> FakeModel:
        """A model that depends on its whole history."""
        return FakeModel(
            RandomTable(VOCAB, seed), VOCAB, n_ctx=self.n_ctx, end_tokens=self.end_tokens, caps=Caps(max_block=17),
            hook=self.hook(),
        )  # fmt: skip

    @contextmanager
    def open(self, load: int) -> Iterator[Loaded]:
        """A target and drafts; draft 0 is the target's twin, the others know nothing of it."""
        self.opened.append(load)
        self.now += self.load_s
        self.models = [self.model(1), *(self.model(1 + 7 * i) for i in range(self.n_drafts))]
        target, *drafts = self.models
        for draft in drafts:
            draft.n_ctx = self.n_ctx_draft or self.n_ctx
        yield Loaded(
            target=target,
            drafts=tuple(drafts),
            tokens=lambda text: [1 + ord(char) % (VOCAB - 1) for char in text[::4]],  # as English has it
            count=lambda text: len(text) // 4,
            piece=lambda token: b"." if token == 3 else b" word",
            policy=lambda arm, params: None,
            target_facts={"file": "target.gguf"},
            draft_facts=tuple({"file": f"draft{i}.gguf"} for i in range(self.n_drafts)),
            n_target_bytes=1000,
            n_draft_bytes=(100,) * self.n_drafts,
            warnings=(),
        )

    def job(self, prompts: Sequence[BenchPrompt], **changes: Any) -> BenchJob:
        """A job that costs milliseconds; `changes` are the wishes' or the job's."""
        of_job = {key: changes.pop(key) for key in ("synthetic", "params", "seed") if key in changes}
        wishes = Wishes(
            **{
                "loads": (Load(),),
                "drafts": tuple(f"draft{i}" for i in range(self.n_drafts)),
                "strategies": ("draft-simple",),
                "lengths": lengths(0, 2, 3),
                "n_predict": (8,),
                **changes,
            }
        )
        return BenchJob(
            wishes=wishes, prompts=prompts, machine=MACHINE, made="now", command="bench", settings={}, versions={},
            **of_job,
        )  # fmt: skip

    def events(
        self, job: BenchJob, cancel: Cancel | None = None, sleep: Callable[[float], None] = lambda _: None
    ) -> list[BenchEvent]:
        """Everything the benchmark says."""
        return list(bench(job, self.open, cancel, clock=lambda: self.now, sleep=sleep))


def asked(n: int, categories: Sequence[str] = ("coding", "poem")) -> tuple[BenchPrompt, ...]:
    """Short prompts, class by class in turn."""
    return tuple(
        BenchPrompt(f"q{i}", categories[i % len(categories)], "en", (f"question {i}: what is it?",)) for i in range(n)
    )
