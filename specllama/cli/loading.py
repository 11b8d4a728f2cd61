"""Option groups as an `Ask` and `Settings`, and the messages of choosing, fetching and loading on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Timer
from typing import Literal

from specllama.base.disk import FetchWatch, size_text
from specllama.base.errors import SpecllamaError
from specllama.chat.format import AnswerFormat
from specllama.chat.settings import Settings
from specllama.cli.args.options import DraftOptions, HardwareOptions, ModelOptions, SamplingOptions
from specllama.cli.screen.ending import leave_terminal
from specllama.cli.screen.output import Output, say_error
from specllama.cli.screen.status import StatusLine, watching
from specllama.core.noise import SeedMode
from specllama.core.types import Rule
from specllama.drafters import TREE
from specllama.pairs.ask import Ask, Drafting, Hardware, Names
from specllama.pairs.setup import Listener

_SOON_S = 0.3  # work that is done by then is not mentioned


def ask_of(models: ModelOptions, drafting: DraftOptions, hardware: HardwareOptions) -> Ask:
    """What the option groups ask for."""
    tree = drafting.tree
    wanted = Drafting(
        spec_type=drafting.spec_type if tree is None else TREE,
        length=drafting.spec_draft_n_max if tree is None else tree,
        p_min=drafting.spec_draft_p_min,
        temperature=drafting.draft_temp,
        rule=Rule(drafting.verify_rule),
        measure=drafting.measure == "auto",
    )
    return Ask(names=names_of(models), drafting=wanted, hardware=hardware_of(hardware))


def settings_of(sampling: SamplingOptions, form: AnswerFormat | None) -> Settings:
    """The settings of an answer, without those of drafting."""
    return Settings(
        params=sampling.params,
        seed=sampling.seed,
        seed_mode=SeedMode(sampling.seed_mode),
        n_predict=sampling.predict,
        stops=tuple(sampling.stop or ()),
        format=form,
    )


def names_of(models: ModelOptions) -> Names:
    """The models that the options name."""
    return Names(
        pair=models.pair,
        target=models.model,
        draft=models.model_draft,
        target_repo=models.hf_repo,
        draft_repo=models.hf_repo_draft,
        offline=models.offline,
    )


def hardware_of(options: HardwareOptions) -> Hardware:
    """How the options load models."""

    def layers(text: str) -> int | Literal["auto", "all"]:
        return "auto" if text == "auto" else "all" if text == "all" else int(text)

    return Hardware(
        n_ctx=options.ctx_size,
        n_threads=options.threads,
        n_threads_batch=options.threads_batch,
        n_threads_draft=options.threads_draft,
        n_threads_batch_draft=options.threads_batch_draft,
        n_gpu_layers=layers(options.gpu_layers),
        n_gpu_layers_draft=layers(options.gpu_layers_draft),
        type_k=options.cache_type_k,
        type_v=options.cache_type_v,
        type_k_draft=options.cache_type_k_draft,
        type_v_draft=options.cache_type_v_draft,
        flash_attn=options.flash_attn,
        kernels=options.kernels,
        rollback=options.rollback,
        rpc=options.rpc or (),
    )


class Said(Listener):
    """Reports on `output`, with progress on a terminal."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def note(self, text: str) -> None:
        self._output.note(text)

    def warn(self, text: str, hint: str = "") -> None:
        self._output.warn(text, hint)

    def detail(self, text: str) -> None:
        self._output.detail(text)

    def lost(self, error: SpecllamaError) -> None:
        leave_terminal()
        if self._output.out.is_terminal:  # maybe in the middle of a line
            self._output.out.write("\n")
        self._output.out.file.flush()
        say_error(error)

    def fetching(self) -> AbstractContextManager[FetchWatch]:
        return watching(self._output)

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        with StatusLine(self._output) as status:
            late = Timer(_SOON_S, status.show, (what, None))
            late.start()
            try:
                yield
            finally:
                late.cancel()
                late.join()

    @contextmanager
    def loading(self) -> Iterator[Callable[[float, int], None]]:
        with StatusLine(self._output) as status:
            yield lambda share, n_bytes: status.show("loading", share, size_text(n_bytes))
