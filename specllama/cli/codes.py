"""Exit codes of every command."""

from __future__ import annotations

OK = 0
FAILED = 1  # a known failure, or a negative result: not compatible, needs attention
USAGE = 2  # a wrong option or argument
CUT = 3  # the answer was cut by -n, the context, or --stop within a format; only with --fail-if-cut
HUNG_UP = 129  # 128 + SIGHUP: the terminal was closed
INTERRUPTED = 130  # 128 + SIGINT; SIGTERM is 143
READER_GONE = 141  # 128 + SIGPIPE: the reader of stdout has closed the pipe
