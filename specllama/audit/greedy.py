"""Compares greedy answers, and answers of one seed, with and without drafts; a control tells near-ties from bugs.

On some builds llama.cpp computes slightly different logits for one row than for several. The control reads the same
text token by token and in blocks. If this moves the gap of the two scores by at least half of it, the difference is a
near-tie of the build; anything else is a bug. The scores of a greedy answer are the logits; see `reference.scores`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from specllama.audit.models import Op, Recorded, again, held
from specllama.audit.parts import AuditEffort, AuditPrompt, AuditSubject, Combination
from specllama.audit.reference import masked, scores
from specllama.audit.report import GreedyRun, TextDifference
from specllama.base.errors import AllForbidden, Interrupted
from specllama.core.arrays import FloatArray
from specllama.core.constraint import Constraint
from specllama.core.engine import Engine
from specllama.core.events import Finished, TokenEvent
from specllama.core.no_drafter import NoDrafter
from specllama.core.noise import SharedNoise
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.stats import SpecStats
from specllama.core.types import Cancel, LanguageModel

WIDTHS = range(2, 10)  # of the control's blocks


@dataclass(frozen=True, slots=True)
class GreedyAnswer:
    """An answer without chance; `ended`: with an end token, which is not in `tokens`."""

    tokens: tuple[int, ...]
    ended: bool
    stats: SpecStats = field(compare=False)


def answer(
    engine: Engine,
    prompt: Sequence[int],
    params: SamplingParams,
    n_tokens: int,
    cancel: Cancel | None = None,
    noise: SharedNoise | None = None,
    constraint: Constraint | None = None,
) -> GreedyAnswer:
    """An answer of at most `n_tokens`, greedy or with `noise`. Raises Interrupted."""
    tokens: list[int] = []
    choose = noise or RandomChooser(0)
    for event in engine.generate(prompt, params, choose, max_tokens=n_tokens, cancel=cancel, constraint=constraint):
        if isinstance(event, TokenEvent):
            tokens.append(event.token)
        elif isinstance(event, Finished):
            if event.reason == "cancelled":
                break
            return GreedyAnswer(tuple(tokens), event.reason == "stop", event.stats)
    raise Interrupted("cancelled during a greedy answer")


@dataclass(frozen=True, slots=True)
class Control:
    """Logits or scores after a text, read token by token and in blocks of several widths.  each (V,)"""

    alone: FloatArray
    blocks: tuple[FloatArray, ...]

    def gap(self, a: int, b: int) -> float:
        """Difference of two tokens, read token by token."""
        return float(self.alone[a]) - float(self.alone[b])

    def moved(self, a: int, b: int) -> float:
        """Largest change of that gap when the text is read in blocks."""
        return max(abs(self.gap(a, b) - (float(row[a]) - float(row[b]))) for row in self.blocks)


def control(model: LanguageModel, prompt: Sequence[int], said: Sequence[int]) -> Control:
    """Reads prompt + `said` in blocks of every width, as a verifier may have read it.

    The prompt is read as in the first answer, its last token again as in the later ones.
    """
    model.truncate(0)
    model.feed(prompt[:-1])
    model.eval(prompt[-1:])
    rest = [prompt[-1], *said]

    def last_row(width: int) -> FloatArray:
        model.truncate(len(prompt) - 1)
        for at in range(0, len(rest), width):
            rows = model.eval(rest[at : at + width])
        return np.array(rows[-1], dtype=np.float64)

    widths = [width for width in WIDTHS if width <= model.caps.max_block]
    alone = last_row(1)
    return Control(alone, tuple(last_row(width) for width in widths) or (alone,))


def first_difference(plain: GreedyAnswer, ours: GreedyAnswer) -> int | None:
    """The position of the first token that differs; an end token counts as a token."""
    if (plain.tokens, plain.ended) == (ours.tokens, ours.ended):
        return None
    both = min(len(plain.tokens), len(ours.tokens))
    return next((i for i in range(both) if plain.tokens[i] != ours.tokens[i]), both)


class GreedyComparison:
    """Answers to one prompt, greedy, with the noise of one seed or in the format, compared with plain decoding."""

    def __init__(
        self,
        subject: AuditSubject,
        prompt: AuditPrompt,
        n_tokens: int,
        noise: SharedNoise | None = None,
        *,
        in_format: bool = False,
    ) -> None:
        self.in_format = in_format
        self.subject, self.prompt, self.n_tokens, self.noise = subject, prompt, n_tokens, noise
        self.params = subject.params if noise else replace(subject.params, temperature=0.0)
        self.target = Recorded(subject.parts.target(subject.target))
        self.engine = subject.parts.engine(self.target)
        self._controls: dict[int, Control] = {}
        # Every answer finds the prompt in the KV cache, as the first answer read it.
        self.target.empty()
        self._answer(1)
        self._reading: list[Op] = list(self.target.ops)
        self.plain = self._answer(n_tokens)

    def _answer(self, n_tokens: int) -> GreedyAnswer:
        subject, constraint = self.subject, None
        if self.in_format and subject.constraint is not None:
            constraint = subject.parts.constraint(subject.constraint())
        return answer(self.engine, self.prompt.tokens, self.params, n_tokens, subject.cancel, self.noise, constraint)

    def run(self, combination: Combination, n_max: int) -> GreedyRun:
        """Compares an answer with drafts of up to `n_max` tokens."""
        draft = self.subject.draft
        draft = None if draft is None else self.subject.parts.draft(draft)
        drafter = self.subject.drafter(combination.strategy, draft, n_max)
        self.engine.drafter, self.engine.rule = drafter, combination.rule
        self.target.ops[:] = self._reading
        failure = ""
        try:
            ours = self._answer(self.n_tokens)
        except (ValueError, AllForbidden) as error:  # a law that the noise did not settle, a mask of another text
            ours, failure = self.plain, str(error)
        finally:
            drafter.close()
            self.engine.drafter = NoDrafter()
        at = first_difference(self.plain, ours)
        return GreedyRun(
            prompt=self.prompt.name,
            strategy=combination.strategy,
            rule=combination.rule.value,
            n_max=n_max,
            n_tokens=len(ours.tokens),
            n_drafted=ours.stats.n_drafted,
            n_accepted=ours.stats.n_accepted,
            same_seed=self.noise is not None,
            in_format=self.in_format,
            failure=failure,
            difference=None if at is None else self._difference(ours, at),
        )

    def _reread(self, ops: Sequence[Op], line: Sequence[int]) -> FloatArray | None:
        """The row after `line`, read in the blocks of our answer, but with other tokens for the drafts.

        None if our answer did not read `line`: then the blocks do not explain the difference.
        """
        n_vocab, at = self.target.vocab_size, len(line) - 1
        deciding = [i for i, op in enumerate(ops) if op.kind == "eval" and op.at <= at < op.at + len(op.tokens)]
        # Later calls may have cut off the row, as at the end of an answer. The row of a tree has its position once its
        # path is kept.
        end = deciding[-1] + 1 if deciding else 0
        if deciding and ops[end - 1].nodes is not None:
            end = next((i for i in range(end, len(ops)) if ops[i].kind == "keep"), end - 1) + 1
        ops = ops[:end]
        if held(ops)[: len(line)] != tuple(line):
            return None
        return again(
            self.subject.target,
            ops,
            stale=lambda _, token: (token + 1) % n_vocab,
            kept=lambda position, token: token if position <= at else (token + 1) % n_vocab,
            want=at,
        )

    def _difference(self, ours: GreedyAnswer, at: int) -> TextDifference:
        ops, said = list(self.target.ops), self.plain.tokens[:at]
        target, prompt = self.subject.target, self.prompt.tokens
        line = (*prompt, *said)

        def scored(row: FloatArray) -> FloatArray:
            row = masked(row, self.subject.allowed_after(said)) if self.in_format else row
            return scores(row, line, self.params, self.noise)

        if at not in self._controls:
            found = control(target, prompt, said)
            self._controls[at] = Control(scored(found.alone), tuple(map(scored, found.blocks)))
        here = self._controls[at]
        reread = self._reread(ops, line)
        # The next answer must find the prompt in the KV cache.
        again(target, self._reading, stale=lambda _, token: token)
        a, b = (_token_at(each, at, here.alone, self.target.end_tokens) for each in (self.plain, ours))
        top = np.partition(here.alone, len(here.alone) - 2)[-2:]
        row = here.alone if reread is None else scored(reread)
        return TextDifference(
            at=at,
            plain=a,
            ours=b,
            plain_text=self.subject.piece(a).decode("utf-8", "replace"),
            our_text=self.subject.piece(b).decode("utf-8", "replace"),
            gap=here.gap(a, b),
            top_gap=float(top[1] - top[0]),
            moved=max(here.moved(a, b), abs(here.gap(a, b) - (float(row[a]) - float(row[b])))),
            reread=float(row[a]) - float(row[b]),
        )


def _token_at(said: GreedyAnswer, at: int, row: FloatArray, end_tokens: frozenset[int]) -> int:
    """The token of an answer at `at`; the most likely end token if the answer ended there."""
    if at < len(said.tokens):
        return said.tokens[at]
    return max(end_tokens, key=lambda token: float(row[token]), default=0)


def compare(subject: AuditSubject, effort: AuditEffort, *, only_in_format: bool = False) -> Iterator[GreedyRun]:
    """Every prompt with every K up to the longest, once with the seed's noise and once in the format.

    Strategies and rules take turns.
    """
    turn = 0
    for prompt in subject.prompts[: effort.n_prompts]:
        longest = subject.drafting.length.longest
        kinds = (
            (None, False, range(1, longest + 1)),
            (SharedNoise(subject.seed), False, (longest,)),
            (None, True, (longest,)),
        )
        for noise, in_format, lengths in kinds:
            if (in_format and subject.constraint is None) or (only_in_format and not in_format):
                continue
            try:
                comparison = GreedyComparison(subject, prompt, effort.n_tokens, noise, in_format=in_format)
            except AllForbidden as error:
                if not in_format:
                    raise
                rule = subject.rules[0].value
                yield GreedyRun(prompt.name, "none", rule, 0, 0, 0, 0, None, in_format=in_format, failure=str(error))
                continue
            for n_max in lengths:
                subject.require_going()
                yield comparison.run(subject.combinations[turn % len(subject.combinations)], n_max)
                turn += 1
