"""What `run --json` and `--jsonl` write about an answer; see SCHEMA for the units."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import numpy as np

from specllama import __version__
from specllama.chat.format import AnswerFormat
from specllama.chat.settings import Settings, to_json
from specllama.chat.stream import TextStream
from specllama.core.events import Event, Finished, Notice, StepEvent
from specllama.core.stats import SpecStats
from specllama.llama import BuildInfo, LlamaModel, build_info
from specllama.llama.kernel_path import KernelPath
from specllama.pairs.ask import Names
from specllama.pairs.setup import File, Models, Setup
from specllama.tuning.expectation import unused_draft

SCHEMA = {
    "name": "specllama.run",
    "version": 1,
    "units": "rates and shares are fractions of 1 (null: nothing was counted), *_s are seconds, *_ms milliseconds",
}
CHAT_SCHEMA = {**SCHEMA, "name": "specllama.chat.events"}  # several answers, and the messages between them


def versions(build: BuildInfo) -> dict[str, str]:
    """The versions of everything that computes an answer."""
    return {
        "specllama": __version__,
        "llama_cpp_python": build.bindings,
        "llama_cpp": build.llama_cpp,
        "build": build.fingerprint,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": build.system,
    }


def describe_model(file: File, model: LlamaModel) -> dict[str, object]:
    """A model file, and how it was loaded."""
    return {
        "file": file.path.name,
        "path": str(file.path),
        "size": file.header.n_file_bytes,
        "sha256": file.sha256,
        "source": file.source,
        "description": model.description,
        "n_ctx": model.n_ctx,
        "n_threads": model.plan.n_threads,
        "n_threads_batch": model.plan.n_threads_batch,
        "n_gpu_layers": model.plan.n_gpu_layers,
        "kernel_path": KernelPath.of(model.plan).name,
        "rollback": model.way_back.way,
        "rollback_why": model.way_back.why,
    }


def timings(stats: SpecStats) -> dict[str, object]:
    """The keys of llama-server's `timings`. The rate leaves out the first token, which belongs to the prompt."""
    return {
        "cache_n": stats.n_cached,
        "prompt_n": stats.n_prompt - stats.n_cached,
        "prompt_ms": 1000 * stats.prompt_s,
        "prompt_per_second": stats.prompt_tok_s,
        "predicted_n": stats.n_emitted,
        "predicted_ms": 1000 * stats.decode_s,
        "predicted_per_second": stats.decode_tok_s,
        "draft_n": stats.n_drafted,
        "draft_n_accepted": stats.n_accepted,
    }


def figures(stats: SpecStats) -> dict[str, object]:
    """What was measured, of one answer or of several."""
    return {"timings": timings(stats), "acceptance": acceptance(stats), "gain": gain_json(stats)}


def acceptance(stats: SpecStats) -> dict[str, object]:
    """Counts and rates of drafted tokens."""
    return {
        "steps": stats.n_steps,
        "spec_steps": stats.n_spec_steps,
        "drafted": stats.n_drafted,
        "accepted": stats.n_accepted,
        "looked_up": stats.n_looked_up,
        "looked_up_accepted": stats.n_looked_up_accepted,
        "rejections": stats.n_rejected,
        "emitted": stats.n_emitted,
        "emitted_from_draft": stats.n_from_draft,
        "rate": stats.acceptance_rate,
        "alpha": stats.alpha,
        "mean_length": stats.mean_acceptance_length,
        "from_draft": stats.from_draft,
        "per_position": stats.acceptance_per_position,
        "drafted_at": stats.drafted_at,
        "accepted_at": stats.accepted_at,
        "accepted_lengths": stats.accepted_lengths,
    }


def gain_json(stats: SpecStats) -> dict[str, float] | None:
    """The speed over plain decoding, with its quartiles; None if nothing tells it."""
    gain = stats.gain
    return None if gain is None else asdict(gain)


@dataclass(slots=True)
class Record:
    """A header written before the answer begins, and what is gathered from its events."""

    header: Mapping[str, object]
    form: AnswerFormat | None = None
    notices: list[str] = field(default_factory=list)
    # Of the steps after the first, which belongs to the prompt.
    n_steps: int = 0
    n_drafted: int = 0
    step_s: float = 0.0
    loop_s: float = 0.0  # the part outside the models' calls

    def take(self, event: Event) -> None:
        if isinstance(event, Notice):
            self.notices.append(event.text)
        elif isinstance(event, StepEvent) and event.step > 0:
            self.n_steps += 1
            self.n_drafted += len(event.drafted)
            self.step_s += event.step_s
            self.loop_s += event.loop_s

    def outcome(self, finished: Finished, answer: TextStream) -> dict[str, object]:
        stats = finished.stats
        return {
            "text": answer.text,
            "tokens": answer.tokens,
            "finish_reason": finished.reason,
            "fits_format": None if self.form is None else self.form.fits(answer.text),
            **figures(stats),
            "times": {key: value for key, value in stats.to_json().items() if key.endswith("_s")},
            "overhead": {
                "s": self.loop_s,
                "steps": self.n_steps,
                "drafted": self.n_drafted,
                "per_step_s": self.loop_s / self.n_steps if self.n_steps else None,
                "share": self.loop_s / self.step_s if self.step_s else None,
            },
            "notices": self.notices,
        }


def begin(
    settings: Settings, setup: Setup, models: Models, names: Names, *, schema: Mapping[str, object] = SCHEMA
) -> Record:
    """The record of an answer that is about to start."""
    draft = models.loaded_draft
    assert (setup.draft is None) == (draft is None)
    return Record(
        {
            "schema": schema,
            "versions": versions(build_info()),
            "settings": to_json(settings),
            "profile": setup.profile.to_json() if setup.profile else None,
            "models": {
                "target": describe_model(setup.target, models.target),
                "draft": describe_model(setup.draft, draft) if setup.draft and draft else None,
            },
        },
        form=settings.format,
        notices=list(filter(None, [unused_draft(setup, names)])),
    )
