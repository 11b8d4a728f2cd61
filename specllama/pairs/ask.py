"""What the user asks for: which models, how to draft, how to load. The command line and the library build an `Ask`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from specllama.base.ranges import AUTO
from specllama.core.types import Rule
from specllama.drafters.length import AUTO_LENGTH, DraftLength


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Which models, in the user's words. Without any name: the default pair."""

    pair: str | None = None
    target: str | None = None  # a file, a model or pair, or user/repo[:quant]
    draft: str | None = None  # as `target`, or a derived draft
    target_repo: str | None = None  # user/repo[:quant], never a file or a name
    draft_repo: str | None = None
    offline: bool = False  # use only what is on this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """How tokens are drafted and accepted."""

    spec_type: str = AUTO  # names of `drafters.REGISTRY`, separated by commas
    length: DraftLength = AUTO_LENGTH  # auto = by the pair's profile
    p_min: float = 0.0  # drafting stops below this confidence
    temperature: float | None = None  # of the draft; None = the target's
    rule: Rule = Rule.BLOCK
    measure: bool = True  # a pair without a profile, once, when it is loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """How models are loaded."""

    n_ctx: int | None = None  # tokens; 0 = the training context as memory allows, None = the pair's, or up to 4096
    n_threads: int | None = None  # None = the physical cores
    n_threads_batch: int | None = None  # for passes over several tokens; None = as `n_threads`
    n_threads_draft: int | None = None  # None = as `n_threads`
    n_threads_batch_draft: int | None = None
    n_gpu_layers: int | Literal["auto", "all"] = "auto"
    n_gpu_layers_draft: int | Literal["auto", "all"] = "auto"
    type_k: str = "f16"  # of the KV cache
    type_v: str = "f16"
    type_k_draft: str = "f16"  # a coarser type lowers the acceptance rate
    type_v_draft: str = "f16"
    flash_attn: Literal["auto", "on", "off"] = "auto"
    kernels: Literal["auto", "on", "off"] = "auto"  # our CPU kernels; on = an error without them
    rollback: str = AUTO  # of ranges.ROLLBACKS, for models that have it
    rpc: tuple[str, ...] = ()  # servers that compute layers of the target: HOST:PORT


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Models, drafting and hardware. Nothing has been looked up yet."""

    names: Names = field(default_factory=Names)
    drafting: Drafting = field(default_factory=Drafting)
    hardware: Hardware = field(default_factory=Hardware)
