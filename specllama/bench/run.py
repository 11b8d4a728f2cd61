"""Runs a benchmark: prompt by prompt, all arms in turn. Yields events; the last one is the `BenchReport`."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from time import sleep as real_sleep

from specllama.base.clock import perf_counter
from specllama.base.errors import Interrupted, PromptError
from specllama.bench import insight as bench_insight
from specllama.bench import machine
from specllama.bench import plan as bench_plan
from specllama.bench import stats as bench_stats
from specllama.bench import verdict as bench_verdict
from specllama.bench.answer import Answerer, speed
from specllama.bench.insight import PlainAnswer
from specllama.bench.job import BenchEvent, BenchJob, BenchProgress, Loaded, Open, Steps, following
from specllama.bench.plan import ArmSpeed
from specllama.bench.report import Arm, BenchPlan, BenchReport, BenchRun, Condition, Insight, PairCosts, Spent
from specllama.bench.stats import Sizes
from specllama.core.gain import unmeasured
from specllama.core.types import Cancel, LanguageModel, room_after
from specllama.prompts.load import BenchPrompt
from specllama.tuning.costs import measuring_costs

COSTS_SHARE, MOST_COSTS_S = 0.06, 12.0  # share of the budget for measuring costs, and its limit in seconds
LATE_COSTS_SHARE = 0.25  # share after which it stops: its minimum of four rounds may take longer
INSIGHT_SHARE, MOST_INSIGHT_S = 0.08, 60.0
OVERRUN = 1.1  # the plan is cut short when it would exceed the budget by this factor
N_COST_TOKENS = 128  # tokens of the text that costs are measured with; half of them are prefilled
N_WARM_UP = 16  # tokens of every arm's warm-up
WARM_UP_SHARE, LEAST_WARM_UP = 0.1, 3  # share of the budget for warming up, but at least so many tokens of every arm
NOTE_TOKENS = 96  # by which the notes before a prompt may exceed the requested length

COSTS = "measuring the cost of a pass"


class _TooSlow(Exception):
    pass


class _Bench:
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
        self._swapped_before = machine.swapped_bytes()
        self._answerer = Answerer(job, cancel, clock)
        self._fitting: list[tuple[BenchPrompt, int]] = []
        self._asked = {prompt.id: prompt for prompt in job.prompts}
        self._speeds: dict[str, ArmSpeed] = {}  # by arm's name
        self._notices: dict[str, None] = {}  # of the drafters, without duplicates
        self._said: dict[tuple[int, int], PlainAnswer] = {}  # plain answers by condition and prompt
        self._arms = bench_plan.arms(self.wishes)
        self._plan: BenchPlan | None = None
        self._runs: list[BenchRun] = []
        self._costs: list[PairCosts] = []
        self._insights: list[Insight] = []
        self._partial = "it was interrupted"  # until everything is done

    def _run(
        self, loaded: Loaded, plan: BenchPlan, arm: int, condition: int, prompt: int, repetition: int
    ) -> Generator[BenchEvent, None, BenchRun]:
        wanted = plan.conditions[condition]
        question = self._answerer.question(loaded, self._asked[plan.prompts[prompt].id], wanted)
        # The same for all arms; different for every prompt and repetition.
        seed = self.job.seed + 1000 * repetition + prompt
        measured = (each.profile for each in self._costs if each.load == plan.arms[arm].load)
        cost = next((profile.measured_cost for profile in measured), unmeasured)
        answer = yield from following(
            self._answerer.answering(
                loaded, plan.arms[arm], wanted, question, seed=seed, n_predict=wanted.n_predict, cost=cost
            ),
            lambda share: self._progress(plan, plan.arms[arm], prompt, share),
        )
        self._notices.update(dict.fromkeys(answer.notices))
        if arm == 0 and repetition == 0:
            self._said[condition, prompt] = PlainAnswer(question.tokens, answer.tokens)
        return BenchRun(
            arm=arm,
            condition=condition,
            prompt=prompt,
            repetition=repetition,
            reason=answer.finished.reason,
            stats=replace(answer.finished.stats, passes=[]),
            gain=answer.finished.stats.gain,
            steps_s=answer.steps_s,
            rss=machine.rss(),
            gpu_bytes=machine.gpu_bytes() if self.job.machine.gpus else None,
        )

    def _budget(self, share: float, most: float) -> float:
        return most if self.wishes.budget_s is None else min(share * self.wishes.budget_s, most)

    def _left_s(self) -> float:
        """What is left of the budget, which covers everything but loading."""
        if self.wishes.budget_s is None:
            return math.inf
        return self.wishes.budget_s - (self._clock() - self._started - self._loading_s)

    def _find_fitting(self, loaded: Loaded) -> list[tuple[BenchPrompt, int]]:
        """The prompts that leave room for the longest answer, in the order of the plan, each with its number of tokens.

        Raises PromptError if there are none.
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
                hint="use a longer context (--ctx-size) or shorter answers (-n)",
            )
        return fitting

    def _measure_costs(self, loaded: Loaded, load: int) -> Steps:
        text = [token for prompt, _ in self._fitting[:8] for token in loaded.tokens(prompt.turns[0])]
        n_known = min(model.vocab_size for model in (loaded.target, *loaded.drafts))
        known = [token for token in text if token < n_known]
        drafts: Sequence[LanguageModel | None] = loaded.drafts or (None,)
        seconds = self._budget(COSTS_SHARE, MOST_COSTS_S) / (len(drafts) * len(self.wishes.loads))
        late = self._clock() + self._budget(LATE_COSTS_SHARE, math.inf) / len(self.wishes.loads)
        for index, draft in enumerate(drafts):
            yield BenchProgress(COSTS, index / len(drafts))
            n = min(N_COST_TOKENS, loaded.target.n_ctx, draft.n_ctx if draft else N_COST_TOKENS)
            tokens = (known * (n // len(known) + 1))[:n] if known else []
            while draft is not None and tokens and room_after(draft, tokens) < 0:  # a token may take several cells
                tokens.pop()
            if len(tokens) < 2:
                return

            def progress(share: float, index: int = index) -> BenchProgress:
                if self._clock() > late:
                    raise _TooSlow
                return BenchProgress(COSTS, (index + share) / len(drafts))

            try:
                with closing(measuring_costs(loaded.target, draft, tokens, seconds=seconds, clock=self._clock)) as work:
                    costs = yield from following(work, progress)
            except _TooSlow:
                self._notices["the costs of a pass were not measured: the budget is too small for this machine"] = None
                return
            number = None if draft is None else index
            self._costs.append(
                PairCosts(load=load, draft=number, step_s=costs.step_s, profile=costs.profile, noise=costs.noise)
            )

    def _warm_up(self, loaded: Loaded, load: int) -> Steps:
        """A short answer of every arm, which is not counted, but measures the speeds that the plan is made from."""
        condition = Condition(temperature=self.wishes.temperatures[0])
        shortest = min(self._fitting, key=lambda each: each[1])[0]
        question = self._answerer.question(loaded, shortest, condition)
        arms = [arm for arm in self._arms if arm.load == load]
        # Without costs the machine is too slow for the budget.
        step_s = next((each.step_s for each in self._costs if each.load == load), math.inf)
        most_s = self._budget(WARM_UP_SHARE, math.inf) / len(self._arms)
        n_fit = N_WARM_UP if step_s * N_WARM_UP <= most_s else int(most_s / step_s)
        n_predict = max(n_fit, LEAST_WARM_UP)
        for index, arm in enumerate(arms):

            def progress(share: float, name: str = arm.name, index: int = index) -> BenchProgress:
                return BenchProgress(f"warming up: {name}", (index + share) / len(arms))

            yield progress(0.0)
            answer = yield from following(
                self._answerer.answering(loaded, arm, condition, question, seed=self.job.seed, n_predict=n_predict),
                progress,
            )
            self._speeds[arm.name] = speed(answer)

    def _use(self, load: int) -> Generator[BenchEvent, None, Loaded]:
        """The models of a load; opens them and warms them up if they are not in memory."""
        if self._at != load or self._loaded is None:
            self._loaded, self._at = None, None
            self._stack.close()
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

    def _make_plan(self) -> BenchPlan:
        speeds = [self._speeds[arm.name] for arm in self._arms]
        insight_s = self._budget(INSIGHT_SHARE, MOST_INSIGHT_S)
        return bench_plan.fit(self.wishes, self._fitting, speeds, self._left_s() - insight_s)

    def _progress(self, plan: BenchPlan, arm: Arm, prompt: int, of_run: float = 0.0) -> BenchProgress:
        """The time left follows from the plan until every arm has run once, then from the runs.

        At most the budget, or what the prompt in hand still takes: all arms finish it.
        """
        share, spent_s = (len(self._runs) + of_run) / plan.n_runs, self._clock() - self._runs_began
        block = len(plan.arms) * len(plan.conditions)
        whole_s = spent_s / share if len(self._runs) >= block else plan.expected_s
        in_hand_s = (block - len(self._runs) % block - of_run) / plan.n_runs * whole_s
        left_s = min((1.0 - share) * whole_s, max(self._left_s(), in_hand_s))
        what = f"prompt {prompt + 1} of {len(plan.prompts)} ({plan.prompts[prompt].category}), {arm.name}"
        return BenchProgress(what, share, left_s if math.isfinite(left_s) else None)

    def _block(self, loaded: Loaded, plan: BenchPlan, load: int, prompt: int, repetition: int) -> Steps:
        """One prompt under every condition: all arms of the load, each time in another order."""
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

    def _measure(self, plan: BenchPlan) -> Generator[BenchEvent, None, str]:
        """Runs the plan and returns '', or why it was cut short; then all arms have run the same prompts."""
        self._runs_began = self._clock()
        n_loads, block_s = len(plan.loads), 0.0
        for repetition in range(plan.n_repetitions):
            n_prompts = len(plan.prompts)
            loads = range(n_loads) if repetition % 2 == 0 else range(n_loads - 1, -1, -1)
            for turn, load in enumerate(loads):
                loaded = yield from self._use(load)
                began = self._clock()
                for prompt in range(n_prompts):
                    least = 1 if repetition == 0 else 0  # a report needs at least one prompt
                    # The later loads of this repetition must have time for the same prompts.
                    n_blocks = (prompt + 1) * (n_loads - 1) + 1
                    left_s = self._left_s() + (OVERRUN - 1.0) * (self.wishes.budget_s or 0.0)
                    if turn == 0 and prompt >= least and n_blocks * block_s > left_s:
                        n_prompts = prompt
                        break
                    yield from self._block(loaded, plan, load, prompt, repetition)
                    block_s = (self._clock() - began) / (prompt + 1)
            if n_prompts < len(plan.prompts):
                return f"the budget was used up after {len(self._runs)} of {plan.n_runs} runs"
        return ""

    def _find_insights(self, plan: BenchPlan) -> Steps:
        """Acceptance by kind of token for every draft and temperature, as far as the budget allows."""
        loaded = self._loaded
        if loaded is None or not loaded.drafts or self.job.synthetic is not None or loaded.constraint() is not None:
            return  # the insights are those of free text
        began = self._clock()
        most_s = min(self._budget(INSIGHT_SHARE, MOST_INSIGHT_S), self._left_s())
        # At least one answer must fit; both models read it at the speed of the prefill.
        n_least = min((len(said.prompt) + len(said.answer) for said in self._said.values()), default=0)
        if most_s <= 2.0 * n_least / self._speeds[self._arms[0].name].prefill_tok_s:
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
                        yield BenchProgress("analysing the acceptance", min(spent_s / most_s, 1.0), left_s)
                        found += bench_insight.samples(loaded.target, model, said, params, loaded.piece)
                if found:
                    self._insights.append(bench_insight.insight(draft, temperature, found))

    def _report(self, plan: BenchPlan) -> BenchReport:
        first, job = self._first, self.job
        assert first is not None
        sizes = Sizes(
            target=first.n_target_bytes, drafts=first.n_draft_bytes, memory_bytes_s=job.machine.memory_bytes_s
        )
        plain = [run.stats.decode_tok_s or 0.0 for run in self._runs if run.arm == 0 and run.condition == 0]
        end = self._runs_ended if self._runs_ended > self._runs_began else self._clock()
        doubts = machine.doubts(job.machine, self._swapped_before, plain)
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
            rows=bench_stats.rows(plan, self._runs, self._costs, sizes),
            picks=bench_stats.picks(plan, self._runs),
            verdict="",
            partial=self._partial,
            synthetic=job.synthetic,
            spent=Spent(
                loading_s=self._loading_s,
                costs_s=self._costs_s,
                warm_up_s=self._warm_up_s,
                runs_s=end - self._runs_began,
                insight_s=self._clock() - end,
                arms_s=tuple(sum(run.latency_s for run in self._runs if run.arm == i) for i in range(len(plan.arms))),
            ),
            warnings=(*job.warnings, *first.warnings, *self._notices, *doubts),
        )
        return replace(report, verdict=bench_verdict.verdict(report))

    def _everything(self) -> Steps:
        # Every load is tried before the first counted run, so that a load that fails wastes no measurements.
        for load in reversed(range(len(self.wishes.loads))):
            yield from self._use(load)
        self._plan = plan = self._make_plan()
        yield plan
        cut = yield from self._measure(plan)
        self._runs_ended = self._clock()
        yield from self._find_insights(plan)
        self._partial = cut

    def events(self) -> Iterator[BenchEvent]:
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
    """The events of a benchmark: the plan before the first counted run, the report last.

    `open_load(i)` loads the models with the options of `job.wishes.loads[i]`. If `cancel` is set or an error occurs,
    the report is partial; the error is raised after the report. Raises Interrupted if nothing was measured, PromptError
    if no prompt fits, and the errors of loading.
    """
    return _Bench(job, open_load, cancel or Cancel(), clock, sleep).events()
