"""One answer of a benchmark: the prompt at the length of its condition, fresh caches, and a fresh drafter."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from statistics import median

from specllama.base.clock import perf_counter
from specllama.base.errors import Interrupted
from specllama.bench.job import BenchJob, Loaded
from specllama.bench.plan import ArmSpeed
from specllama.bench.report import Arm, Condition
from specllama.bench.synthetic import SyntheticChooser
from specllama.core.engine import Engine
from specllama.core.events import Event, Finished, Notice, PromptProgress, StepEvent, TokenEvent
from specllama.core.gain import Cost, unmeasured
from specllama.core.kept_prefix import KeptPrefix
from specllama.core.noise import SeedMode
from specllama.core.sampling import SamplingParams
from specllama.core.types import Cancel, Drafter, Rule
from specllama.drafters import REGISTRY, DraftSettings
from specllama.prompts.filler import notes
from specllama.prompts.load import BenchPrompt

PROGRESS_S = 0.5  # between two reports of progress
N_PRIMED = 3  # tokens after which the draft has read the text before the prompt


@dataclass(frozen=True, slots=True)
class Question:
    """The tokens of a prompt under a condition, template included."""

    before: tuple[int, ...]  # in both caches before the clock starts
    tokens: tuple[int, ...]  # starts with `before`


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """The outcome of one answer."""

    finished: Finished
    steps_s: tuple[float, ...]  # of every step but the first
    tokens: tuple[int, ...]
    notices: tuple[str, ...]  # from the drafter, such as "its context is full"


def speed(answer: TimedAnswer) -> ArmSpeed:
    """`draft_read_s` is the time of the steps above their median: the draft reads the prompt in one of the first."""
    stats, steps = answer.finished.stats, answer.steps_s
    usual_s = median(steps) if steps else 0.0
    per_step = (stats.n_emitted - stats.n_first) / len(steps) if steps else 1.0
    return ArmSpeed(
        prefill_tok_s=stats.prompt_tok_s or math.inf,
        decode_tok_s=per_step / usual_s if usual_s and per_step else math.inf,
        draft_read_s=max(sum(steps) - len(steps) * usual_s, 0.0) / stats.n_prompt,
    )


class Answerer:
    """Runs the prompts of a job on loaded models."""

    def __init__(self, job: BenchJob, cancel: Cancel, clock: Callable[[], float] = perf_counter) -> None:
        self._job = job
        self._cancel = cancel
        self._clock = clock
        self._questions: dict[tuple[str, int, int], Question] = {}
        self._kept: KeptPrefix | None = None

    def question(self, loaded: Loaded, prompt: BenchPrompt, condition: Condition) -> Question:
        """The prompt after as many notes as the condition needs."""
        key = (prompt.id, condition.n_depth, condition.n_prompt)
        if key not in self._questions:
            text = prompt.turns[0]
            bare = loaded.tokens(text)
            deep = notes(condition.n_depth, loaded.count)
            missing = max(condition.n_prompt - len(bare), 0)
            whole = notes(condition.n_depth + missing, loaded.count) if missing else deep
            tokens = loaded.tokens(whole + text) if whole else bare
            before = loaded.tokens(deep) if deep else []
            self._questions[key] = Question(tuple(before), tuple(tokens))
        return self._questions[key]

    def params(self, loaded: Loaded, condition: Condition) -> SamplingParams:
        """Sampling settings; end tokens are forbidden where lengths are fixed."""
        biases = dict(self._job.params.logit_bias)
        if self._job.wishes.fixed_length:
            biases.update(dict.fromkeys(loaded.target.end_tokens, -math.inf))
        return replace(self._job.params, temperature=condition.temperature, logit_bias=biases)

    def _drafter(self, loaded: Loaded, arm: Arm, params: SamplingParams) -> Drafter:
        """A new drafter for every answer, so that no run profits from an earlier one."""
        return REGISTRY[arm.spec_type].make(
            loaded.drafts[arm.draft] if arm.draft is not None else None,
            DraftSettings(
                length=arm.length,
                p_min=self._job.p_min,
                temperature=self._job.draft_temperature,
                vocab_size=loaded.target.vocab_size,
                n_leaves=loaded.target.caps.max_leaves,
                policy=loaded.policy(arm, params) if arm.length.is_auto else None,
            ),
        )

    def answering(
        self,
        loaded: Loaded,
        arm: Arm,
        condition: Condition,
        question: Question,
        *,
        seed: int,
        n_predict: int,
        cost: Cost = unmeasured,
    ) -> Generator[float, None, TimedAnswer]:
        """One answer; yields the share that is done from time to time. Raises Interrupted.

        The caches start empty, or with `question.before`. `cost`: of the target's passes.
        """
        if not question.before:
            for model in (loaded.target, *loaded.drafts):
                model.truncate(0)
        # Kept between answers, so that the target reads the text before the prompt only once.
        self._kept = KeptPrefix.of(loaded.target)
        params = self.params(loaded, condition)
        drafter = self._drafter(loaded, arm, params)
        engine = Engine(loaded.target, drafter, rule=Rule(arm.verify_rule), cost=cost)
        try:
            if question.before:
                primed = SeedMode(arm.seed_mode).chooser(seed)
                deque(engine.generate(question.before, params, primed, max_tokens=N_PRIMED, cancel=self._cancel), 0)
            choose = SeedMode(arm.seed_mode).chooser(seed)
            if self._job.synthetic is not None and not arm.plain:
                choose = SyntheticChooser(choose, self._job.synthetic, seed)
            events, n_said, reported = list[Event](), 0, self._clock()
            answer = engine.generate(
                question.tokens,
                params,
                choose,
                max_tokens=n_predict,
                cancel=self._cancel,
                constraint=loaded.constraint(),
            )
            for event in answer:
                events.append(event)
                n_said += isinstance(event, TokenEvent)
                # Only between steps, and seldom: the listener's time must not count.
                if isinstance(event, (StepEvent, PromptProgress)) and self._clock() - reported >= PROGRESS_S:
                    yield n_said / n_predict
                    reported = self._clock()
        finally:
            drafter.close()
        finished = events[-1]
        assert isinstance(finished, Finished), "the engine's last event is always Finished"
        if finished.reason == "cancelled":
            raise Interrupted("the benchmark was stopped on request")
        return TimedAnswer(
            finished,
            tuple(event.step_s for event in events if isinstance(event, StepEvent) and event.step > 0),
            tuple(event.token for event in events if isinstance(event, TokenEvent)),
            tuple(event.text for event in events if isinstance(event, Notice)),
        )
