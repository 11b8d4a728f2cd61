"""Exit codes of every command."""

from __future__ import annotations

OK = 0
FAILED = 1  # a known failure, or what the command says: not compatible, needs attention
USAGE = 2  # an option or argument that cannot be meant
INTERRUPTED = 130
READER_GONE = 141  # whoever read stdout has left; what a shell reports of a program that ended of it, such as git
