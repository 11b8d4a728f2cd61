"""From an `Ask` to models ready to answer: choose them, fetch them, check what can be checked, load them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, perf_counter

from specllama import llama
from specllama.base.disk import FetchWatch, Silent, size_text
from specllama.base.errors import BackendError, ConfigError, Interrupted, MemoryShort, SpecllamaError, UsageError
from specllama.base.ranges import AUTO
from specllama.base.text import counted
from specllama.chat import template
from specllama.core.gain import Cost, unmeasured
from specllama.core.types import Cancel, Drafter, DraftPolicy, LanguageModel
from specllama.drafters import REGISTRY, SIMPLE, TRANSLATED, TREE, DraftSettings
from specllama.drafters.calibration import Calibration, Prior
from specllama.drafters.controller import PROBE_TOKENS, UNMEASURED, Controller, CostProfile, rows_of
from specllama.drafters.length import NO_DRAFTS, TUNED, DraftLength
from specllama.drafters.tree_controller import TreeController
from specllama.files import hub, hub_cache
from specllama.files.catalog import load_catalog
from specllama.files.inventory import known_checksum_of
from specllama.files.model import Model, PairDefaults
from specllama.llama import Header, LlamaModel, LoadOptions, crash_test, memory, rpc, tested_kernels
from specllama.llama.header import refuse_architecture
from specllama.llama.kernel_path import AS_IN_FILE, KernelPath
from specllama.llama.rollback import WINDOW
from specllama.llama.ways import possible
from specllama.pairs import derived
from specllama.pairs import profile as profiles
from specllama.pairs.ask import Ask, Drafting, Hardware
from specllama.pairs.check import Candidate, check_pair
from specllama.pairs.draft_in_target_ids import DraftModel, in_target_ids
from specllama.pairs.naming import Wanted, named
from specllama.pairs.profile import LOOKUP_ALONE, LoadSeconds, Profile, ProfileKey

N_CTX = 4096  # unless an option or the pair says otherwise
LEAVES = 16  # most of a tree: each is a sequence in llama.cpp's cache
# Of the time that a profile expects a draft to save: answers of benchmarks/README.md save about half of it.
LIKELY = 0.5
FREE_SHARE = 0.9  # of the free memory: what a context of 0 may take


class Listener:
    """Receives what happens before an answer. This one ignores everything; subclasses show what they need."""

    def note(self, text: str) -> None:
        """A fact that the user should know."""

    def warn(self, text: str, hint: str = "") -> None:
        """A problem that stops nothing, and what to do about it."""

    def detail(self, text: str) -> None:
        """A fact for verbose output."""

    def fetching(self) -> AbstractContextManager[FetchWatch]:
        """Entered while a model is fetched."""
        return nullcontext(Silent())

    def lost(self, error: SpecllamaError) -> None:
        """The process ends after this with exit code 1: a server of llama.cpp is gone. Runs in any thread."""
        rpc.say(error)

    def working(self, what: str) -> AbstractContextManager[None]:
        """Entered for work that may take seconds the first time, such as "testing the files"."""
        return nullcontext()

    def loading(self) -> AbstractContextManager[Callable[[float, int], None]]:
        """Entered while models are loaded. The function receives the share that is loaded and the size in bytes."""
        return nullcontext(lambda _share, _n_bytes: None)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which models, which strategy and how to load. No file has been looked up yet."""

    target: Wanted
    draft: Wanted | None  # None if the strategy uses no draft model
    strategy: str
    n_ctx: int | None  # 0 = see `longest_context`; None = N_CTX as far as the target was trained for it
    length: DraftLength
    any_strategy: bool = False  # the pair's profile, if it exists, chooses the strategy
    model_strategy: str = SIMPLE  # how the draft model drafts, alone or in a chain: SIMPLE or TRANSLATED
    hardware: Hardware = field(default_factory=Hardware)
    offline: bool = False
    measure: bool = True  # see `Drafting`
    recommended: bool = False  # it is a pair of the shipped models.toml
    n_wanted: int = 0  # tokens of context to have at least, as far as the target was trained for them

    def context(self, target: Header) -> int:
        """Tokens of context to load `target` with."""
        n_ctx = usual_context(target) if self.n_ctx is None else self.n_ctx
        return max(n_ctx, usual_context(target, self.n_wanted)) if self.n_wanted else n_ctx


def usual_context(target: Header, n_ctx: int = N_CTX) -> int:
    """`n_ctx`, at most the training context."""
    return min(n_ctx, target.n_ctx_train or n_ctx)


def choose(ask: Ask, listener: Listener) -> Choice:
    """Resolve the names and the strategy. Raises UsageError and ConfigError."""
    names, drafting, hardware = ask.names, ask.drafting, ask.hardware
    target: Wanted | None = named(names.target) if names.target else names.target_repo
    given = names.draft or names.draft_repo
    if target is None and given:
        raise UsageError(
            f"a draft is given ({given}) but no target, expected both",
            hint="name its target: -m MODEL, -hf USER/REPO, or target= in Python",
        )
    draft: Wanted | None = named(names.draft, draft=True) if names.draft else names.draft_repo
    defaults, recommended = PairDefaults(), False
    if target is None:
        catalog = load_catalog()
        for note in catalog.notes:
            listener.note(f"note: {note}")
        pair = catalog.pair(names.pair)
        target, draft, defaults, recommended = pair.target, pair.draft, pair.defaults, pair.recommended
    any_strategy = drafting.spec_type == AUTO
    asked = drafting.length
    longest = (asked.is_auto and defaults.n_max) or asked.longest
    strategy = _strategy(drafting.spec_type, has_draft=draft is not None) if longest else "none"
    if strategy == TREE and drafting.p_min:
        raise UsageError("a tree has no p-min, expected 0", hint="leave --spec-draft-p-min out, or draft chains")
    # An explicit p-min, or no drafts at all, switches auto off.
    is_auto = asked.is_auto and not drafting.p_min and (any_strategy or strategy != "none")
    longest = TUNED if is_auto else longest
    return Choice(
        target,
        draft if REGISTRY[strategy].needs_model else None,
        strategy,
        n_ctx=defaults.n_ctx if hardware.n_ctx is None else hardware.n_ctx,
        length=DraftLength(longest, is_auto=is_auto),
        any_strategy=any_strategy,
        model_strategy=TRANSLATED if TRANSLATED in drafting.spec_type.split(",") else SIMPLE,
        hardware=hardware,
        offline=names.offline,
        measure=drafting.measure,
        recommended=recommended,
    )


def _strategy(spec_type: str, *, has_draft: bool) -> str:
    """The one strategy for the allowed ones. Raises UsageError if one of them needs a draft model and there is none."""
    if spec_type == AUTO:
        return SIMPLE if has_draft else "none"
    names = spec_type.split(",")
    require_draft(names, has_draft=has_draft)
    if TREE in names:  # it has lookups and the model
        return TREE
    drafting = [name for name in names if name != "none"]
    with_model = [name for name in drafting if REGISTRY[name].needs_model]
    return "chain" if with_model and "lookup" in drafting else next(iter(drafting), "none")


def require_draft(strategies: Iterable[str], *, has_draft: bool) -> None:
    """Raise UsageError if a strategy needs a draft model and there is none."""
    for name in strategies:
        if REGISTRY[name].needs_model and not has_draft:
            raise UsageError(
                f"the strategy {name} needs a draft model (got none)",
                hint="add -md MODEL, -hfd USER/REPO, or draft= in Python",
            )


@dataclass(frozen=True, slots=True)
class File:
    """A model file on this disk and its header."""

    header: Header
    sha256: str | None  # None = not computed: hashing gigabytes at every start takes too long
    source: str

    @property
    def path(self) -> Path:
        return self.header.path

    @property
    def template(self) -> str | None:
        """The chat template; None if the file has none."""
        return self.header.chat_template


def resolve(
    wanted: Sequence[Wanted], listener: Listener, *, offline: bool = False, update: bool = False
) -> list[Model | Path]:
    """The models and files that the names mean. Raises DownloadError and ModelFileError for a wrong name.

    A command resolves all of its names first, so that no model is fetched in vain.
    """
    with listener.fetching() as watch:
        found = [
            hub.repo_model(each, offline=offline, watch=watch, update=update) if isinstance(each, str) else each
            for each in wanted
        ]
        missing = [each for each in found if isinstance(each, Model) and (update or hub.find(each) is None)]
        if missing and not (offline or hub_cache.is_offline()):
            for each in found:
                if isinstance(each, Path):
                    llama.read_header(each, needs_weights=False)
            for each in missing:
                hub.look_up(each, watch=watch, update=update)
    return found


def bring(wanted: Model | Path, listener: Listener, *, offline: bool = False) -> File:
    """The file of a model, fetched if it is not here. Raises DownloadError and ModelFileError."""
    if isinstance(wanted, Path):
        return File(llama.read_header(wanted), known_checksum_of(wanted), "path")
    fetched = fetch(wanted, listener, offline=offline)
    return File(llama.read_header(fetched.path), fetched.sha256, fetched.source)


def fetch(model: Model, listener: Listener, *, offline: bool = False, update: bool = False) -> hub.Fetched:
    """A model from this disk or its sources. Raises as `hub.fetch`."""
    start = monotonic()
    with listener.fetching() as watch:
        fetched = hub.fetch(model, offline=offline, watch=watch, update=update)
    if fetched.source != hub.CACHE:
        listener.note(f"fetched {fetched.path.name} from {fetched.source} in {_duration(monotonic() - start)}")
    return fetched


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


@dataclass(frozen=True, slots=True)
class Setup:
    """Files on this disk and how to load them. Nothing is loaded yet."""

    target: File
    draft: File | None
    target_options: LoadOptions
    hardware: Hardware
    strategy: str = "none"
    length: DraftLength = NO_DRAFTS
    profile: Profile | None = None  # sets the draft length
    measured: Profile | None = None  # what is known of the pair if the user set the length
    stale: str = ""  # why the profile of `tune` is not used
    model_strategy: str = SIMPLE  # see `Choice`
    any_strategy: bool = False  # see `Choice`
    recommended: bool = False  # see `Choice`
    measures: bool = False  # there is no profile, and one is to be made once the models are loaded
    completes: bool = False  # the profile `is_partial` or `is_due`: costs are to be measured when no answer waits
    too_short: str = ""  # why no draft is loaded for an answer of so few tokens
    untuned: ProfileKey | None = None  # `subject` before a profile or the memory changed the draft and the options

    @property
    def looks(self) -> bool:
        """True if the costs to be measured are those of a complete profile, again."""
        return self.completes and self.profile is not None and not self.profile.is_partial

    @property
    def subject(self) -> ProfileKey:
        """The key of the pair's profile."""
        if self.untuned is not None:
            return self.untuned
        key = ProfileKey(self.target.path, self.target_options, model_strategy=self.model_strategy)
        if self.draft is None:
            return key
        return replace(key, draft=self.draft.path, draft_options=self.draft_options(self.target_options.n_ctx))

    def policy(self, *, greedy: bool, strategy: str = "") -> DraftPolicy | None:
        """The controller of the draft length for one answer or chat; None for a fixed length.

        `strategy`: another one than that of the setup.
        """
        if not self.length.is_auto:
            return None
        profile = self.profile
        prior = Prior() if profile is None else profile.prior(greedy=greedy)
        calibration = Calibration(replace(prior, known=prior.known or self.recommended))
        costs = self.assumed_costs if profile is None else profile.costs
        kind = TreeController if (strategy or self.strategy) == TREE else Controller
        return kind(costs, n_max=self.length.longest, calibration=calibration)

    @property
    def assumed_costs(self) -> CostProfile:
        """Costs that are not measured: the steepest curve known, and a draft in proportion to its size."""
        share = 1.0 if self.draft is None else self.draft.header.n_file_bytes / self.target.header.n_file_bytes
        return CostProfile(
            verify=UNMEASURED, draft=tuple((n, share * cost) for n, cost in UNMEASURED), assumed=rows_of(UNMEASURED)
        )

    @property
    def cost(self) -> Cost:
        """Measured T(n)/T(1) of the target, for the gain; `unmeasured` without a profile of this kernel path."""
        profile = self.profile or self.measured
        return unmeasured if profile is None else profile.costs.measured_cost

    def settings(self, drafting: Drafting, *, greedy: bool) -> DraftSettings:
        """How the strategy drafts in one answer or chat."""
        return DraftSettings(
            length=self.length,
            p_min=drafting.p_min,
            temperature=drafting.temperature,
            policy=self.policy(greedy=greedy),
        )

    def draft_options(self, n_ctx: int) -> LoadOptions:
        """How to load the draft for a target with `n_ctx` tokens of context.

        As the target by default, except the KV cache: it stays f16, because a draft with a coarser one drafts badly.
        """
        assert self.draft is not None
        asked, profile = self.hardware, self.profile
        path = KernelPath.of(self.target_options) if profile is None else profile.draft_path
        tuned = profile.threads.draft if profile is not None and profile.threads is not None else None
        return replace(
            path.applied(replace(self.target_options, kernels=asked.kernels != "off")),
            n_ctx=min(n_ctx, self.draft.header.n_ctx_train or n_ctx),
            n_threads=asked.n_threads_draft or asked.n_threads or tuned,
            n_threads_batch=asked.n_threads_batch_draft or asked.n_threads_draft or asked.n_threads_batch or tuned,
            n_gpu_layers=asked.n_gpu_layers_draft,
            type_k=asked.type_k_draft,
            type_v=asked.type_v_draft,
            rpc=(),  # a drafted token would wait for the network
            coarse_head=True,  # any law of a draft is exact
            # A probe reads many rows at once, a tree those of a level.
            max_block=max(PROBE_TOKENS if self.length.is_auto else 1, self.target_options.max_leaves),
        )

    @property
    def models_text(self) -> str:
        return " and ".join(file.path.name for file in (self.target, self.draft) if file is not None)

    def memory_needed(self, n_ctx: int) -> int:
        """Bytes for target and draft with a context of `n_ctx` tokens."""
        total = llama.memory_needed(self.target.header, replace(self.target_options, n_ctx=n_ctx)).total
        if self.draft is not None:
            total += llama.memory_needed(self.draft.header, self.draft_options(n_ctx)).total
        return total


def key_of(target: Header, draft: Header, options: LoadOptions, hardware: Hardware, strategy: str) -> ProfileKey:
    """The key of a pair's profile, as `prepare` makes it. `options`: of the target."""
    files = File(target, None, "path"), File(draft, None, "path")
    return Setup(files[0], files[1], options, hardware, model_strategy=strategy).subject


def prepare(choice: Choice, listener: Listener) -> Setup:
    """Check what can be checked before weights are loaded: the build works, the files are here, the memory is enough.

    Raises BackendError, DownloadError, ModelFileError, UnsupportedModel and MemoryShort.
    """
    template.warm_up()  # ready by the time that the vocabulary is loaded
    hardware = choice.hardware
    with listener.working("testing llama.cpp on this machine"):
        build = crash_test.installed()
    build.require()
    if not build.use_extra_bufts:
        listener.warn(build.detail, build.hint)
    with listener.working("connecting to the RPC servers"):
        llama.connect(hardware.rpc, listener.lost)
    wanted = [choice.target] if choice.draft is None else [choice.target, choice.draft]
    first, *rest = resolve(wanted, listener, offline=choice.offline)
    target = bring(first, listener, offline=choice.offline)
    refuse_architecture(target.header)
    draft = bring(rest[0], listener, offline=choice.offline) if rest else None
    if draft is not None:
        _warn_if_stale(draft, listener)
    options = LoadOptions(
        n_ctx=choice.context(target.header),
        n_threads=hardware.n_threads,
        n_threads_batch=hardware.n_threads_batch,
        n_gpu_layers=hardware.n_gpu_layers,
        flash_attn=hardware.flash_attn,
        type_k=hardware.type_k,
        type_v=hardware.type_v,
        use_extra_bufts=build.use_extra_bufts,
        kernels=_kernels(hardware, listener),
        rollback=hardware.rollback,
        max_block=(choice.length.longest if choice.strategy != "none" or choice.length.is_auto else 0) + 1,
        max_leaves=LEAVES if choice.strategy == TREE else 1,
        rpc=hardware.rpc,
    )
    setup = Setup(
        target,
        draft,
        options,
        hardware,
        choice.strategy,
        choice.length,
        model_strategy=choice.model_strategy,
        recommended=choice.recommended,
    )
    if choice.any_strategy:
        setup = _translated_if_tuned(setup)
    if choice.length.is_auto:
        setup = tuned(setup, any_strategy=choice.any_strategy, may_look=choice.measure)
        if setup.profile is None:
            setup = _unmeasured(setup, listener, measure=choice.measure)
        elif setup.draft is not None:
            due = setup.profile.is_partial or setup.profile.is_due
            setup = replace(setup, completes=choice.measure and due)
    elif (known := profiles.find(setup.subject).profile) and known.target_path == KernelPath.of(options):
        setup = replace(setup, measured=known)
    setup = _within_memory(setup)
    with listener.working("testing the files"):
        llama.prove(*(file.header for file in (setup.target, setup.draft) if file is not None))
    return setup


def _kernels(hardware: Hardware, listener: Listener) -> bool:
    """Whether our kernels may be used. Raises BackendError if the user demands them and they cannot be."""
    with listener.working("testing specllama's kernels"):
        reason = "" if hardware.kernels == "off" else tested_kernels.problem()
    if reason and hardware.kernels == "on":
        raise BackendError(f"specllama's kernels cannot be used: {reason}", hint="compile them: specllama doctor --fix")
    if tested_kernels.is_fault(reason):
        listener.warn(f"specllama's kernels are not used: {reason}", "compile them again: specllama doctor --fix")
    return hardware.kernels != "off"


def _warn_if_stale(draft: File, listener: Listener) -> None:
    """A derived draft whose parent changed gives the same text, but may be accepted less often."""
    with suppress(ConfigError):  # a damaged record beside a model stops nothing
        found = derived.read(draft.path)
        if found is not None and (reason := derived.stale(found, at_once=True)):
            listener.warn(f"{found.name} is stale: {reason}", "make it again: specllama draft make")


def _translated_if_tuned(setup: Setup) -> Setup:
    """`setup` with a translated draft, if the pair was tuned so and in no other way.

    A pair with two tokenizers that was never tuned is refused by `require_fit`.
    """
    other = replace(
        setup, model_strategy=TRANSLATED, strategy=TRANSLATED if setup.strategy == SIMPLE else setup.strategy
    )
    own_file, other_file = (profiles.path_of(each.subject) for each in (setup, other))
    return other if other_file.is_file() and not own_file.is_file() else setup


def tuned(setup: Setup, *, any_strategy: bool, may_look: bool = False) -> Setup:
    """`setup` as its profile says; without a usable profile, `stale` gives the reason.

    `may_look`: a draft that cannot pay stays if its costs are due to be measured again.
    """
    setup = replace(setup, untuned=setup.subject, any_strategy=any_strategy)
    found = profiles.find(setup.subject)
    if found.profile is None:
        return replace(setup, stale=found.stale)
    return replace(by_profile(setup, found.profile, may_look=may_look), stale=found.stale)


def by_profile(setup: Setup, profile: Profile, *, may_look: bool = False) -> Setup:
    """`setup` with the draft, the load options and the strategy of `profile`. `may_look`: see `tuned`."""
    if not setup.target_options.use_extra_bufts:  # the build crashes with them
        profile = replace(profile, target_path=AS_IN_FILE, draft_path=AS_IN_FILE, plain_path=AS_IN_FILE)
    strategy, draft = setup.strategy, setup.draft
    if profile.derived is not None and draft is not None:  # the measured draft
        draft = File(llama.read_header(profile.derived), known_checksum_of(profile.derived), "derived")
    if setup.any_strategy:
        draft = draft if profile.draft_can_pay or (may_look and profile.is_due) else None  # saves its memory
        strategy = LOOKUP_ALONE if draft is None else "chain"
    options = replace(profile.target_path.applied(setup.target_options), max_block=TUNED + 1)
    if profile.threads is not None:
        options = replace(options, n_threads=profile.threads.decode, n_threads_batch=profile.threads.verify)
    return replace(
        setup,
        draft=draft,
        target_options=options,
        strategy=strategy,
        length=DraftLength.auto(TUNED),
        profile=profile,
        measures=False,
    )


def for_short_answer(setup: Setup, *, n_predict: int, n_prompt: int, greedy: bool) -> Setup:
    """`setup` without a draft that is expected to save less time in `n_predict` tokens than its loading takes.

    By the profile alone, so the same profile decides the same. Costs that are due to be measured need the draft.
    """
    profile, draft, policy = setup.profile, setup.draft, setup.policy(greedy=greedy)
    if not setup.any_strategy or setup.completes or draft is None or profile is None or n_predict < 0:
        return setup
    assert isinstance(policy, Controller), "a profile decides the draft length"
    share = draft.header.n_file_bytes / (draft.header.n_file_bytes + setup.target.header.n_file_bytes)
    load_s = profile.loads.of_draft(share)
    saved_s = max(LIKELY * profile.step_s * policy.saves(n_predict, n_prompt), 0.0)
    if saved_s >= load_s:
        return setup
    why = (
        f"only lookups draft, because the draft would save about {saved_s:.1f} s in {counted(n_predict, 'token')} and "
        f"loading it takes {load_s:.1f} s"
    )
    return replace(setup, draft=None, strategy=LOOKUP_ALONE, too_short=why)


def _unmeasured(setup: Setup, listener: Listener, *, measure: bool) -> Setup:
    """`setup` without a profile: only lookups draft, if it may choose. The draft is loaded to be measured."""
    setup = replace(setup, measures=measure and setup.draft is not None)
    if setup.any_strategy:
        if not setup.measures:
            require_fit(setup, listener)  # a draft that does not fit is an error, also if it would draft nothing
            setup = replace(setup, draft=None)
        setup = replace(setup, strategy=LOOKUP_ALONE)
    return setup


def profile_for(draft: File | None, setup: Setup, profile: Profile | None) -> Profile | None:
    """`profile` for another draft file, whose kernel path was not measured."""
    own = setup.draft and setup.draft.path
    if profile is None or draft is None or draft.path == (profile.derived or own):
        return profile
    return replace(profile, draft_path=KernelPath.of(setup.target_options))


def longest_context(setup: Setup) -> int:
    """The longest context, up to the target's training context, that both models have memory for together.

    0 with GPU offload: only the loader knows. Raises MemoryShort if even a short context does not fit.
    """
    if llama.build_info().gpu_offload:
        return 0
    free = int(FREE_SHARE * llama.memory_free())
    trained = setup.target.header.n_ctx_train or N_CTX
    return memory.longest_context(trained, setup.memory_needed, free, setup.models_text)


def _within_memory(setup: Setup) -> Setup:
    """`setup` with a context that fits; both models keep only the windows of sliding layers if they do not fit whole.

    Raises as `require_way`, and MemoryShort.
    """
    ways, asked = require_way(setup), setup.target_options.rollback
    needed = setup.memory_needed(setup.target_options.n_ctx or setup.target.header.n_ctx_train or N_CTX)
    why = f"the models take {size_text(needed)} with whole caches; {size_text(llama.memory_free())} are free"
    options = replace(setup.target_options, rollback=WINDOW, rollback_why=why)
    windows = replace(setup, target_options=options, untuned=setup.subject)  # the profile is that of the wishes
    may_change = asked == AUTO and options.max_leaves == 1 and any(WINDOW in each for each in ways.values())
    if setup.target_options.n_ctx == 0:
        try:
            n_ctx = longest_context(setup)
        except MemoryShort:
            if not may_change:
                raise
            n_ctx = -1
        if may_change and 0 != n_ctx < (longer := longest_context(windows)):
            setup, n_ctx = windows, longer
        return replace(setup, target_options=replace(setup.target_options, n_ctx=n_ctx))
    try:
        _require_memory(setup)
    except MemoryShort:
        if not may_change:
            raise
        _require_memory(setup := windows)
    return setup


def require_way(setup: Setup) -> dict[str, tuple[str, ...]]:
    """The ways back of each model, by its name. Raises UsageError if none has the one that the user asked for."""
    files, asked = (setup.target, setup.draft), setup.target_options.rollback
    ways = {each.path.name: possible(each.header) for each in files if each is not None}
    if asked != AUTO and not any(asked in each for each in ways.values()):
        has = "; ".join(f"{name}: {', '.join(each)}" for name, each in ways.items())
        raise UsageError(f"no model has the way back {asked} ({has})", hint="leave --rollback out, or name another")
    return ways


def _require_memory(setup: Setup) -> None:
    """Raise MemoryShort if target and draft do not fit together. With GPU offload the loader checks each model."""
    n_ctx = setup.target_options.n_ctx
    if setup.draft is None or llama.build_info().gpu_offload:
        return
    memory.require_memory(setup.models_text, setup.memory_needed(n_ctx), llama.memory_free(), n_ctx)


def require_fit(setup: Setup, listener: Listener) -> None:
    """Raise PairError if the draft does not fit, by the report of `specllama check`. Warnings go to `listener`."""
    if setup.draft is None:
        return
    draft = Candidate(setup.draft.header, setup.draft_options(setup.target_options.n_ctx))
    report = check_pair(
        Candidate(setup.target.header, setup.target_options), lambda: draft, strategy=setup.model_strategy
    )
    report.require()
    for row in report.warnings:
        listener.detail(f"{row.test}: {row.reason}")


def drafter_for(target: LanguageModel, draft: LanguageModel | None, strategy: str, settings: DraftSettings) -> Drafter:
    """The drafter of a strategy. `draft`: in the target's token ids."""
    settings = replace(settings, vocab_size=target.vocab_size, n_leaves=target.caps.max_leaves)
    return REGISTRY[strategy].make(draft, settings)


@dataclass(slots=True)
class Models:
    """A loaded target and draft. A context manager that frees them."""

    target: LlamaModel
    draft: DraftModel | None  # in the target's token ids
    loaded_draft: LlamaModel | None  # the same, in its own token ids
    _owned: ExitStack = field(default_factory=ExitStack)
    loads: LoadSeconds = field(default_factory=LoadSeconds)

    def watch(self, cancel: Cancel) -> None:
        """Stop a long computation of either model when `cancel` is set."""
        self.target.watch(cancel)
        if self.draft is not None:
            self.draft.watch(cancel)

    def drafter(self, strategy: str, settings: DraftSettings) -> Drafter:
        return drafter_for(self.target, self.draft, strategy, settings)

    def drop_draft(self) -> None:
        """Free the draft."""
        if self.draft is not None:
            self.draft.close()
        self.draft = self.loaded_draft = None

    def close(self) -> None:
        """Free the models. A second call does nothing."""
        self._owned.close()

    def __enter__(self) -> Models:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def load_models(setup: Setup, listener: Listener, cancel: Cancel) -> Models:
    """Load target and draft: at the same time, or one after another if they may lie on a GPU, whose memory they share.

    Raises as `llama.load`, and Interrupted if `cancel` is set.
    """
    n_bytes = setup.target.header.n_file_bytes + (setup.draft.header.n_file_bytes if setup.draft else 0)
    adapted, loaded, began = None, list[LlamaModel](), perf_counter()

    def load(*models: tuple[Header, LoadOptions]) -> None:
        n_before = sum(model.header.n_file_bytes for model in loaded)
        n_now = sum(header.n_file_bytes for header, _ in models)

        def progress(share: float) -> bool:
            show((n_before + share * n_now) / n_bytes, n_bytes)
            return not cancel.is_set()

        found = llama.load_together(models, progress=progress)
        loaded.extend(map(owned.enter_context, found))

    with ExitStack() as owned, listener.loading() as show:
        options = setup.target_options
        target = setup.target.header, options
        if setup.draft is None:
            load(target)
        elif options.n_ctx and not options.rpc and not llama.build_info().gpu_offload:
            load(target, (setup.draft.header, setup.draft_options(options.n_ctx)))
        else:
            load(target)
            load((setup.draft.header, setup.draft_options(loaded[0].n_ctx)))
        if setup.draft is not None:
            adapted = in_target_ids(loaded[0], loaded[1], strategy=setup.model_strategy)
            owned.callback(adapted.close)
        if cancel.is_set():  # set after the last call of `progress`
            raise Interrupted("loading was stopped on request")
        draft = loaded[1] if adapted else None
        took_s = perf_counter() - began
        loads = LoadSeconds(target=took_s) if draft is None else LoadSeconds(both=took_s)
        models = Models(loaded[0], adapted, draft, owned.pop_all(), loads)
    for role, model in (("target", models.target), ("draft", models.loaded_draft)):
        if model is not None:
            size = f"{counted(model.n_ctx, 'token')} of context"
            back = f"rolls back by {model.way_back.text}: {model.way_back.why}"
            listener.detail(f"{role}: {model.path} ({model.description}, {size}); {back}")
            for warning in model.warnings:
                listener.warn(warning)
            if model.no_tree:
                listener.detail(f"{role}: evaluates no trees: {model.no_tree}")  # the drafter has a notice
    return models
