"""Answers that fit a JSON schema: tokens a pass, forced tokens, time of the masks, and speed beside llama-server.

    python benchmarks/formats.py speed [--pair NAME | -m FILE -md FILE] [--prompts 50] [--predict 160]
    python benchmarks/formats.py count [--pair NAME | -m FILE -md FILE] [--prompts 50] [--predict 400] [--temp 0.8]

`speed`: the extraction prompts of formats.json, each with the schema of its kind; greedy. Plain decoding and drafts,
both with the same mask, and the server with `json_schema`, without and with a draft, answer in turn; their order is
reversed every other time. Each answer begins with an empty KV cache, and the prompt is not counted. The server's
grammar allows other spaces, so its texts may differ.

`count`: how many answers fit their schema, with every way to draft, with one seed, and in a chat.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from statistics import fmean
from urllib.error import HTTPError

sys.path.insert(0, str(Path(__file__).resolve().parent))

from llguidance import LLMatcher
from loop import N_CTX, spread
from peers import programs
from servers import served, serving

import specllama
from specllama import api
from specllama.chat.format import JSON_SCHEMA, AnswerFormat
from specllama.chat.format_masks import FormatConstraint, FormatVocabulary
from specllama.core.constraint import Allowed
from specllama.core.events import Finished, StepEvent, TokenEvent
from specllama.core.stats import SpecStats

ARMS = ("plain", "drafts", "server", "server with a draft")


@dataclass(frozen=True)
class Task:
    kind: str
    prompt: str
    schema: Mapping[str, object]

    def fits(self, text: str) -> bool:
        """Is it JSON that fits the schema, with spaces anywhere?"""
        try:
            json.loads(text)
        except ValueError:
            return False
        schema = json.dumps(self.schema)
        return AnswerFormat(JSON_SCHEMA, schema, LLMatcher.grammar_from_json_schema(schema)).fits(text)


def tasks(n: int) -> list[Task]:
    """The first `n` tasks, the kinds in turn."""
    kinds = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    found = [
        Task(kind["kind"], f"Extract the data as JSON.\n\n{kind['texts'][i]}", kind["schema"])
        for i in range(len(kinds[0]["texts"]))
        for kind in kinds
    ]
    return found[:n]


class Counted(FormatConstraint):
    """Counts forced tokens, and the CPU time of its own work."""

    last: Counted

    def __init__(self, form: AnswerFormat, vocab: FormatVocabulary) -> None:
        super().__init__(form, vocab)
        self.n_forced, self.cpu_s = 0, 0.0
        Counted.last = self

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.thread_time()
        yield
        self.cpu_s += time.thread_time() - started

    def allowed(self, path: Sequence[int]) -> Allowed:
        with self._timed():
            return super().allowed(path)

    def forced(self) -> Sequence[int]:
        with self._timed():
            return super().forced()

    def advance(self, tokens: Sequence[int]) -> None:
        self.n_forced += sum(self.allowed(tokens[:i]).only is not None for i in range(len(tokens)))
        with self._timed():
            super().advance(tokens)


@dataclass(frozen=True)
class Said:
    text: str
    tok_s: float
    stats: SpecStats | None = None
    forced: float = 0.0  # share of the tokens
    mask_ms: float = 0.0  # for each row of the target


def ours(pair: specllama.Pair, task: Task, n: int, *, drafts: bool) -> Said:
    """A greedy answer."""
    pair._models.target.truncate(0)
    text, rows, stats = b"", 0, SpecStats()
    options = {"json_schema": task.schema, "temperature": 0.0, "max_tokens": n, "drafts": drafts, "seed": 1}
    for event in pair.events(task.prompt, **options):  # type: ignore[arg-type]
        if isinstance(event, TokenEvent):
            text += pair._models.target.vocab.piece(event.token)
        elif isinstance(event, StepEvent):
            rows += event.n_rows
        elif isinstance(event, Finished):
            stats = event.stats
    own = Counted.last
    return Said(
        text.decode("utf-8", "replace"),
        stats.decode_tok_s or 0.0,
        stats,
        own.n_forced / stats.n_emitted,
        1000 * own.cpu_s / rows,
    )


def theirs(url: str, pair: specllama.Pair, task: Task, n: int) -> Said | None:
    """The server's answer; None if it refuses the schema."""
    try:
        found = served(url, pair._tokens(task.prompt, "", False), n, json_schema=task.schema)
    except HTTPError as error:
        if error.code != HTTPStatus.BAD_REQUEST:
            raise
        print(f"refused: {error.read().decode()}", file=sys.stderr)
        return None
    return Said(found.text.decode(), found.decode)


def opened(args: argparse.Namespace, spec_type: str) -> specllama.Pair:
    return specllama.load(
        args.pair, target=args.model, draft=args.model_draft, spec_type=spec_type, n_ctx=N_CTX, on_note=print
    )


def over(found: list[dict[str, Said]], arm: str) -> str:
    """The gain of drafts over an arm."""
    return spread([each["drafts"].tok_s / each[arm].tok_s for each in found]) if found else ""


def measure(pair: specllama.Pair, urls: Mapping[str, str], args: argparse.Namespace) -> None:
    """Answers every task with every arm, and prints the table."""
    arms: dict[str, Callable[[Task], Said | None]] = {
        "plain": lambda task: ours(pair, task, args.predict, drafts=False),
        "drafts": lambda task: ours(pair, task, args.predict, drafts=True),
        **{arm: partial(theirs, url, pair, n=args.predict) for arm, url in urls.items()},
    }
    rows: list[tuple[Task, dict[str, Said]]] = []  # without the arms that refused
    ours(pair, tasks(1)[0], 8, drafts=True)  # makes the tokenizer of the masks
    for i, task in enumerate(tasks(args.prompts)):
        found = {arm: arms[arm](task) for arm in list(arms)[:: -1 if i % 2 else 1]}
        rows.append((task, said := {arm: each for arm, each in found.items() if each is not None}))
        speeds = ", ".join(f"{arm} {each.tok_s:.1f} t/s" for arm, each in said.items())
        print(f"{i} {task.kind}: {speeds}; {said['drafts'].text}", file=sys.stderr, flush=True)
    for arm in arms:
        answered = [(task, found[arm], found["plain"]) for task, found in rows if arm in found]
        n_fit = sum(task.fits(said.text) for task, said, _ in answered)
        n_same = sum(said.text == plain.text for _, said, plain in answered)
        refused = f", {len(rows) - len(answered)} refused" if len(answered) < len(rows) else ""
        print(f"{arm}: {n_fit} of {len(answered)} fit, {n_same} equal the plain text{refused}")
    others = list(urls)
    print(
        f"\n| schema | answers | tokens a pass | forced | from drafts | masks, ms a row | over plain "
        f"| {' | '.join(f'over {arm}' for arm in others)} |\n|{'---|' * (7 + len(others))}"
    )
    for kind in [*dict.fromkeys(task.kind for task, _ in rows), "all"]:
        these = [found for task, found in rows if kind in (task.kind, "all")]
        said = [found["drafts"] for found in these]
        stats = [each.stats for each in said if each.stats is not None]
        figures = [
            f"{fmean(each.n_emitted / each.n_steps for each in stats):.2f}",
            f"{fmean(each.forced for each in said):.2f}",
            f"{fmean(each.from_draft or 0.0 for each in stats):.2f}",
            f"{fmean(each.mask_ms for each in said):.2f}",
            *(over([found for found in these if arm in found], arm) for arm in ("plain", *others)),
        ]
        print(f"| {kind} | {len(these)} | {' | '.join(figures)} |")


def speed(args: argparse.Namespace) -> None:
    api.constraint_of = lambda form, vocab: None if form is None else Counted(form, vocab)  # type: ignore[assignment]
    threads = str(os.cpu_count())
    with ExitStack() as stack:
        pair = stack.enter_context(opened(args, "auto"))
        urls: dict[str, str] = {}
        if not args.alone:
            common = ["-m", str(pair.target), "-c", str(N_CTX), "-np", "1", "-t", threads, "-tb", threads,
                      "--cache-ram", "0"]  # fmt: skip
            drafts = ["-md", str(pair.draft), "-td", threads, "-tbd", threads, "--spec-type", "draft-simple",
                      "--spec-draft-n-max", "4", "--spec-draft-p-min", "0"]  # fmt: skip
            program = programs() / "llama-server"
            urls["server"] = stack.enter_context(serving(program, common))
            if pair.draft is not None:
                urls["server with a draft"] = stack.enter_context(serving(program, [*common, *drafts]))
        measure(pair, urls, args)


def count(args: argparse.Namespace) -> None:
    """Prints for each way how many answers fit, and how many were cut by -n."""
    options = {"temperature": args.temp, "max_tokens": args.predict}
    print("| drafts | answers | fit | cut by -n | neither |\n|---|---|---|---|---|")
    for spec_type in ("auto", "tree", "chain", "lookup", "none"):
        with opened(args, spec_type) as pair:
            ways: dict[str, Callable[[Task, int], specllama.Answer]] = {
                spec_type: lambda task, i, pair=pair: pair.answer(
                    task.prompt, json_schema=task.schema, seed=i, **options
                ),
            }
            if spec_type in ("auto", "tree"):
                ways[f"{spec_type}, one seed"] = lambda task, i, pair=pair: pair.answer(
                    task.prompt, json_schema=task.schema, seed=i, seed_mode="same", **options
                )
                ways[f"{spec_type}, second turn of a chat"] = lambda task, i, pair=pair: in_chat(pair, task, i, options)
            for way, answer in ways.items():
                found = [(task, answer(task, i)) for i, task in enumerate(tasks(args.prompts))]
                n_fit = sum(task.fits(said.text) and bool(said.fits_format) for task, said in found)
                n_cut = sum(said.reason == "length" and not said.fits_format for _, said in found)
                print(f"| {way} | {len(found)} | {n_fit} | {n_cut} | {len(found) - n_fit - n_cut} |", flush=True)


def in_chat(pair: specllama.Pair, task: Task, seed: int, options: Mapping[str, object]) -> specllama.Answer:
    chat = pair.chat(json_schema=task.schema, seed=seed, **options)  # type: ignore[arg-type]
    chat.send("Say the names of three colours.")
    return chat.send(task.prompt)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "count"))
    parser.add_argument("--pair", default=None)
    parser.add_argument("-m", "--model", default=None, help="a target instead of a pair")
    parser.add_argument("-md", "--model-draft", default=None)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--predict", type=int, default=160)
    parser.add_argument("--temp", type=float, default=0.8)
    parser.add_argument("--alone", action="store_true", help="without llama-server")
    args = parser.parse_args()
    {"speed": speed, "count": count}[args.what](args)


if __name__ == "__main__":
    main()
