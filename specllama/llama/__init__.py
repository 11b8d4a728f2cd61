"""The only room that knows llama_cpp. Other rooms use the names of this page."""

from specllama.llama.model import (
    BuildInfo,
    Device,
    Header,
    LlamaModel,
    LoadOptions,
    MemoryNeed,
    Vocabulary,
    build_info,
    load,
    load_vocabulary,
    matrices,
    memory_free,
    memory_needed,
    read_header,
    requantize,
    set_log,
)

__all__ = [
    "BuildInfo",
    "Device",
    "Header",
    "LlamaModel",
    "LoadOptions",
    "MemoryNeed",
    "Vocabulary",
    "build_info",
    "load",
    "load_vocabulary",
    "matrices",
    "memory_free",
    "memory_needed",
    "read_header",
    "requantize",
    "set_log",
]
