"""Our CPU kernels for quantized weights: C++ sources, how they are built, and the library in this process.

README.md beside this file explains the layout and the arithmetic. `specllama.llama` loads the library.
"""
