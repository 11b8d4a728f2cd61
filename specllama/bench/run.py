"""The benchmark: the run matrix, run prompt by prompt with all arms in turn, as events and at last a `BenchReport`."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from statistics import median
from time import perf_counter
from time import sleep as real_sleep

from specllama.base.errors import Interrupted, PromptError
from specllama.bench import insight as bench_insight
from specllama.bench import machine
from specllama.bench import plan as bench_plan
from specllama.bench import stats as bench_stats
from specllama.bench import verdict as bench_verdict
from specllama.bench.answer import Answerer, WarmUpSpeed, speed
from specllama.bench.insight import Said
from specllama.bench.job import BenchEvent, BenchJob, BenchProgress, Loaded, Open, Steps, following
from specllama.bench.plan import Rates
from specllama.bench.report import Arm, BenchPlan, BenchReport, BenchRun, Insight, PairCosts, Spent
from specllama.bench.stats import Sizes
from specllama.core.types import Cancel, LanguageModel, room_after
from specllama.prompts.load import BenchPrompt
from specllama.tuning.costs import measuring_costs

COSTS_SHARE, MOST_COSTS_S = 0.06, 12.0  # of the budget, for measuring what passes cost; of every load and draft
INSIGHT_SHARE, MOST_INSIGHT_S = 0.08, 60.0
OVERRUN = 1.1  # of the budget that may be spent before the plan is cut short
N_COST_TOKENS = 128  # text that passes are measured with, half of it before them
N_WARM_UP = 16  # tokens of every arm before anything counts
WARM_UP_SHARE, LEAST_WARM_UP = 0.1, 3  # of the budget, if that is enough for so many tokens of every arm
NOTE_TOKENS = 96  # by which the notes before a prompt may be longer than they should be

COSTS = "measuring what passes cost"
_INTERRUPTED = "it was interrupted"


class _Bench:
    """One benchmark; see `bench`."""

    def __init__(self, job: BenchJob, open_load: Open, cancel: Cancel, clock: Callable[[], float],
                 sleep: Callable[[float], None]) -> None:  # fmt: skip
        self.job, self.wishes = job, job.wishes
        self._open, self._cancel, self._clock, self._sleep = open_load, cancel, clock, sleep
        self._started = clock()
        self._runs_began = self._runs_ended = self._started
        self._loading_s = self._costs_s = self._warm_up_s = 0.0  # before the first counted run
        self._stack = ExitStack()
        self._at: int | None = None  # the load whose models are open
        self._loaded: Loaded | None = None
        self._first: Loaded | None = None  # of the first load: facts for the report
        self._watch = machine.Watch.begin()
        self._answerer = Answerer(job, cancel, clock)
        self._fitting: list[tuple[BenchPrompt, int]] = []
        self._asked = {prompt.id: prompt for prompt in job.prompts}
        self._rates: dict[str, WarmUpSpeed] = {}  # by arm's name
        self._notices: dict[str, None] = {}  # what the drafters had to say, each once
        self._said: dict[tuple[int, int], Said] = {}  # plain answers by condition and prompt
        self._arms, self._warm_condition = bench_plan.for_warming_up(self.wishes)
        self._plan: BenchPlan | None = None
        self._runs: list[BenchRun] = []
        self._costs: list[PairCosts] = []
        self._insights: list[Insight] = []
        self._partial = _INTERRUPTED  # until everything is done

    def _run(
        self, loaded: Loaded, plan: BenchPlan, arm: int, condition: int, prompt: int, repetition: int
    ) -> Generator[BenchEvent, None, BenchRun]:
        """One counted run."""
        wanted = plan.conditions[condition]
        question = self._answerer.question(loaded, self._asked[plan.prompts[prompt].id], wanted)
        # The same seed for all arms; another for every prompt and repetition.
        seed = self.job.seed + 1000 * repetition + prompt
        answer = yield from following(
            self._answerer.answering(loaded, plan.arms[arm], wanted, question, seed=seed, n_predict=wanted.n_predict),
            lambda share: self._progress(plan, plan.arms[arm], prompt, share),
        )
        self._notices.update(dict.fromkeys(answer.notices))
        if arm == 0 and repetition == 0:
            self._said[condition, prompt] = Said(question.tokens, answer.tokens)
        return BenchRun(
            arm=arm,
            condition=condition,
            prompt=prompt,
            repetition=repetition,
            reason=answer.finished.reason,
            stats=answer.finished.stats,
            steps_s=answer.steps_s,
            rss=machine.rss(),
            gpu_bytes=machine.gpu_bytes() if self.job.machine.gpus else None,
        )

    # ------------------------------------------------------------------------------------------ before the counted runs

    def _budget(self, share: float, most: float) -> float:
        return most if self.wishes.budget_s is None else min(share * self.wishes.budget_s, most)

    def _left_s(self) -> float:
        """What is left of the budget, which is for everything but loading."""
        if self.wishes.budget_s is None:
            return math.inf
        return self.wishes.budget_s - (self._clock() - self._started - self._loading_s)

    def _find_fitting(self, loaded: Loaded) -> list[tuple[BenchPrompt, int]]:
        """The prompts that leave room for the longest answer, each with its tokens, in the order of the plan.

        Raises PromptError where none does.
        """
        longest = max(self.wishes.n_predict or [n for n, _ in bench_plan.LENGTHS])
        fitting = []
        for prompt in bench_plan.spread(self.job.prompts):
            n = len(loaded.tokens(prompt.turns[0]))
            filled = max(n, max(self.wishes.n_prompt)) + max(self.wishes.depths)
            if self.wishes.depths != (0,) or self.wishes.n_prompt != (0,):
                filled += NOTE_TOKENS
            if n > 1 and filled + longest <= loaded.target.n_ctx:
                fitting.append((prompt, n))
        if not fitting:
            raise PromptError(
                f"no prompt and its answer fit a context of {loaded.target.n_ctx} tokens",
                hint="ask for a longer one (--ctx-size), or for shorter answers (-n)",
            )
        return fitting

    def _measure_costs(self, loaded: Loaded, load: int) -> Steps:
        """T(n), and the costs of every draft."""
        text = [token for prompt, _ in self._fitting[:8] for token in loaded.tokens(prompt.turns[0])]
        n_known = min(model.vocab_size for model in (loaded.target, *loaded.drafts))
        known = [token for token in text if token < n_known]
        drafts: Sequence[LanguageModel | None] = loaded.drafts or (None,)
        seconds = self._budget(COSTS_SHARE, MOST_COSTS_S) / (len(drafts) * len(self.wishes.loads))
        for index, draft in enumerate(drafts):
            yield BenchProgress(COSTS, index / len(drafts))
            n = min(N_COST_TOKENS, loaded.target.n_ctx, draft.n_ctx if draft else N_COST_TOKENS)
            tokens = (known * (n // len(known) + 1))[:n] if known else []
            while draft is not None and tokens and room_after(draft, tokens) < 0:  # it may spell them with several
                tokens.pop()
            if len(tokens) < 2:
                return
            costs = yield from following(
                measuring_costs(loaded.target, draft, tokens, seconds=seconds, clock=self._clock),
                lambda share, index=index: BenchProgress(COSTS, (index + share) / len(drafts)),  # type: ignore[misc]
            )
            self._costs.append(
                PairCosts(
                    load=load,
                    draft=index if draft is not None else None,
                    step_s=costs.step_s,
                    profile=costs.profile,
                    noise=costs.noise,
                )
            )

    def _n_warm_up(self, load: int) -> int:
        """Tokens of every arm of a load, by what one is known to take; fewer on a machine too slow for the budget."""
        step_s = next((each.step_s for each in self._costs if each.load == load), 0.0)
        most_s = self._budget(WARM_UP_SHARE, math.inf) / len(self._arms)
        n_fit = N_WARM_UP if step_s * N_WARM_UP <= most_s else int(most_s / step_s)
        return max(n_fit, LEAST_WARM_UP)

    def _warm_up(self, loaded: Loaded, load: int) -> Steps:
        """A short answer of every arm, which does not count; but it tells how fast things go."""
        shortest = min(self._fitting, key=lambda each: each[1])[0]
        question = self._answerer.question(loaded, shortest, self._warm_condition)
        arms = [arm for arm in self._arms if arm.load == load]
        n_predict = self._n_warm_up(load)
        for index, arm in enumerate(arms):

            def told(share: float, name: str = arm.name, index: int = index) -> BenchProgress:
                return BenchProgress(f"warming up: {name}", (index + share) / len(arms))

            yield told(0.0)
            answer = yield from following(
                self._answerer.answering(
                    loaded, arm, self._warm_condition, question, seed=self.job.seed, n_predict=n_predict
                ),
                told,
            )
            self._rates[arm.name] = speed(answer)

    def _use(self, load: int) -> Generator[BenchEvent, None, Loaded]:
        """The models of a load, opened and warmed up if they are not the ones in memory."""
        if self._at != load or self._loaded is None:
            self._close()
            yield BenchProgress("loading", 0.0)
            began = self._clock()
            self._loaded = self._stack.enter_context(self._open(load))
            loaded = self._clock()
            self._at = load
            if load == 0:
                self._first = self._loaded
            self._fitting = self._fitting or self._find_fitting(self._loaded)
            if all(each.load != load for each in self._costs):
                yield from self._measure_costs(self._loaded, load)
            measured = self._clock()
            yield from self._warm_up(self._loaded, load)
            if self._plan is None:
                self._loading_s += loaded - began
                self._costs_s += measured - loaded
                self._warm_up_s += self._clock() - measured
        return self._loaded

    def _close(self) -> None:
        self._loaded, self._at = None, None
        self._stack.close()

    def _make_plan(self) -> BenchPlan:
        """Fixed now, and never changed."""
        known = [self._rates[arm.name] for arm in self._arms]
        rates = Rates(
            prefill_tok_s=median(each.prefill_tok_s for each in known),
            decode_tok_s=[each.decode_tok_s for each in known],
            draft_read_s=[each.draft_read_s for each in known],
        )
        insight_s = self._budget(INSIGHT_SHARE, MOST_INSIGHT_S)
        return bench_plan.fit(self.wishes, self._fitting, rates, self._left_s() - insight_s)

    # ------------------------------------------------------------------------------------------------- the counted runs

    def _progress(self, plan: BenchPlan, arm: Arm, prompt: int, of_run: float = 0.0) -> BenchProgress:
        """How far, and for how long still: as was expected until all arms had a turn, then as fast as it went so far.

        No longer than the budget lets it.
        """
        share, spent_s = (len(self._runs) + of_run) / plan.n_runs, self._clock() - self._runs_began
        block = len(plan.arms) * len(plan.conditions)
        whole_s = spent_s / share if len(self._runs) >= block else plan.expected_s
        left_s = min((1.0 - share) * whole_s, max(self._left_s(), 0.0))
        what = f"prompt {prompt + 1} of {len(plan.prompts)} ({plan.prompts[prompt].category}), {arm.name}"
        return BenchProgress(what, share, left_s if math.isfinite(left_s) else None)

    def _block(self, loaded: Loaded, plan: BenchPlan, load: int, prompt: int, repetition: int) -> Steps:
        """One prompt: every condition, all arms of the load in turn, each time in another order."""
        ours = [index for index, arm in enumerate(plan.arms) if arm.load == load]
        for condition in range(len(plan.conditions)):
            for arm in bench_plan.in_turn(ours, prompt + condition + repetition):
                yield self._progress(plan, plan.arms[arm], prompt)
                if plan.delay_s:
                    self._sleep(plan.delay_s)
                if self._cancel.is_set():
                    raise Interrupted("the benchmark was stopped on request")
                run = yield from self._run(loaded, plan, arm, condition, prompt, repetition)
                self._runs.append(run)
                yield run

    def _is_late(self, block_s: float, n_blocks: int) -> bool:
        """Would `n_blocks` blocks more overrun the budget?"""
        if self.wishes.budget_s is None:
            return False
        return n_blocks * block_s > self._left_s() + (OVERRUN - 1.0) * self.wishes.budget_s

    def _measure(self, plan: BenchPlan) -> Generator[BenchEvent, None, str]:
        """All repetitions; why not all of them, or ''. Where time runs out, all arms have done the same prompts."""
        self._runs_began = self._clock()
        n_loads, block_s = len(plan.loads), 0.0
        for repetition in range(plan.n_repetitions):
            n_prompts = len(plan.prompts)
            loads = range(n_loads) if repetition % 2 == 0 else range(n_loads - 1, -1, -1)
            for turn, load in enumerate(loads):
                loaded = yield from self._use(load)
                began = self._clock()
                for prompt in range(n_prompts):
                    least = 1 if repetition == 0 else 0  # a report of nothing helps nobody
                    # The loads that follow in this repetition must be able to do what this one did, and one more.
                    if turn == 0 and prompt >= least and self._is_late(block_s, (prompt + 1) * (n_loads - 1) + 1):
                        n_prompts = prompt
                        break
                    yield from self._block(loaded, plan, load, prompt, repetition)
                    block_s = (self._clock() - began) / (prompt + 1)
            if n_prompts < len(plan.prompts):
                return f"the budget was spent after {len(self._runs)} of {plan.n_runs} runs"
        return ""

    def _look_into(self, plan: BenchPlan) -> Steps:
        """When the drafts were right, at every temperature, as far as there is time for it."""
        loaded = self._loaded
        if loaded is None or not loaded.drafts or self.job.synthetic is not None:
            return
        began = self._clock()
        most_s = min(self._budget(INSIGHT_SHARE, MOST_INSIGHT_S), self._left_s())
        # One answer is read by both models at least, as slowly as the prompts were.
        n_least = min((len(said.prompt) + len(said.answer) for said in self._said.values()), default=0)
        if most_s <= 2.0 * n_least / self._rates[self._arms[0].name].prefill_tok_s:
            return
        by_temperature: dict[float, int] = {}
        for index, condition in enumerate(plan.conditions):
            by_temperature.setdefault(condition.temperature, index)
        n_turns = len(by_temperature) * len(loaded.drafts)
        for number, (temperature, index) in enumerate(by_temperature.items()):
            params = self._answerer.params(loaded, plan.conditions[index])
            for draft, model in enumerate(loaded.drafts):
                until = began + most_s * (number * len(loaded.drafts) + draft + 1) / n_turns
                found: list[bench_insight.Sample] = []
                for (of_condition, _), said in self._said.items():
                    if of_condition == index and (not found or self._clock() < until):
                        spent_s = self._clock() - began
                        left_s = max(most_s - spent_s, 0.0)
                        yield BenchProgress("looking at what was accepted", min(spent_s / most_s, 1.0), left_s)
                        found += bench_insight.samples(loaded.target, model, said, params, loaded.piece)
                if found:
                    self._insights.append(bench_insight.insight(draft, temperature, found))

    # ---------------------------------------------------------------------------------------------------------- the end

    def _report(self, plan: BenchPlan) -> BenchReport:
        first, job = self._first, self.job
        assert first is not None
        sizes = Sizes(
            target=first.n_target_bytes, drafts=first.n_draft_bytes, memory_bytes_s=job.machine.memory_bytes_s
        )
        rows = bench_stats.rows(plan, self._runs, self._costs, sizes)
        picks = bench_stats.picks(plan, self._runs)
        plain = [run.stats.decode_tok_s or 0.0 for run in self._runs if run.arm == 0 and run.condition == 0]
        report = BenchReport(
            made=job.made,
            command=job.command,
            settings=job.settings,
            versions=job.versions,
            target=first.target_facts,
            drafts=first.draft_facts,
            machine=job.machine,
            plan=plan,
            runs=tuple(self._runs),
            costs=tuple(self._costs),
            insights=tuple(self._insights),
            rows=rows,
            picks=picks,
            verdict="",
            partial=self._partial,
            synthetic=job.synthetic,
            spent=self._spent(),
            warnings=(*job.warnings, *first.warnings, *self._notices, *self._watch.warnings(job.machine, plain)),
        )
        return replace(report, verdict=bench_verdict.verdict(report))

    def _spent(self) -> Spent:
        end = self._runs_ended if self._runs_ended > self._runs_began else self._clock()
        return Spent(
            loading_s=self._loading_s,
            costs_s=self._costs_s,
            warm_up_s=self._warm_up_s,
            runs_s=end - self._runs_began,
            insight_s=self._clock() - end,
            arms_s=tuple(sum(run.latency_s for run in self._runs if run.arm == arm) for arm in range(len(self._arms))),
        )

    def _everything(self) -> Steps:
        """From the first load to the last look."""
        # Every load is tried before the first counted run: what the second one cannot do must not cost the first.
        for load in reversed(range(len(self.wishes.loads))):
            yield from self._use(load)
        self._plan = plan = self._make_plan()
        yield plan
        cut = yield from self._measure(plan)
        self._runs_ended = self._clock()
        yield from self._look_into(plan)
        self._partial = cut

    def events(self) -> Iterator[BenchEvent]:
        """See `bench`."""
        failure: Exception | None = None
        with self._stack, suppress(Interrupted):
            try:
                yield from self._everything()
            except Interrupted:
                raise
            except Exception as error:
                failure = error
                self._partial = f"an error ended it ({error if str(error) else type(error).__name__})"
        if self._plan is None or not self._runs:
            raise failure or Interrupted("the benchmark was stopped before anything was measured")
        yield self._report(self._plan)
        if failure is not None:
            raise failure


def bench(
    job: BenchJob,
    open_load: Open,
    cancel: Cancel | None = None,
    *,
    clock: Callable[[], float] = perf_counter,
    sleep: Callable[[float], None] = real_sleep,
) -> Iterator[BenchEvent]:
    """Measure; the events of it, the plan before the first counted run, the last one the report.

    `open_load` loads the models as one of `job.wishes.loads` wants them. Where `cancel` is set the report holds what
    was measured until then and says so; so it does where an error ends the benchmark, which is raised behind the
    report. Raises Interrupted where nothing was measured, PromptError where no prompt fits, and what loading raises.
    """
    return _Bench(job, open_load, cancel or Cancel(), clock, sleep).events()
