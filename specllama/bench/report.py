"""The benchmark's report as data: what was planned, every single run, and the figures that follow from them.

How to read a `BenchReport`. `plan` was fixed before the first counted run: `plan.arms` are what is compared (the
first one is plain decoding), `plan.conditions` what each is compared under (temperature, lengths), `plan.prompts` what
is asked. A `BenchRun` is one answer and points into these three by index. `rows` are the table: one `BenchRow` for each
arm, condition and class of prompts, and one for all classes together (`category == ALL`). Everything in `rows`, `picks`
and `verdict` follows from `runs`, `costs` and `insights` alone (see `bench_stats`).

Rates and shares are fractions of 1, None where nothing was counted; `*_s` are seconds; speeds are tokens per second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specllama.base.errors import ReportError
from specllama.base.jsonable import from_plain, require_schema, to_plain
from specllama.core.stats import SpecStats
from specllama.drafters.controller import CostProfile
from specllama.drafters.length import TUNED, DraftLength

NAME, VERSION = "specllama.bench", 1
SCHEMA: Mapping[str, object] = {
    "name": NAME,
    "version": VERSION,
    "units": "rates and shares are fractions of 1 (null: nothing was counted), *_s seconds, *_tok_s tokens a second",
}
ALL = "all"  # the category of rows over all classes of prompts

BandPlace = Literal["inside", "below", "above"]


# ------------------------------------------------------------------------------------------------------ what is planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One way of loading the models. Arms of different loads are never in memory together."""

    n_threads: int | None = None  # None = the physical cores
    type_k: str = "f16"
    type_v: str = "f16"
    type_k_draft: str = "f16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One setting that is compared with the others."""

    name: str  # unique in the plan, such as "plain", "K=4", "K=4 lookup"
    load: int = 0  # index into plan.loads
    draft: int | None = None  # index into plan.drafts; None = no draft model drafts
    spec_type: str = "none"  # a strategy of drafters.REGISTRY
    n_max: int | None = 0  # longest draft; None = auto: a profile's controller decides at every step
    verify_rule: str = "block"

    @property
    def length(self) -> DraftLength:
        """How far it drafts."""
        return DraftLength.auto(TUNED) if self.n_max is None else DraftLength(self.n_max)

    @property
    def plain(self) -> bool:
        """True for plain decoding: the baseline of the arms of its load."""
        return self.spec_type == "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What all arms are compared under."""

    temperature: float = 0.0
    n_depth: int = 0  # tokens that both caches hold already before the prompt is read
    n_prompt: int = 0  # the prompt is lengthened to so many tokens; 0 = as it is
    n_predict: int = 64  # tokens of an answer: exactly so many, or at most (see `fixed_length`)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPrompt:
    """One prompt."""

    id: str
    category: str
    language: str
    picks: bool  # of the half that the best arm is picked by; the others confirm it


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """The run matrix: every arm under every condition for every prompt, `n_repetitions` times, prompt by prompt."""

    loads: tuple[Load, ...]
    drafts: tuple[str, ...]  # file names of the drafts, in the order of the command line
    arms: tuple[Arm, ...]  # arms[0] is the plain one of the first load: the reference of everything
    conditions: tuple[Condition, ...]
    prompts: tuple[PlannedPrompt, ...]
    n_repetitions: int
    fixed_length: bool  # end tokens are forbidden (a bias of -inf), so that every answer has n_predict tokens
    delay_s: float  # pause before every run
    budget_s: float | None  # what was to be spent; None = no limit
    expected_s: float  # what the runs were expected to take
    note: str  # how budget, prompts and repetitions came about, in one sentence

    @property
    def n_runs(self) -> int:
        """Counted runs, if all of them are made."""
        return len(self.arms) * len(self.conditions) * len(self.prompts) * self.n_repetitions


# ----------------------------------------------------------------------------------------------------- what is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """One answer. arm, condition and prompt are indices into the plan's."""

    arm: int
    condition: int
    prompt: int
    repetition: int
    reason: str  # why the answer ended: stop or length
    stats: SpecStats  # its counters and times
    steps_s: tuple[float, ...]  # the time of every step but the first, which belongs to the prompt
    rss: int  # bytes of memory of this process behind it, all loaded models included
    gpu_bytes: int | None  # bytes in use on all GPUs; None = there is none

    @property
    def ttft_s(self) -> float:
        """Time to the first token: prefill and the first pass."""
        return self.stats.prompt_s

    @property
    def latency_s(self) -> float:
        """From the start to the last token."""
        return self.stats.prompt_s + self.stats.decode_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token, (latency - TTFT) / (tokens - 1)."""
        n = self.stats.n_emitted - 1
        return (self.latency_s - self.ttft_s) / n if n > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCosts:
    """What passes cost, measured before the runs of a load."""

    load: int
    draft: int | None  # None: T(n) alone; then `profile.draft` says nothing
    step_s: float  # T(1)
    profile: CostProfile  # profile.verify = T(n)/T(1) at measured n, profile.draft = c of n rows, in T(1)
    noise: float  # spread of the samples, see `measure.Costs`


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Tokens of one kind and how many of them a draft would have had accepted."""

    label: str
    n_tokens: int
    acceptance: float | None  # mean of sum(min(p, q)); None where there was no such token


@dataclass(frozen=True, slots=True, kw_only=True)
class Insight:
    """When a draft is right. Read off the answers of plain decoding afterwards, so that it costs no run any time."""

    draft: int
    temperature: float
    by_entropy: tuple[Bucket, ...]  # of the draft's law at temperature 1, in nats
    by_place: tuple[Bucket, ...]  # "first": the first tokens of a sentence, "later": those behind them


# --------------------------------------------------------------------------------------------------------- what follows


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio and its 95 % confidence interval from a paired bootstrap over prompts; fewer than three give none."""

    value: float
    low: float | None
    high: float | None
    n_pairs: int = 0  # prompt by prompt and repetition by repetition

    @property
    def sure(self) -> bool:
        """Does the interval leave out 1, that is: no difference? Without an interval nothing is sure."""
        return self.low is not None and self.high is not None and (self.low > 1.0 or self.high < 1.0)


@dataclass(frozen=True, slots=True)
class Band:
    """What the literature lets expect of the acceptance, and where the measured one lies."""

    source: str  # "code", "temperature 0.7-1.0"
    low: float
    high: float
    measured: float
    place: BandPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """Shares of the decoding time; they add up to 1."""

    draft: float
    verify: float
    sampling: float
    kv: float
    other: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """Figures of one arm under one condition, over the prompts of one class or over all of them."""

    arm: int
    condition: int
    category: str  # ALL for all classes together
    n_prompts: int
    n_runs: int
    # Medians over the runs, and the quartiles of the decoding speed.
    ttft_s: float
    latency_s: float
    prefill_tok_s: float | None
    decode_tok_s: float | None
    decode_low_tok_s: float | None
    decode_high_tok_s: float | None
    tpot_s: float | None
    step_s: float | None  # median over all steps
    step_p95_s: float | None
    # Counts of all runs together.
    n_drafted: int
    n_accepted: int
    acceptance_rate: float | None  # accepted / drafted
    alpha: float | None  # accepted / (accepted + rejections)
    mean_length: float | None  # 1 + accepted / steps with a draft
    from_draft: float | None
    per_position: tuple[float, ...]  # accepted at position i / steps with a draft; unconditional
    histogram: tuple[int, ...]  # steps with a draft that had i tokens accepted
    time_split: TimeSplit | None
    rss: int  # the largest
    gpu_bytes: int | None
    # Against plain decoding of the same load, paired by prompt and repetition; None for the plain arm itself.
    speedup: Interval | None  # of decoding
    latency_speedup: Interval | None  # of the whole answer, per emitted token
    # Against arms[0], whatever the load; None for that arm itself.
    versus_reference: Interval | None
    predicted: float | None  # speedup that c, T(n) and alpha let expect
    bound: float | None  # speedup if every drafted token were accepted
    bound_share: float | None  # speedup / bound
    weight_bytes_s: float | None  # bytes of weights read per second of decoding
    bandwidth_share: float | None  # the same, of the machine's memory bandwidth
    bands: tuple[Band, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """The best arm under one condition: picked by one half of the prompts, confirmed by the other."""

    condition: int
    arm: int  # plain decoding among the candidates; the smaller K of equals (within 1 %)
    picked: float  # speed over the reference on the half it was picked by
    confirmed: Interval | None  # on the other half; None where there is none
    n_picking: int  # prompts
    n_confirming: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where it was measured."""

    cpu: str
    features: tuple[str, ...]  # instruction sets, in llama.cpp's words
    n_cores: int
    n_threads: int  # of the CPU
    memory: int  # bytes
    memory_bytes_s: float | None  # bytes a second read from memory by all cores together, measured
    gpus: tuple[str, ...]
    system: str
    power: str  # "mains", "battery", "unknown"
    load: float | None  # share of the CPU that others used before the first run


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Where the time went."""

    loading_s: float  # before the first counted run: the budget is for everything else
    costs_s: float  # measuring what passes cost
    warm_up_s: float
    runs_s: float  # and what lies between them: pauses, other loads
    insight_s: float  # looking at what was accepted
    arms_s: tuple[float, ...] = ()  # of runs_s, the answers of every arm of the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """Everything, in one piece."""

    made: str  # UTC, ISO 8601
    command: str  # what was typed
    settings: Mapping[str, Any]  # every option's value
    versions: Mapping[str, str]  # of the program, the bindings, llama.cpp, Python ...
    target: Mapping[str, Any]  # file, size, SHA-256, description, how it was loaded
    drafts: tuple[Mapping[str, Any], ...]  # the same, in the order of plan.drafts
    machine: Machine
    plan: BenchPlan
    runs: tuple[BenchRun, ...]
    costs: tuple[PairCosts, ...]
    insights: tuple[Insight, ...]
    rows: tuple[BenchRow, ...]
    picks: tuple[Pick, ...]
    verdict: str
    partial: str = ""  # why not everything that was planned was measured; empty: everything was
    synthetic: float | None = None  # drafted tokens were accepted with this chance, unjudged: NO VALID OUTPUT
    warnings: tuple[str, ...] = ()
    spent: Spent | None = None  # None: the report is of a version that did not say
    schema: Mapping[str, Any] = field(default_factory=lambda: dict(SCHEMA))

    def rows_of(self, category: str = ALL) -> tuple[BenchRow, ...]:
        """The rows of one class of prompts, or those over all classes."""
        return tuple(row for row in self.rows if row.category == category)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return to_plain(self)

    @classmethod
    def from_json(cls, data: object) -> BenchReport:
        """The inverse of `to_json`. Raises ReportError."""
        report = from_plain(cls, require_schema(data, NAME, VERSION))
        report._require_indices()
        return report

    def _require_indices(self) -> None:
        """Raises ReportError where something points at nothing."""
        plan = self.plan
        n_arms, n_conditions, n_prompts = len(plan.arms), len(plan.conditions), len(plan.prompts)
        pointing = [(f"rows[{i}]", row.arm, row.condition, 0, 1) for i, row in enumerate(self.rows)]
        pointing += [(f"runs[{i}]", run.arm, run.condition, run.prompt, n_prompts) for i, run in enumerate(self.runs)]
        for where, arm, condition, prompt, n in pointing:
            if not (0 <= arm < n_arms and 0 <= condition < n_conditions and 0 <= prompt < n):
                raise ReportError(f"{where} is of an arm, condition or prompt that the plan has not")
