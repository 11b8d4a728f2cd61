"""From options to models ready to answer: choose them, fetch them, check what can be checked, load them."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

from specllama import llama
from specllama.base import disk as storage
from specllama.base.disk import size_text
from specllama.base.errors import ConfigError, Interrupted, MemoryShort, UsageError
from specllama.cli.args.options import DraftOptions, HardwareOptions, ModelOptions
from specllama.cli.naming import Wanted, named
from specllama.cli.screen.fetching import fetch_with_progress
from specllama.cli.screen.output import Output
from specllama.cli.screen.status import StatusLine
from specllama.core.types import Cancel, Drafter, DraftPolicy
from specllama.derive import store as drafts
from specllama.drafters import REGISTRY, TRANSLATED, DraftSettings
from specllama.drafters.controller import N_MAX as LONGEST_AUTO
from specllama.drafters.controller import PROBE_TOKENS, controller
from specllama.files.catalog import load_catalog
from specllama.files.model import PairDefaults
from specllama.llama import Header, LlamaModel, LoadOptions
from specllama.llama import crash_test as probe
from specllama.llama.header import refuse_architecture
from specllama.llama.kernel_path import AS_IN_FILE, KernelPath
from specllama.llama.load_plan import placeable
from specllama.pairs import profile as profiles
from specllama.pairs.check import Candidate, check_pair
from specllama.pairs.draft_in_target_ids import DraftModel, in_target_ids
from specllama.pairs.profile import SIMPLE, Profile, ProfileKey

N_CTX, N_MAX = 4096, 4  # where neither an option nor the pair says otherwise


# ----------------------------------------------------------------------------------------------------------- choosing


@dataclass(frozen=True, slots=True)
class Choice:
    """Which models and which strategy, before anything is looked up."""

    target: Wanted
    draft: Wanted | None  # None also where the strategy has no use for one
    strategy: str
    n_ctx: int  # 0 = what the target was trained for
    n_max: int  # what a number says, or what is taken where `auto` finds no profile
    auto: bool = False  # a profile decides how far to draft, if there is one
    any_strategy: bool = False  # and with what
    by_text: bool = False  # the draft's tokens are the target's where their texts are the same, whatever their ids


def choose(models: ModelOptions, drafting: DraftOptions, hardware: HardwareOptions, output: Output) -> Choice:
    """What the options ask for. Raises UsageError and ConfigError."""
    target: Wanted | None = named(models.model) if models.model else models.hf_repo
    given = models.model_draft or models.hf_repo_draft
    if target is None and given:
        raise UsageError(
            f"a draft is given ({given}) but no target, expected both",
            hint="say which target it is for: -m MODEL or -hf USER/REPO",
        )
    draft: Wanted | None = named(models.model_draft, draft=True) if models.model_draft else models.hf_repo_draft
    defaults = PairDefaults()
    if target is None:
        catalog = load_catalog()
        for note in catalog.notes:
            output.note(f"note: {note}")
        pair = catalog.pair(models.pair)
        target, draft, defaults = pair.target, pair.draft, pair.defaults
    asked = drafting.spec_draft_n_max
    auto, any_strategy = asked == "auto", drafting.spec_type == "auto"
    n_max = (defaults.n_max or N_MAX) if isinstance(asked, str) else asked
    strategy = _strategy(drafting.spec_type, has_draft=draft is not None) if n_max else "none"
    by_text = TRANSLATED in drafting.spec_type.split(",")
    return Choice(
        target,
        draft if REGISTRY[strategy].needs_model else None,
        strategy,
        n_ctx=next(n for n in (hardware.ctx_size, defaults.n_ctx, N_CTX) if n is not None),
        n_max=n_max,
        # Whoever names a confidence to stop at has decided how far to draft; whoever wants no drafts, too.
        auto=auto and not drafting.spec_draft_p_min and (any_strategy or strategy != "none"),
        any_strategy=any_strategy,
        by_text=by_text,
    )


def _strategy(spec_type: str, *, has_draft: bool) -> str:
    """The one strategy for the allowed ones. Raises UsageError where one was named that lacks a draft."""
    if spec_type == "auto":
        return "draft-simple" if has_draft else "none"
    names = spec_type.split(",")
    for name in names:
        if REGISTRY[name].needs_model and not has_draft:
            raise UsageError(f"--spec-type {name} needs a draft model", hint="add -md MODEL or -hfd USER/REPO")
    drafting = [name for name in names if name != "none"]
    with_model = [name for name in drafting if REGISTRY[name].needs_model]
    return "chain" if with_model and "lookup" in drafting else next(iter(drafting), "none")


# ------------------------------------------------------------------------------------------------------ what is here


@dataclass(frozen=True, slots=True)
class File:
    """A model file on this disk, with what its own header says."""

    header: Header
    sha256: str | None  # None where nobody has computed it: hashing gigabytes is not for every start
    source: str

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.header.path

    @property
    def template(self) -> str | None:
        """Its chat template, if it has one."""
        return self.header.metadata.get("tokenizer.chat_template")


def bring(wanted: Wanted, *, offline: bool, output: Output) -> File:
    """The file of a model, fetched if need be. Raises DownloadError and ModelFileError."""
    if isinstance(wanted, Path):
        return File(llama.read_header(wanted), storage.known_checksum(wanted) if wanted.is_file() else None, "path")
    fetched = fetch_with_progress(wanted, offline=offline, output=output)
    return File(llama.read_header(fetched.path), fetched.sha256, fetched.source)


# ------------------------------------------------------------------------------------------------------------ checking


def _layers(text: str) -> int | Literal["auto", "all"]:
    """`-ngl` as the loader takes it."""
    return "auto" if text == "auto" else "all" if text == "all" else int(text)


@dataclass(frozen=True, slots=True)
class Setup:
    """Files on this disk and how they are to be loaded; nothing of it is loaded yet."""

    target: File
    draft: File | None
    target_options: LoadOptions
    hardware: HardwareOptions
    strategy: str = "none"
    n_max: int = 0
    profile: Profile | None = None  # decides how far to draft
    stale: str = ""  # why the profile that is there does not hold
    by_text: bool = False  # see `Choice`

    @property
    def subject(self) -> ProfileKey:
        """What a profile is of."""
        draft = self.draft
        options = None if draft is None else self.draft_options(self.target_options.n_ctx)
        path = draft.path if draft else None
        return ProfileKey(self.target.path, self.target_options, path, options, self.by_text and draft is not None)

    def policy(self, *, greedy: bool, draft_temp: float | None) -> DraftPolicy | None:
        """What decides how far to draft in one answer or chat; None = the longest draft and the confidence alone."""
        if self.profile is None:
            return None
        priors = self.profile.priors(greedy=greedy)
        return controller(self.profile.costs, priors, n_max=self.n_max, heat_is_free=draft_temp is None)

    def draft_options(self, n_ctx: int) -> LoadOptions:
        """How the draft is loaded beside a target with `n_ctx` tokens of context, which is as many as it can use.

        Like the target where nothing else was asked for; but its KV stays in f16, because a coarser one drafts badly.
        """
        assert self.draft is not None
        hardware, profile = self.hardware, self.profile
        path = KernelPath.of(self.target_options) if profile is None else profile.draft_path
        tuned = profile.threads.draft if profile is not None and profile.threads is not None else None
        return replace(
            path.applied(self.target_options),
            n_ctx=min(n_ctx, self.draft.header.n_ctx_train or n_ctx),
            n_threads=hardware.threads_draft or hardware.threads or tuned,
            n_threads_batch=hardware.threads_batch_draft or hardware.threads_draft or hardware.threads_batch or tuned,
            n_gpu_layers=_layers(hardware.gpu_layers_draft),
            type_k=hardware.cache_type_k_draft,
            type_v=hardware.cache_type_v_draft,
            max_block=1 if profile is None else PROBE_TOKENS,  # a probe looks at many rows at once
        )


def prepare(choice: Choice, hardware: HardwareOptions, *, offline: bool, output: Output) -> Setup:
    """Everything that can be known before weights are loaded: the build works, the files are here, memory is enough.

    Raises BackendError, DownloadError, ModelFileError, UnsupportedModel and MemoryShort.
    """
    use_extra_bufts = _usable_buffers(output)
    target = bring(choice.target, offline=offline, output=output)
    refuse_architecture(target.header)
    draft = None if choice.draft is None else bring(choice.draft, offline=offline, output=output)
    if draft is not None:
        _say_stale(draft, output)
    options = LoadOptions(
        n_ctx=choice.n_ctx,
        n_threads=hardware.threads,
        n_threads_batch=hardware.threads_batch,
        n_gpu_layers=_layers(hardware.gpu_layers),
        flash_attn=hardware.flash_attn,
        type_k=hardware.cache_type_k,
        type_v=hardware.cache_type_v,
        use_extra_bufts=use_extra_bufts,
        max_block=(choice.n_max if choice.strategy != "none" else 0) + 1,
    )
    setup = Setup(target, draft, options, hardware, choice.strategy, choice.n_max, by_text=choice.by_text)
    if choice.any_strategy and not choice.by_text:
        setup = _by_text_if_tuned(setup)
    if choice.auto:
        setup = tuned(setup, any_strategy=choice.any_strategy)
    _require_memory(setup)
    return setup


def _say_stale(draft: File, output: Output) -> None:
    """A derived draft whose parent changed still gives the target's text, but may foresee it badly."""
    with suppress(ConfigError):  # what lies beside a model may be anybody's
        derived = drafts.read(draft.path)
        if derived is not None and (reason := drafts.stale(derived, at_once=True)):
            output.warn(f"{derived.name} is stale: {reason}", "make it again: specllama draft make")


def _by_text_if_tuned(setup: Setup) -> Setup:
    """The setup, its draft translated by text without being asked where the pair was tuned so, and only so.

    Whoever tuned a pair of two tokenizers wants it to be used; whoever did not is told that it does not fit.
    """
    other = replace(setup, by_text=True, strategy=TRANSLATED if setup.strategy == SIMPLE else setup.strategy)
    return other if not profiles.kept(setup.subject) and profiles.kept(other.subject) else setup


def tuned(setup: Setup, *, any_strategy: bool) -> Setup:
    """The setup as its profile wants it; as it is where there is none that holds.

    With measured costs, lookup may draft too: it is free where it does not match, and what a block costs is known where
    it does. Without them nobody knows whether a block of four rows costs more than four of one row, as on some CPUs.
    """
    found = profiles.find(setup.subject)
    profile = found.profile
    if profile is None:
        return replace(setup, stale=found.stale)
    if reason := _out_of_reach(profile, setup):
        return replace(setup, stale=reason)
    if not setup.target_options.use_extra_bufts:  # the build crashes on them, which was told
        profile = replace(profile, target_path=AS_IN_FILE, draft_path=AS_IN_FILE, plain_path=AS_IN_FILE)
    strategy, draft = setup.strategy, setup.draft
    if profile.derived is not None and draft is not None:  # the costs are those of this one
        draft = File(llama.read_header(profile.derived), storage.known_checksum(profile.derived), "derived")
    if any_strategy:
        # A draft that could not pay if all of it were accepted is not worth the memory either.
        draft = draft if profile.draft_can_pay else None
        strategy = "lookup" if draft is None else "chain"
    options = replace(profile.target_path.applied(setup.target_options), max_block=LONGEST_AUTO + 1)
    if profile.threads is not None:
        options = replace(options, n_threads=profile.threads.decode, n_threads_batch=profile.threads.verify)
    return replace(setup, draft=draft, target_options=options, strategy=strategy, n_max=LONGEST_AUTO, profile=profile)


def profile_for(draft: File | None, setup: Setup, profile: Profile | None) -> Profile | None:
    """The profile of `setup` as it is for a draft: its kernel path was found for one file, and others have other types.

    Orders for weights that a file does not have are an error.
    """
    own = setup.draft and setup.draft.path
    if profile is None or draft is None or draft.path == (profile.derived or own):
        return profile
    return replace(profile, draft_path=KernelPath.of(setup.target_options))


def _out_of_reach(profile: Profile, setup: Setup) -> str:
    """Why the profile's kernel paths cannot be set here; empty where they can."""
    wanted = {buffer for path in (profile.target_path, profile.draft_path) for _, buffer in path.placed}
    build = llama.build_info()
    if missing := sorted(wanted - set(build.extra_buffer_types)):
        return f"it keeps weights in {' and '.join(missing)}, which this llama.cpp does not have here"
    has_gpu = any(device.is_gpu for device in build.devices)
    loads = [(profile.target_path, setup.target_options)]
    loads += [(profile.draft_path, setup.draft_options(setup.target_options.n_ctx))] if setup.draft is not None else []
    if any(path.placed and not placeable(options, has_gpu=has_gpu) for path, options in loads):
        return "it places weights by their type, as no GPU allows, and there is one now"
    return ""


def _usable_buffers(output: Output) -> bool:
    """Whether models may be loaded with extra buffer types; says what is wrong with the build. Raises BackendError."""
    result = probe.installed()
    result.require()
    if not result.use_extra_bufts:
        output.warn(result.detail, result.hint)
    return result.use_extra_bufts


def _require_memory(setup: Setup) -> None:
    """Raise MemoryShort where target and draft together cannot fit, before the first of them is loaded.

    A context that is to be found out (0), or a GPU: then only the loader knows, and it checks each model by itself.
    """
    n_ctx = setup.target_options.n_ctx
    if n_ctx == 0 or setup.draft is None or llama.build_info().gpu_offload:
        return
    needed = llama.memory_needed(setup.target.header, setup.target_options).total
    needed += llama.memory_needed(setup.draft.header, setup.draft_options(n_ctx)).total
    free = llama.memory_free()
    if needed > free:
        raise MemoryShort(
            f"{setup.target.path.name} and {setup.draft.path.name} with a context of {n_ctx} tokens need "
            f"{size_text(needed)}, but only {size_text(free)} are free",
            hint="use a shorter context (--ctx-size), smaller models, or close other programs",
        )


def require_fit(setup: Setup, output: Output) -> None:
    """Raise PairError where the draft does not fit: nobody who asked for a draft goes without, and slowly at that.

    The report is that of `specllama check`; what may make the pair slow is told to those who want details.
    """
    if setup.draft is None:
        return
    draft = Candidate(setup.draft.header, setup.draft_options(setup.target_options.n_ctx))
    report = check_pair(Candidate(setup.target.header, setup.target_options), lambda: draft, by_text=setup.by_text)
    report.require()
    for row in report.warnings:
        output.detail(f"{row.test}: {row.reason}")


# ------------------------------------------------------------------------------------------------------------- loading


@dataclass(slots=True)
class Models:
    """A loaded target and draft; a context manager that frees them."""

    target: LlamaModel
    draft: DraftModel | None  # speaks the target's ids
    loaded_draft: LlamaModel | None  # the same as its file has it; what it says of itself
    _owned: ExitStack = field(default_factory=ExitStack)

    def watch(self, cancel: Cancel) -> None:
        """Let a long computation of either stop when `cancel` is set."""
        self.target.watch(cancel)
        if self.draft is not None:
            self.draft.watch(cancel)

    def drafter(self, strategy: str, settings: DraftSettings) -> Drafter:
        """The strategy, working for this target."""
        return REGISTRY[strategy].make(self.draft, replace(settings, vocab_size=self.target.vocab_size))

    def __enter__(self) -> Models:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owned.close()


def load_models(setup: Setup, output: Output, cancel: Cancel) -> Models:
    """Load the target, then the draft, with progress on stderr.

    Raises what `llama.load` raises, and Interrupted where `cancel` is set meanwhile.
    """
    n_bytes = setup.target.header.n_file_bytes + (setup.draft.header.n_file_bytes if setup.draft else 0)
    n_done = 0

    def told(file: File, share: float) -> bool:
        status.show("loading", (n_done + share * file.header.n_file_bytes) / n_bytes, size_text(n_bytes))
        return not cancel.is_set()

    with ExitStack() as owned, StatusLine(output) as status:
        load, target, draft, speaking = llama.load, setup.target, None, None
        target_model = load(target.path, setup.target_options, progress=lambda share: told(target, share))
        owned.enter_context(target_model)
        if (file := setup.draft) is not None:
            n_done = target.header.n_file_bytes
            draft = load(file.path, setup.draft_options(target_model.n_ctx), progress=lambda share: told(file, share))
            owned.enter_context(draft)
            speaking = in_target_ids(target_model, draft, by_text=setup.by_text)
            owned.callback(speaking.close)
        if cancel.is_set():  # behind the last progress: nobody else would look before the first answer
            raise Interrupted("loading was stopped on request")
        models = Models(target_model, speaking, draft, owned.pop_all())
    for role, model in (("target", target_model), ("draft", draft)):
        if model is not None:
            output.detail(f"{role}: {model.path} ({model.description}, {model.n_ctx} tokens of context)")
            for warning in model.warnings:
                output.warn(warning)
    return models
