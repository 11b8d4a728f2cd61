"""The only package that imports llama_cpp."""

from specllama.llama.bindings import BuildInfo, Device, build_info, own_kernels
from specllama.llama.header import Header
from specllama.llama.load_plan import LoadOptions
from specllama.llama.memory import MemoryNeed, memory_free
from specllama.llama.model import (
    LlamaModel,
    load,
    load_together,
    load_vocabulary,
    memory_needed,
    prove,
    read_header,
    requantize,
    set_log,
    way_back,
)
from specllama.llama.rpc import connect
from specllama.llama.slots import LlamaSlots
from specllama.llama.vocab import Vocabulary

__all__ = [
    "BuildInfo",
    "Device",
    "Header",
    "LlamaModel",
    "LlamaSlots",
    "LoadOptions",
    "MemoryNeed",
    "Vocabulary",
    "build_info",
    "connect",
    "load",
    "load_together",
    "load_vocabulary",
    "memory_free",
    "memory_needed",
    "own_kernels",
    "prove",
    "read_header",
    "requantize",
    "set_log",
    "way_back",
]
