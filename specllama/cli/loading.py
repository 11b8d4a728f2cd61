"""From option groups to an `Ask`, and what choosing, fetching and loading say on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

from specllama.base.disk import FetchWatch, size_text
from specllama.cli.args.options import DraftOptions, HardwareOptions, ModelOptions
from specllama.cli.screen.fetching import watching
from specllama.cli.screen.output import Output
from specllama.cli.screen.status import StatusLine
from specllama.core.types import Rule
from specllama.pairs.ask import Ask, Drafting, Hardware, Names
from specllama.pairs.setup import Listener


def ask_of(models: ModelOptions, drafting: DraftOptions, hardware: HardwareOptions) -> Ask:
    """What the option groups ask for."""
    return Ask(names=names_of(models), drafting=drafting_of(drafting), hardware=hardware_of(hardware))


def names_of(models: ModelOptions) -> Names:
    """Which models."""
    return Names(
        pair=models.pair,
        target=models.model,
        draft=models.model_draft,
        target_repo=models.hf_repo,
        draft_repo=models.hf_repo_draft,
        offline=models.offline,
    )


def drafting_of(options: DraftOptions) -> Drafting:
    """How to draft."""
    return Drafting(
        spec_type=options.spec_type,
        length=options.spec_draft_n_max,
        p_min=options.spec_draft_p_min,
        temperature=options.draft_temp,
        rule=Rule(options.verify_rule),
    )


def hardware_of(options: HardwareOptions) -> Hardware:
    """How to load."""
    return Hardware(
        n_ctx=options.ctx_size,
        n_threads=options.threads,
        n_threads_batch=options.threads_batch,
        n_threads_draft=options.threads_draft,
        n_threads_batch_draft=options.threads_batch_draft,
        n_gpu_layers=_layers(options.gpu_layers),
        n_gpu_layers_draft=_layers(options.gpu_layers_draft),
        type_k=options.cache_type_k,
        type_v=options.cache_type_v,
        type_k_draft=options.cache_type_k_draft,
        type_v_draft=options.cache_type_v_draft,
        flash_attn=options.flash_attn,
    )


def _layers(text: str) -> int | Literal["auto", "all"]:
    return "auto" if text == "auto" else "all" if text == "all" else int(text)


class Said(Listener):
    """Says on `output` what happens before an answer, with progress where something may move."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def note(self, text: str) -> None:
        """On stderr."""
        self._output.note(text)

    def warn(self, text: str, hint: str = "") -> None:
        """On stderr, with the hint."""
        self._output.warn(text, hint)

    def detail(self, text: str) -> None:
        """On stderr with `--verbose`."""
        self._output.detail(text)

    def fetching(self) -> AbstractContextManager[FetchWatch]:
        """A bar, or a line every tenth."""
        return watching(self._output)

    @contextmanager
    def loading(self) -> Iterator[Callable[[float, int], None]]:
        """The status line."""
        with StatusLine(self._output) as status:
            yield lambda share, n_bytes: status.show("loading", share, size_text(n_bytes))
