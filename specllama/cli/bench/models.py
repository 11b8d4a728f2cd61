"""The models of `bench`: the files that the options name, checked, and opened for each load of the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product

from specllama import llama
from specllama.base.errors import UsageError
from specllama.base.text import counted
from specllama.bench.job import Loaded
from specllama.bench.plan import LENGTHS, Wishes
from specllama.bench.report import Load
from specllama.chat.conversation import Conversation, Message
from specllama.chat.format import AnswerFormat
from specllama.chat.format_masks import constraint_of
from specllama.chat.settings import require_known
from specllama.cli.bench.options import BenchDrafting, BenchHardware, BenchModels, BenchRuns, BenchSampling
from specllama.cli.loading import Said, hardware_of, names_of
from specllama.cli.record import describe_model
from specllama.cli.screen.keyboard import silent_keyboard
from specllama.cli.screen.output import Output
from specllama.cli.screen.worker import interruptible
from specllama.cli.tuned import measured, tune_command
from specllama.core.types import Cancel, LanguageModel
from specllama.drafters import REGISTRY, TRANSLATED, TREE
from specllama.drafters.controller import PROBE_TOKENS
from specllama.drafters.length import AUTO_LENGTH, TUNED, DraftLength
from specllama.files.inventory import checksum_of
from specllama.llama import LlamaModel, LoadOptions, memory
from specllama.pairs import setup as pair_setup
from specllama.pairs.ask import Ask, Drafting, Hardware, Names
from specllama.pairs.draft_in_target_ids import in_target_ids
from specllama.pairs.naming import named
from specllama.pairs.profile import LOOKUP_ALONE
from specllama.pairs.setup import File, Listener, Setup, require_draft

ROOM_FOR_PROMPTS = 2048  # tokens, besides --depth and --prompt-length
_LEAST_BLOCK = TUNED + 1  # most rows that costs are measured with


@dataclass(frozen=True, slots=True)
class BenchSetup(Setup):
    """A setup whose draft computes many rows at once, to measure its acceptance."""

    def draft_options(self, n_ctx: int) -> LoadOptions:
        return replace(Setup.draft_options(self, n_ctx), max_block=PROBE_TOKENS)


@dataclass(frozen=True, slots=True)
class BenchSubject:
    """Files that fit together, and how to load them."""

    setups: tuple[BenchSetup, ...]  # of the first load, one for each draft; one if there is no draft
    strategies: tuple[str, ...]
    n_swept: int  # drafts that were asked for; one more is the profile's own
    auto_strategy: str  # of a profile's controller; empty without a profile
    without_auto: str = ""  # why `auto`, which was asked for, is left out

    @property
    def target(self) -> File:
        return self.setups[0].target

    @property
    def drafts(self) -> tuple[File, ...]:
        return tuple(setup.draft for setup in self.setups if setup.draft is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the drafts in the report: stems, or paths if two stems are the same."""
        names = [file.path.stem for file in self.drafts]
        return tuple(names if len(set(names)) == len(names) else map(str, (file.path for file in self.drafts)))


def loads_of(hardware: BenchHardware) -> tuple[Load, ...]:
    """Every combination of load options."""
    crossed = product(
        hardware.threads or (None,),
        hardware.cache_type_k,
        hardware.cache_type_v,
        hardware.cache_type_k_draft,
        hardware.rollback,
    )
    return tuple(
        Load(n_threads=threads, type_k=type_k, type_v=type_v, type_k_draft=type_k_draft, rollback=rollback)
        for threads, type_k, type_v, type_k_draft, rollback in crossed
    )


def hardware_for(options: BenchHardware, load: Load) -> Hardware:
    """The hardware options with the values of one load."""
    return replace(
        hardware_of(options),
        n_threads=load.n_threads,
        type_k=load.type_k,
        type_v=load.type_v,
        type_k_draft=load.type_k_draft,
        rollback=load.rollback,
    )


def _n_wanted(sampling: BenchSampling, runs: BenchRuns) -> int:
    """Tokens of context for the longest prompt and answer."""
    longest = max(sampling.predict or (LENGTHS[0][0],))
    n_wanted: int = max(runs.depth) + max(runs.prompt_length) + longest + ROOM_FOR_PROMPTS
    return n_wanted


def _without_auto(tuned: Setup, names: Names) -> str:
    """Why there is no controller; empty if a profile has one."""
    if tuned.profile is not None:
        return ""
    reason = f"the profile of this pair is not used: {tuned.stale}" if tuned.stale else "this pair is not tuned"
    return f"auto is left out: {reason} (`{tune_command(names, tuned.model_strategy)}`)"


def prepare(
    models: BenchModels,
    drafting: BenchDrafting,
    sampling: BenchSampling,
    hardware: BenchHardware,
    runs: BenchRuns,
    output: Output,
) -> BenchSubject:
    """The setups of all drafts; measures a pair without a profile. Raises the errors of `pairs.setup`, and SystemExit
    after a signal while it measures.
    """
    extra = models.model_draft or []
    one = replace(names_of(models), draft=extra[0] if extra else None)
    listener = Said(output)
    plain = hardware_for(hardware, loads_of(hardware)[0])
    names = [name for name in drafting.spec_type if name == "auto" or REGISTRY[name].needs_model]
    longest = max([1, *(each.longest for each in drafting.spec_draft_n_max if not each.is_auto)])
    if TRANSLATED in names and set(names) - {TRANSLATED}:  # all drafts are translated, or none
        raise UsageError(
            "--spec-type draft-tli is for drafts with another tokenizer and cannot be mixed with the other strategies",
            hint="run two benchmarks, then: specllama bench compare A.json B.json",
        )
    wanted = Drafting(spec_type=(names or ["lookup"])[0], length=DraftLength(longest))
    choice = pair_setup.choose(Ask(names=one, drafting=wanted, hardware=plain), listener)
    if hardware.ctx_size is None:
        choice = replace(choice, n_wanted=_n_wanted(sampling, runs))
    more = pair_setup.resolve([named(name, draft=True) for name in extra[1:]], listener, offline=models.offline)
    first = pair_setup.prepare(choice, listener)
    for load in loads_of(hardware):
        options = replace(first.target_options, rollback=load.rollback)
        pair_setup.require_way(replace(first, target_options=options))
    require_known(replace(sampling, temp=0.0).params.logit_bias, first.target.header.n_vocab)
    auto = first.model_strategy if first.draft is not None else LOOKUP_ALONE
    strategies = tuple(dict.fromkeys(auto if name == "auto" else name for name in drafting.spec_type))
    require_draft(strategies, has_draft=first.draft is not None)
    tuned, without_auto = first, ""
    if AUTO_LENGTH in drafting.spec_draft_n_max:
        tuned = pair_setup.tuned(first, any_strategy=True)
        if tuned.profile is None and drafting.measure == "auto":
            tuned = _measured(tuned, output)
        without_auto = _without_auto(tuned, one)
        if without_auto:
            output.note(f"note: {without_auto}")
    leaves = pair_setup.LEAVES if TREE in strategies else 1
    options = replace(tuned.target_options, max_block=max(longest + 1, _LEAST_BLOCK), max_leaves=leaves)
    files = [first.draft, *(pair_setup.bring(each, listener, offline=models.offline) for each in more)]
    n_swept = len(files) if first.draft is not None else 0
    if tuned.draft is not None and tuned.draft.path != (first.draft and first.draft.path):
        files.append(tuned.draft)
    setups = []
    for file in files:
        profile = pair_setup.profile_for(file, first, tuned.profile)
        by = first.strategy, DraftLength.auto(TUNED), profile
        setup = BenchSetup(first.target, file, options, plain, *by, model_strategy=first.model_strategy)
        pair_setup.require_fit(setup, listener)
        setups.append(setup)
    auto_strategy = tuned.strategy if tuned.profile is not None else ""
    subject = BenchSubject(tuple(setups), strategies, n_swept, auto_strategy, without_auto)
    _require_memory(subject)
    summed = tuple(
        replace(each, target=_with_sum(each.target), draft=each.draft and _with_sum(each.draft)) for each in setups
    )
    return replace(subject, setups=summed)


def _measured(setup: Setup, output: Output) -> Setup:
    """`setup` with a profile, measured on models that are loaded for it: the plan needs it before the first load."""
    if setup.draft is None:
        return setup
    pair_setup.require_fit(setup, Listener())
    setup = replace(setup, target_options=replace(setup.target_options, max_block=_LEAST_BLOCK), measures=True)
    cancel = Cancel()
    with (
        silent_keyboard(output.out) as restore,
        interruptible(cancel, restore),
        pair_setup.load_models(setup, Said(output), cancel) as models,
    ):
        models.watch(cancel)
        return measured(setup, models, output)


def _with_sum(file: File) -> File:
    """The file with its SHA-256, for the report."""
    return file if file.sha256 else replace(file, sha256=checksum_of(file.path))


def _require_memory(subject: BenchSubject) -> None:
    """Raise MemoryShort if the target and all drafts together do not fit."""
    first = subject.setups[0]
    n_ctx = first.target_options.n_ctx
    if n_ctx == 0 or llama.build_info().gpu_offload:
        return
    needed = llama.memory_needed(first.target.header, first.target_options).total
    for setup in subject.setups:
        if setup.draft is not None:
            needed += llama.memory_needed(setup.draft.header, setup.draft_options(n_ctx)).total
    what = f"the target and {counted(len(subject.drafts), 'draft')}"
    memory.require_memory(what, needed, llama.memory_free(), n_ctx, "fewer drafts")


@dataclass(frozen=True, slots=True)
class Opener:
    """Opens the models of a load; see `bench.job.Open`."""

    subject: BenchSubject
    hardware: BenchHardware
    loads: Sequence[Load]
    cancel: Cancel
    form: AnswerFormat | None = None

    def _setup(self, setup: BenchSetup, load: Load) -> BenchSetup:
        options = replace(setup.target_options, type_k=load.type_k, type_v=load.type_v, rollback=load.rollback)
        if load.n_threads is not None:  # else the profile's
            options = replace(options, n_threads=load.n_threads)
        return replace(setup, target_options=options, hardware=hardware_for(self.hardware, load))

    @contextmanager
    def __call__(self, load: int) -> Iterator[Loaded]:
        """The models, freed at the end of the context. Raises the errors of loading."""
        setups = [self._setup(setup, self.loads[load]) for setup in self.subject.setups]
        with ExitStack() as owned:
            # A silent listener: this second thread must not draw. Warnings go into the report.
            models = owned.enter_context(pair_setup.load_models(setups[0], Listener(), self.cancel))
            files = [models.loaded_draft] if models.loaded_draft is not None else []
            speaking = [models.draft] if models.draft is not None else []
            for setup in setups[1:]:
                assert setup.draft is not None, "only a first setup may lack a draft"
                options = setup.draft_options(models.target.n_ctx)
                files.append(owned.enter_context(llama.load(setup.draft.header, options)))
                speaking.append(in_target_ids(models.target, files[-1], strategy=setup.model_strategy))
                owned.callback(speaking[-1].close)
            for model in (models.target, *files):
                model.watch(self.cancel)
            yield self._loaded(setups[0], models.target, speaking, files)

    def _loaded(
        self, setup: Setup, target: LlamaModel, speaking: Sequence[LanguageModel], files: Sequence[LlamaModel]
    ) -> Loaded:
        """`speaking`: the drafts in the target's ids; `files`: the same drafts in their own ids."""
        conversation = Conversation(target.vocab, setup.target.template)
        return Loaded(
            target=target,
            drafts=tuple(speaking),
            tokens=lambda text: conversation.tokens([Message("user", text)]),
            count=lambda text: len(target.vocab.tokenize(text, special=False)),
            piece=target.vocab.piece,
            policy=lambda arm, params: setup.policy(greedy=params.greedy, strategy=arm.spec_type),
            target_facts=describe_model(setup.target, target),
            draft_facts=tuple(map(describe_model, self.subject.drafts, files)),
            n_target_bytes=target.n_bytes,
            n_draft_bytes=tuple(draft.n_bytes for draft in files),
            warnings=tuple(warning for model in (target, *files) for warning in model.warnings),
            constraint=lambda: constraint_of(self.form, target.vocab),
        )


def wishes_of(subject: BenchSubject, drafting: BenchDrafting, sampling: BenchSampling, hardware: BenchHardware,
              runs: BenchRuns) -> Wishes:  # fmt: skip
    """What to measure. Raises UsageError for a synthetic acceptance with the match rule."""
    rules = drafting.verify_rule
    if runs.synthetic is not None:
        # Only the token rule decides on every token separately.
        if set(rules) - {"block", "token"}:
            raise UsageError("--synthetic needs the token rule", hint="omit --verify-rule")
        if "same" in sampling.seed_mode:
            raise UsageError("--synthetic draws at random", hint="omit --seed-mode")
        rules = ("token",)
    return Wishes(
        loads=loads_of(hardware),
        drafts=subject.names,
        n_swept=subject.n_swept,
        strategies=subject.strategies,
        lengths=drafting.spec_draft_n_max,
        auto_strategy=subject.auto_strategy,
        auto_draft=max(len(subject.drafts) - 1, 0) if len(subject.drafts) > subject.n_swept else 0,
        rules=rules,
        seed_modes=sampling.seed_mode,
        temperatures=sampling.temp,
        depths=runs.depth,
        n_prompt=runs.prompt_length,
        n_predict=sampling.predict or (),
        n_prompts=runs.n_prompts,
        n_repetitions=runs.repetitions,
        fixed_length=not runs.natural_stop,
        delay_s=runs.delay,
        budget_s=runs.budget,
    )
