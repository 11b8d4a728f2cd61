"""Record a terminal session as an SVG film for the documents.

    .venv/bin/python scripts/record.py docs/run.svg --size 100x24 --title "specllama run" -- specllama run "..."

The command runs in a pseudo-terminal; pyte keeps its screen. Frames are the distinct screens, at most six a second
unless `--gap` says otherwise; `--still SECOND` draws the screen at that second instead. With `--say` the lines are
typed, one each time the program asks with `>>> `, and Ctrl-D after the last.
"""

from __future__ import annotations

import argparse
import html
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pexpect
import pyte

CELL_W, CELL_H, FONT_SIZE = 8.4, 19.0, 14
MARGIN, BAR = 14, 34
FRAME_S, LAST_FRAME_S = 0.16, 4.0
ASKS, CTRL_D = ">>> ", "\x04"
KEY_S, THINK_S = 0.06, 0.8  # between two keys, before and after a line
BACKGROUND, FOREGROUND = "#11151c", "#d8dee9"
PALETTE = {
    "black": "#3b4252", "red": "#e06c75", "green": "#98c379", "brown": "#e5c07b", "blue": "#61afef",
    "magenta": "#c678dd", "cyan": "#56b6c2", "white": "#d8dee9",
    "brightblack": "#7f8899", "brightred": "#ff7b86", "brightgreen": "#b5e890", "brightbrown": "#ffd58a",
    "brightyellow": "#ffd58a", "brightblue": "#82c7ff", "brightmagenta": "#e19bff", "brightcyan": "#7fe3ee",
    "brightwhite": "#ffffff", "default": FOREGROUND,
}  # fmt: skip


def colour(name: str) -> str:
    """pyte's colour name or six hexadecimal digits as a CSS colour."""
    return PALETTE.get(name, f"#{name}")


def runs(line: dict[int, pyte.screens.Char], n_columns: int) -> list[tuple[int, int, str, pyte.screens.Char]]:
    """Stretches of one style: (first column, cells, text, the style). A wide character takes two cells."""
    found: list[tuple[int, int, str, pyte.screens.Char]] = []
    for x in range(n_columns):
        char = line[x]
        style = char._replace(data="")
        if found and found[-1][3] == style:
            first, n_cells, text, _ = found[-1]
            found[-1] = (first, n_cells + 1, text + char.data, style)
        else:
            found.append((x, 1, char.data, style))
    return found


def draw(screen: pyte.Screen) -> tuple[str, ...]:
    """The screen's lines, each as SVG elements."""
    return tuple(draw_line(screen, y) for y in range(screen.lines))


def draw_line(screen: pyte.Screen, y: int) -> str:
    """One line of the screen as SVG elements."""
    parts = []
    for x, n_cells, text, char in runs(screen.buffer[y], screen.columns):
        fore, back = colour(char.fg), BACKGROUND if char.bg == "default" else colour(char.bg)
        if char.reverse:
            fore, back = back, fore
        left, top = MARGIN + x * CELL_W, BAR + y * CELL_H
        if back != BACKGROUND:
            parts.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{n_cells * CELL_W:.1f}" height="{CELL_H}" fill="{back}"/>'
            )
        if not text.strip():
            continue
        style = "".join(
            f' {attribute}="{value}"'
            for attribute, value, wanted in (
                ("font-weight", "bold", char.bold),
                ("font-style", "italic", char.italics),
                ("text-decoration", "underline", char.underscore),
            )
            if wanted
        )
        width = f' textLength="{n_cells * CELL_W:.1f}" lengthAdjust="spacing"' if text.isascii() else ""
        parts.append(
            f'<text x="{left:.1f}" y="{top + 14:.1f}" fill="{fore}"{style}{width} xml:space="preserve">'
            f"{html.escape(text)}</text>"
        )
    return "".join(parts)


class Typist:
    """Types the next line, letter by letter, each time the program asks; sends Ctrl-D after the last."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._keys = ""
        self._next = 0.0

    def press(self, screen: pyte.Screen, send: Callable[[str], object]) -> None:
        """Send the next key if it is due."""
        now = time.monotonic()
        if now < self._next:
            return
        if not self._keys:
            line = screen.buffer[screen.cursor.y]
            if "".join(line[x].data for x in range(len(ASKS) + 1)).rstrip() != ASKS.rstrip():
                return
            self._keys = f"{self._lines.pop(0)}\r" if self._lines else CTRL_D
            self._next = now + THINK_S
            return
        send(self._keys[0])
        self._keys = self._keys[1:]
        self._next = now + (KEY_S if self._keys else THINK_S)


HIDDEN = ' visibility="hidden"'  # an attribute: a viewer without CSS understands it
STILL = "@media(prefers-reduced-motion:reduce){g{animation:none!important}}"


Frame = tuple[float, tuple[str, ...]]  # second, lines


def record(command: str, n_columns: int, n_lines: int, timeout_s: float, says: list[str], gap_s: float) -> list[Frame]:
    """Distinct screens of `command`, at least `gap_s` apart, with the second at which each appeared.

    Only these are drawn, because drawing takes time from the program.
    """
    screen = pyte.Screen(n_columns, n_lines)
    stream = pyte.ByteStream(screen)
    child = pexpect.spawn("/bin/sh", ["-c", command], dimensions=(n_lines, n_columns), timeout=None)
    screen.write_process_input = child.send  # the program asks for the cursor position
    typist = Typist(says) if says else None
    started, drawn, frames = time.monotonic(), 0.0, [(0.0, draw(screen))]
    while time.monotonic() - started < timeout_s:
        if typist is not None:
            typist.press(screen, child.send)
        try:
            stream.feed(child.read_nonblocking(65536, timeout=KEY_S if typist else gap_s))
        except pexpect.TIMEOUT:
            pass
        except pexpect.EOF:
            break
        now = time.monotonic() - started
        if now - drawn < gap_s:
            continue
        drawn, picture = now, draw(screen)
        if picture != frames[-1][1]:
            frames.append((now, picture))
    child.close()
    frames.append((time.monotonic() - started, draw(screen)))
    return frames


def film(frames: list[Frame], n_columns: int, n_lines: int, title: str) -> str:
    """The frames as one SVG that plays in a loop; a line that does not change is drawn once.

    Without animation (previews, print, reduced motion) the last frame shows.
    """
    width, height = 2 * MARGIN + n_columns * CELL_W, BAR + n_lines * CELL_H + MARGIN
    total = frames[-1][0] + LAST_FRAME_S
    groups, rules = [], []
    for y in range(n_lines):
        starts = [i for i in range(len(frames)) if i == 0 or frames[i][1][y] != frames[i - 1][1][y]]
        for start, following in zip(starts, [*starts[1:], None], strict=True):
            picture = frames[start][1][y]
            if not picture:
                continue
            if start == 0 and following is None:
                groups.append(picture)
                continue
            begin = 100 * frames[start][0] / total if start else 0.0
            end = 100.0 if following is None else 100 * frames[following][0] / total
            name = f"l{len(rules)}"
            hidden_first = "" if start == 0 else "0%{visibility:hidden}"
            shown = f"{begin:.3f}%{{visibility:visible}}{end:.3f}%,100%{{visibility:hidden}}"
            rules.append(
                f"@keyframes {name}{{{hidden_first}{shown}}}#{name}{{animation:{name} {total:.2f}s step-end infinite}}"
            )
            still = "" if following is None else HIDDEN
            groups.append(f'<g id="{name}"{still}>{picture}</g>')
    dots = "".join(
        f'<circle cx="{MARGIN + 6 + 18 * i}" cy="17" r="5.5" fill="{fill}"/>'
        for i, fill in enumerate(("#e06c75", "#e5c07b", "#98c379"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="{FONT_SIZE}">'
        f"<style>{''.join(rules)}{STILL if rules else ''}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>{dots}'
        f'<text x="50%" y="21" text-anchor="middle" fill="#7f8899">{html.escape(title)}</text>'
        f"{''.join(groups)}</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--size", default="100x24", help="columns x lines")
    parser.add_argument("--title", default="")
    parser.add_argument("--still", type=float, metavar="SECOND", help="one picture: the screen at this second")
    parser.add_argument("--gap", type=float, default=FRAME_S, metavar="SECONDS", help="shortest time between frames")
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--say", action="append", default=[], metavar="LINE", help="type this line when asked")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    n_columns, n_lines = map(int, args.size.split("x"))
    frames = record(shlex.join(args.command), n_columns, n_lines, args.timeout, args.say, args.gap)
    if args.still is not None:
        frames = [[frame for frame in frames if frame[0] <= args.still][-1]]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(film(frames, n_columns, n_lines, args.title), encoding="utf-8")
    print(f"{args.output}: {len(frames)} frames, {args.output.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
