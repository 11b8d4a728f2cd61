"""Counters of one or more answers, and the figures derived from them (vLLM's definitions)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from specllama.base.text import counted
from specllama.core.gain import Gain, TimedPass, gain

if TYPE_CHECKING:
    from specllama.core.events import StepEvent


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None


def _add(into: list[int], more: Sequence[int]) -> None:
    """Add `more` to `into` position by position; `into` grows as needed."""
    into.extend([0] * (len(more) - len(into)))
    for i, n in enumerate(more):
        into[i] += n


def expected_tokens(alpha: float, k: int) -> float:
    """Mean tokens a step emits when each of `k` drafted tokens is accepted with probability `alpha`.

    1 + a + ... + a^k, as a sum because the quotient divides by 0 at a = 1. Source: Leviathan et al., arXiv 2211.17192,
    eq. 1.
    """
    return sum(alpha**i for i in range(k + 1))


def expected_speedup(alpha: float, k: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Predicted speed over plain decoding: E / (k*c + T(k+1)/T(1)).

    `draft_cost`: one draft step, `verify_cost`: one pass over k+1 rows, both measured and in units of T(1); the paper
    assumes `verify_cost=1.0`. Source: Leviathan et al., arXiv 2211.17192, theorem 3.8.
    """
    return expected_tokens(alpha, k) / (k * draft_cost + verify_cost)


@dataclass(slots=True)
class SpecStats:
    """Every `*_s` is in seconds; every rate is a fraction, or None if nothing was counted."""

    n_prompt: int = 0
    n_cached: int = 0  # prompt tokens that the KV already held
    n_emitted: int = 0  # TokenEvents
    n_first: int = 0  # emitted tokens of the first pass, whose time belongs to the prompt
    n_from_draft: int = 0  # emitted tokens that were drafted
    n_steps: int = 0  # verify passes of the target, with and without a draft
    n_spec_steps: int = 0  # verify passes with at least one drafted token
    n_drafted: int = 0  # drafted tokens submitted to a verify pass: of a tree, all its nodes
    n_accepted: int = 0
    n_looked_up: int = 0  # drafted tokens that were copied from the text, or forced by a constraint
    n_looked_up_accepted: int = 0
    n_rejected: int = 0  # verify passes that ended in a rejection: of a tree, of every token drafted for one place
    accepted_at: list[int] = field(default_factory=list)  # per position (of a tree, depth): accepted tokens
    drafted_at: list[int] = field(default_factory=list)  # per position (of a tree, depth): drafted tokens
    accepted_lengths: list[int] = field(default_factory=list)  # histogram: spec steps that accepted i tokens
    prompt_s: float = 0.0  # from the start to the first row of logits: prefill and the first pass
    # The first pass belongs to the prompt and is left out of the following.
    draft_s: float = 0.0  # inside drafter.propose
    eval_s: float = 0.0  # inside target.eval
    sample_s: float = 0.0  # laws and verification
    kv_s: float = 0.0  # keep, and the drafter's observe
    decode_s: float = 0.0  # wall time of all steps, without the time the reader takes between events
    loop_s: float = 0.0  # whole answer, prompt included: the time outside the models' own calls
    passes: list[TimedPass] = field(default_factory=list)  # after the first, with a drafter; not in JSON

    def __str__(self) -> str:
        speed = "" if self.decode_tok_s is None else f", {self.decode_tok_s:.1f} tokens/s"
        if (found := self.gain) is not None:
            speed += f" ({found.value:.1f}x plain)"
        if not self.n_drafted:
            return f"{counted(self.n_emitted, 'token')}{speed}"
        return (
            f"{counted(self.n_emitted, 'token')}{speed}; {self.n_accepted} of {self.n_drafted} drafted tokens "
            f"accepted, {self.n_emitted / self.n_steps:.2f} tokens per step"
        )

    def record(self, n_drafted: int, n_accepted: int, rejected: bool, levels: Sequence[int] | None = None) -> None:
        """Count one verify pass; `rejected`: it ended in a rejection.

        `levels`: drafted tokens by depth; None = a chain.
        """
        levels = [1] * n_drafted if levels is None else levels
        if not 0 <= n_accepted <= len(levels):
            raise ValueError(f"accepted {n_accepted} of {n_drafted} drafted tokens")
        self.n_steps += 1
        if self.n_steps == 1:
            self.n_first = n_accepted + 1
        self.n_drafted += n_drafted
        self.n_accepted += n_accepted
        self.n_rejected += rejected
        if n_drafted:
            self.n_spec_steps += 1
            _add(self.drafted_at, levels)
            _add(self.accepted_at, [1] * n_accepted)
            _add(self.accepted_lengths, [0] * n_accepted + [1])

    def take(self, event: StepEvent, *, drafts: bool = True) -> None:
        """Count a step and its times; the first pass counts as prompt, whose last token it reads.

        `drafts`: False in plain decoding, which has no gain.
        """
        self.record(len(event.drafted), event.accepted, event.rejected, event.levels)
        self.n_looked_up += event.looked_up
        self.n_looked_up_accepted += event.accepted_looked_up
        self.loop_s += event.loop_s
        whole_s = event.draft_s + event.eval_s + event.sample_s + event.kv_s
        if self.n_steps == 1:
            self.prompt_s += whole_s
            return
        self.draft_s += event.draft_s
        self.eval_s += event.eval_s
        self.sample_s += event.sample_s
        self.kv_s += event.kv_s
        self.decode_s += whole_s
        if drafts:
            n_tokens = event.accepted + 1
            self.passes.append(TimedPass(event.n_rows, n_tokens, event.cost, event.eval_s, event.sample_s, whole_s))

    def to_json(self) -> dict[str, object]:
        """The counters and times, without the passes."""
        stats = asdict(replace(self, passes=[]))
        del stats["passes"]
        return stats

    def merge(self, other: SpecStats) -> None:
        for name in self.__dataclass_fields__:
            mine, more = getattr(self, name), getattr(other, name)
            if name == "passes":
                mine += more
            elif isinstance(mine, list):
                _add(mine, more)
            else:
                setattr(self, name, mine + more)

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted; falls with k, because tokens behind the first rejection count as drafted.

        Of a tree at most one child of a node is accepted, so it falls with the width as well.
        """
        return _ratio(self.n_accepted, self.n_drafted)

    @property
    def alpha(self) -> float | None:
        """Per-token acceptance for the cost model: accepted / (accepted + rejections). Of a tree, per depth."""
        return _ratio(self.n_accepted, self.n_accepted + self.n_rejected)

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / steps with a draft: tokens per verify pass, with the correction or bonus."""
        return 1 + self.n_accepted / self.n_spec_steps if self.n_spec_steps else None

    @property
    def acceptance_per_position(self) -> list[float]:
        """Accepted at position i / steps with a draft: unconditional, so it never rises with i."""
        accepted = self.accepted_at + [0] * (len(self.drafted_at) - len(self.accepted_at))
        return [n / self.n_spec_steps for n in accepted]

    @property
    def from_draft(self) -> float | None:
        return _ratio(self.n_from_draft, self.n_emitted)

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens per second after the first pass; None if it emitted all of them."""
        n_after = self.n_emitted - self.n_first
        return _ratio(n_after, self.decode_s) if n_after > 0 else None

    @property
    def gain(self) -> Gain | None:
        """Speed over plain decoding, see core/gain; None without a drafter, or if T(1) is not known."""
        return gain(self.passes)

    @property
    def prompt_tok_s(self) -> float | None:
        """Prompt tokens read per second, without those found in the KV."""
        return _ratio(self.n_prompt - self.n_cached, self.prompt_s)
