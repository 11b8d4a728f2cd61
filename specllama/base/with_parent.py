"""Run a Python module or a command in a process that ends when its parent has ended, also after `kill -9`.

    python with_parent.py MODULE ARGUMENT...
    python with_parent.py -- COMMAND ARGUMENT...

stdin is a pipe from the parent, which writes nothing to it; the system closes it. If the process leads its own group,
the processes that it started end with it; those of a command end with the command. A command that signal n ended gives
exit code 128 + n. This file runs as a script, also before anything is installed, so it imports nothing of ours.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading


def _end_with(parent: int) -> None:
    os.read(parent, 1)  # returns when the parent has ended
    if sys.platform != "win32" and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def watch() -> None:
    """End this process when the other end of stdin closes. Reading stdin finds nothing from now on."""
    parent = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _run() -> None:
    watch()
    if sys.argv[1] == "--":
        try:
            code = subprocess.call(sys.argv[2:])
        except OSError as error:
            sys.exit(f"{sys.argv[2]}: {error.strerror}")
        if sys.platform != "win32" and os.getpgrp() == os.getpid():  # what the command left in the background
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.killpg(0, signal.SIGTERM)
        if code < 0:
            os.write(2, os.fsencode(f"{sys.argv[2]} ended with signal {-code} ({signal.strsignal(-code)})\n"))
        sys.exit(code if code >= 0 else 128 - code)
    here = os.path.realpath(os.path.dirname(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder) != here]  # Python adds it for a script
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run()
