"""The benchmark's report as data: the plan, every run, and the figures computed from them.

`plan` is fixed before the first counted run. `plan.arms` are the settings that are compared (the first is plain
decoding), `plan.conditions` are temperature and lengths, `plan.prompts` the prompts. A `BenchRun` is one answer and
points into these three by index. `rows` are the table: one `BenchRow` for each arm, condition and class of prompts, and
one for all classes together (`category == ALL`). `rows`, `picks` and `verdict` are computed from `runs` and `costs`
alone (see bench/stats).

Rates and shares are fractions of 1, None if nothing was counted; `*_s` are seconds; speeds are tokens per second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specllama.base.errors import ReportError
from specllama.base.jsonable import from_plain, require_schema
from specllama.core.gain import Gain
from specllama.core.stats import SpecStats
from specllama.drafters.controller import CostProfile
from specllama.drafters.length import TUNED, DraftLength

NAME, VERSION = "specllama.bench", 1
SCHEMA: Mapping[str, object] = {
    "name": NAME,
    "version": VERSION,
    "units": "rates and shares are fractions of 1 (null: nothing was counted), *_s seconds, *_tok_s tokens per second",
}
ALL = "all"  # the category of rows over all classes of prompts

BandPlace = Literal["inside", "below", "above"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Options that the models are loaded with. Only one load is in memory at a time."""

    n_threads: int | None = None  # None = the physical cores
    type_k: str = "f16"
    type_v: str = "f16"
    type_k_draft: str = "f16"
    rollback: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One setting that is compared with the others."""

    name: str  # unique in the plan, such as "plain", "K=4", "K=4 lookup"
    load: int = 0  # index into plan.loads
    draft: int | None = None  # index into plan.drafts; None = no draft model
    spec_type: str = "none"  # a strategy of drafters.REGISTRY
    n_max: int | None = 0  # longest draft; None = auto: the controller of a profile decides at every step
    verify_rule: str = "block"
    seed_mode: str = "draws"

    @property
    def length(self) -> DraftLength:
        return DraftLength.auto(TUNED) if self.n_max is None else DraftLength(self.n_max)

    @property
    def plain(self) -> bool:
        """True for plain decoding, the baseline of the arms of its load."""
        return self.spec_type == "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Temperature and lengths, the same for all arms."""

    temperature: float = 0.0
    n_depth: int = 0  # tokens in both caches before the prompt is read
    n_prompt: int = 0  # length in tokens that the prompt is filled up to; 0 = as it is
    n_predict: int = 64  # tokens of an answer: exact or maximum (see `fixed_length`)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPrompt:
    """One prompt of the plan, without its text."""

    id: str
    category: str
    language: str
    picks: bool  # True: in the half that picks the best arm; the other half confirms it


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """The run matrix: every arm, condition and prompt, `n_repetitions` times, prompt by prompt."""

    loads: tuple[Load, ...]
    drafts: tuple[str, ...]  # file names of the drafts, in the order of the command line
    arms: tuple[Arm, ...]  # arms[0] is plain decoding in the first load: the reference
    conditions: tuple[Condition, ...]
    prompts: tuple[PlannedPrompt, ...]
    n_repetitions: int
    fixed_length: bool  # end tokens are forbidden (a bias of -inf), so that every answer has n_predict tokens
    delay_s: float  # pause before every run
    budget_s: float | None  # None = no limit
    expected_s: float  # expected time of all runs
    note: str  # number of prompts, repetitions and tokens, and how they relate to the budget

    @property
    def n_runs(self) -> int:
        return len(self.arms) * len(self.conditions) * len(self.prompts) * self.n_repetitions


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """One answer. arm, condition and prompt are indices into the plan."""

    arm: int
    condition: int
    prompt: int
    repetition: int
    reason: str  # why the answer ended: stop or length
    stats: SpecStats
    steps_s: tuple[float, ...]  # time of every step except the first, which belongs to the prompt
    gain: Gain | None = None  # over plain decoding, from the times of its own passes
    rss: int  # memory of this process after it in bytes, all loaded models included
    gpu_bytes: int | None  # bytes in use on all GPUs; None = no GPU

    @property
    def ttft_s(self) -> float:
        """Time to the first token: prefill and the first pass."""
        return self.stats.prompt_s

    @property
    def latency_s(self) -> float:
        return self.stats.prompt_s + self.stats.decode_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token, (latency - TTFT) / (tokens - 1)."""
        n = self.stats.n_emitted - 1
        return (self.latency_s - self.ttft_s) / n if n > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCosts:
    """Costs of forward passes, measured before the runs of a load."""

    load: int
    draft: int | None  # None: only T(n) was measured; ignore `profile.draft`
    step_s: float  # T(1)
    profile: CostProfile  # profile.verify = T(n)/T(1) at the measured n, profile.draft = c of n rows, in T(1)
    noise: float  # spread of the samples, see tuning/costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Acceptance of a draft on tokens of one kind."""

    label: str
    n_tokens: int
    acceptance: float | None  # mean of sum(min(p, q)); None without such tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Insight:
    """Acceptance of a draft by kind of token, computed from the answers of plain decoding after the timed runs."""

    draft: int
    temperature: float
    by_entropy: tuple[Bucket, ...]  # of the draft's distribution at temperature 1, in nats
    by_place: tuple[Bucket, ...]  # the first tokens of a sentence, and the later ones


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio and its 95 % confidence interval from a paired bootstrap over at least three prompts."""

    value: float
    low: float | None
    high: float | None
    n_pairs: int = 0  # by prompt and repetition

    @property
    def sure(self) -> bool:
        """True if there is an interval and it excludes 1."""
        return self.low is not None and self.high is not None and (self.low > 1.0 or self.high < 1.0)


@dataclass(frozen=True, slots=True)
class Band:
    """Acceptance reported in the literature, and the place of the measured one."""

    source: str  # "code", "temperature 0.7-1.0"
    low: float
    high: float
    measured: float
    place: BandPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """Shares of the decoding time; their sum is 1."""

    draft: float
    verify: float
    sampling: float
    kv: float
    other: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """Figures of one arm under one condition, over the prompts of one class or of all classes."""

    arm: int
    condition: int
    category: str  # ALL for all classes
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
    histogram: tuple[int, ...]  # number of steps with a draft and i accepted tokens
    time_split: TimeSplit | None
    rss: int  # maximum
    gpu_bytes: int | None
    # Against plain decoding in the same load, paired by prompt and repetition; None for plain decoding.
    speedup: Interval | None  # of decoding
    latency_speedup: Interval | None  # of the whole answer, per emitted token
    # Against arms[0]; None for arms[0].
    versus_reference: Interval | None
    gain: Gain | None = None  # decoding speedup as `run` shows it, without plain runs: medians over the runs
    predicted: float | None  # speedup computed from c, T(n) and alpha
    bound: float | None  # speedup if every drafted token were accepted
    bound_share: float | None  # speedup / bound
    weight_bytes_s: float | None  # bytes of weights read per second of decoding
    bandwidth_share: float | None  # weight_bytes_s / memory bandwidth
    bands: tuple[Band, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """The best arm under one condition: picked on one half of the prompts, confirmed on the other."""

    condition: int
    arm: int  # plain decoding is a candidate; of arms within 1 % the smaller K
    picked: float  # speed over the reference on the picking half
    confirmed: Interval | None  # on the other half; None without one
    n_picking: int  # prompts
    n_confirming: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine that was measured on."""

    cpu: str
    features: tuple[str, ...]  # instruction sets, as llama.cpp names them
    n_cores: int
    n_threads: int  # of the CPU
    memory: int  # bytes
    memory_bytes_s: float | None  # measured read bandwidth of all cores together
    gpus: tuple[str, ...]
    system: str
    power: str  # "mains", "battery", "unknown"
    load: float | None  # CPU share of other programs before the first run


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """How the time was spent."""

    loading_s: float  # before the first counted run; not part of the budget
    costs_s: float  # measuring the costs of passes
    warm_up_s: float
    runs_s: float  # pauses and loading in between included
    insight_s: float  # analysing the acceptance
    arms_s: tuple[float, ...] = ()  # the part of runs_s of every arm


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """The whole result of a benchmark."""

    made: str  # UTC, ISO 8601
    command: str  # the command line
    settings: Mapping[str, Any]  # the values of all options
    versions: Mapping[str, str]  # of the program, the bindings, llama.cpp, Python ...
    target: Mapping[str, Any]  # file, size, SHA-256, description, load options
    drafts: tuple[Mapping[str, Any], ...]  # the same, in the order of plan.drafts
    machine: Machine
    plan: BenchPlan
    runs: tuple[BenchRun, ...]
    costs: tuple[PairCosts, ...]
    insights: tuple[Insight, ...]
    rows: tuple[BenchRow, ...]
    picks: tuple[Pick, ...]
    verdict: str
    partial: str = ""  # why runs of the plan are missing; empty if complete
    synthetic: float | None = None  # chance with which drafted tokens were accepted unverified: NO VALID OUTPUT
    warnings: tuple[str, ...] = ()
    spent: Spent | None = None  # None in reports of older versions
    schema: Mapping[str, Any] = field(default_factory=lambda: dict(SCHEMA))

    def rows_of(self, category: str = ALL) -> tuple[BenchRow, ...]:
        return tuple(row for row in self.rows if row.category == category)

    @classmethod
    def from_json(cls, data: object) -> BenchReport:
        """The inverse of `to_plain`. Raises ReportError."""
        report = from_plain(cls, require_schema(data, NAME, VERSION))
        plan = report.plan
        n_arms, n_conditions, n_prompts = len(plan.arms), len(plan.conditions), len(plan.prompts)
        pointing = [(f"rows[{i}]", row.arm, row.condition, 0, 1) for i, row in enumerate(report.rows)]
        pointing += [(f"runs[{i}]", run.arm, run.condition, run.prompt, n_prompts) for i, run in enumerate(report.runs)]
        for where, arm, condition, prompt, n in pointing:
            if not (0 <= arm < n_arms and 0 <= condition < n_conditions and 0 <= prompt < n):
                raise ReportError(f"{where} has an arm, condition or prompt that is not in the plan")
        return report
