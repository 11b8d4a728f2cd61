"""`specllama run`: answer one prompt."""

from __future__ import annotations

from specllama.cli.grouping import takes_groups
from specllama.cli.options import (
    DraftOptions,
    HardwareOptions,
    ModelOptions,
    OutputOptions,
    PromptOptions,
    SamplingOptions,
)


@takes_groups
def run(
    prompt: PromptOptions,
    models: ModelOptions,
    drafting: DraftOptions,
    sampling: SamplingOptions,
    hardware: HardwareOptions,
    output: OutputOptions,
) -> None:
    """Answer one prompt, fast and exactly as the target would."""
    print(prompt, models, drafting, sampling, hardware, output)
