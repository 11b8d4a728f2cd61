"""What a pool measures: speed, latencies, where the time goes, and how full its passes are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields

import numpy as np

from specllama.batch.request import Done
from specllama.core.stats import SpecStats

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of seconds over requests."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread | None:
        """None without a value."""
        return cls(*map(float, np.percentile(seconds, PERCENTILES))) if seconds else None


@dataclass(slots=True)
class BatchStats:
    """Counters of a pool; every `*_s` is in seconds.

    `elapsed_s` = draft_s + verify_s + prompt_s + kv_s + request_s + scheduling_s. The times in `spec` are as the
    requests saw them: they hold the passes and turns of others.
    """

    n_slots: int = 0
    kv_bytes: int = 0  # of target and draft, all slots
    compute_bytes: int = 0  # what else is planned for their passes
    n_requests: int = 0  # that have ended
    n_failed: int = 0  # of them, with an error
    n_active: int = 0  # in a slot now
    spec: SpecStats = field(default_factory=SpecStats)  # of all requests that have ended
    elapsed_s: float = 0.0  # inside the pool, without the time that the caller takes
    draft_s: float = 0.0  # passes of the draft model
    verify_s: float = 0.0  # passes of the target: their part for tokens with logits
    prompt_s: float = 0.0  # the rest of them
    kv_s: float = 0.0  # tokens removed and kept
    turns_s: float = 0.0  # kv_s, and what requests compute themselves: sampling, verification, lookups
    n_passes: int = 0  # of the target
    n_rows: int = 0  # tokens with logits in these
    n_read: int = 0  # the other tokens in these
    n_draft_passes: int = 0
    n_draft_rows: int = 0
    n_draft_read: int = 0
    first_s: list[float] = field(default_factory=list)  # per request: from its start to its first token
    token_s: list[float] = field(default_factory=list)  # per request: mean time of a token after the first
    latency_s: list[float] = field(default_factory=list)  # per request: from its start to its end
    waiting_s: list[float] = field(default_factory=list)  # per request: `Times.waited_s`

    def count_pass(self, n_rows: int, n_read: int, seconds: float) -> None:
        """A pass of the target."""
        self.n_passes += 1
        self.n_rows += n_rows
        self.n_read += n_read
        verify_s = seconds * n_rows / (n_rows + n_read)
        self.verify_s += verify_s
        self.prompt_s += seconds - verify_s

    def count_draft_pass(self, n_rows: int, n_read: int, seconds: float) -> None:
        self.n_draft_passes += 1
        self.n_draft_rows += n_rows
        self.n_draft_read += n_read
        self.draft_s += seconds

    def add(self, done: Done) -> None:
        """Count a request that has ended."""
        self.n_requests += 1
        self.n_failed += done.error is not None
        self.spec.merge(done.stats)
        times = done.times
        if times is None or done.reason not in ("stop", "length"):
            return
        self.latency_s.append(times.ended - times.started)
        self.waiting_s.append(times.waited_s)
        if times.first is not None:
            self.first_s.append(times.first - times.started)
            if len(done.tokens) > 1:
                self.token_s.append((times.ended - times.first) / (len(done.tokens) - 1))

    def merge(self, other: BatchStats) -> None:
        """Add the counters of another pool for as many requests at once."""
        self.spec.merge(other.spec)
        for each in fields(self):
            mine, more = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, list):
                mine += more
            elif each.name not in ("n_slots", "kv_bytes", "compute_bytes", "spec"):
                setattr(self, each.name, mine + more)

    @property
    def request_s(self) -> float:
        """Sampling, verification, lookups and the rest of what requests compute themselves."""
        return self.turns_s - self.kv_s

    @property
    def scheduling_s(self) -> float:
        """Choosing passes, and changing from one request to another."""
        return self.elapsed_s - self.draft_s - self.verify_s - self.prompt_s - self.turns_s

    @property
    def answers_s(self) -> float | None:
        """Answers a second."""
        return (self.n_requests - self.n_failed) / self.elapsed_s if self.elapsed_s else None

    @property
    def tokens_s(self) -> float | None:
        """Tokens of finished answers a second."""
        return self.spec.n_emitted / self.elapsed_s if self.elapsed_s else None

    @property
    def rows_per_pass(self) -> float | None:
        """Rows with logits in a pass of the target."""
        return self.n_rows / self.n_passes if self.n_passes else None

    def to_json(self) -> dict[str, object]:
        """The counters, rates and percentiles."""
        spreads = ("first_s", "token_s", "latency_s", "waiting_s")
        rates = ("request_s", "scheduling_s", "answers_s", "tokens_s", "rows_per_pass")
        plain = {name: getattr(self, name) for name in (*self.__dataclass_fields__, *rates)}
        found = {name: Spread.of(plain[name]) for name in spreads}
        return {**plain, **{name: each and asdict(each) for name, each in found.items()}, "spec": self.spec.to_json()}
