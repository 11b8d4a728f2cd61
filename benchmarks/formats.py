"""Answers that fit a JSON schema: tokens a pass, forced tokens, time of the masks, and speed over plain decoding.

    python benchmarks/formats.py [--pair NAME] [--prompts 50] [--predict 160]

Extraction prompts, each with the schema of its kind; greedy, plain and with drafts in turn, both with the same mask.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from statistics import fmean, median

import specllama
from specllama import api
from specllama.chat.format import AnswerFormat
from specllama.chat.format_masks import FormatConstraint, FormatVocabulary
from specllama.core.constraint import Allowed
from specllama.core.events import Finished, StepEvent, TokenEvent
from specllama.core.stats import SpecStats

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
KINDS: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "person": (
        {"name": TEXT, "age": NUMBER, "city": TEXT, "likes": {"type": "array", "items": TEXT, "maxItems": 4}},
        (
            "Ann Lee, {n}, lives in {city}. She likes chess, tea and rain.",
            "My neighbour in {city}, Bo Dahl, turned {n} last week. He plays the drums and bakes bread.",
        ),
    ),
    "order": (
        {"customer": TEXT, "items": {"type": "array", "maxItems": 3, "items": {
            "type": "object", "properties": {"product": TEXT, "quantity": NUMBER}, "required": ["product", "quantity"],
            "additionalProperties": False}}, "express": {"type": "boolean"}},
        (
            "Please send {n} blue lamps and two chairs to Carla Ruiz in {city}, as fast as you can.",
            "Order for Li Wei, {city}: {n} notebooks. No hurry.",
        ),
    ),
    "ticket": (
        {"component": {"enum": ["network", "storage", "billing", "interface"]}, "affected": NUMBER,
         "priority": {"enum": ["low", "normal", "high"]}, "summary": {"type": "string", "maxLength": 80}},
        (
            "Since this morning {n} customers in {city} cannot reach the file server. It is urgent.",
            "A button on the settings page has the wrong colour, reported by {n} users from {city}.",
        ),
    ),
    "event": (
        {"title": TEXT, "date": {"type": "string", "format": "date"}, "place": {"type": "object", "properties": {
            "city": TEXT, "room": TEXT}, "required": ["city", "room"], "additionalProperties": False}, "seats": NUMBER},
        (
            "The workshop 'Rust for Python people' takes place on 3 May 2026 in {city}, room B{n}, with {n} seats.",
            "Save the date: on 2026-11-12 we meet in the great hall in {city} for the harvest concert; {n} seats.",
        ),
    ),
}  # fmt: skip
CITIES = ("Oslo", "Lima", "Kyoto", "Porto", "Accra", "Quito", "Turin")


def prompts(n: int) -> list[tuple[str, dict[str, object]]]:
    """(prompt, schema) of `n` tasks, the kinds in turn."""
    tasks = []
    for i in range(n):
        parts, texts = list(KINDS.values())[i % len(KINDS)]
        text = texts[i // len(KINDS) % len(texts)].format(n=12 + 7 * i % 60, city=CITIES[i % len(CITIES)])
        schema = {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}
        tasks.append((f"Extract the data as JSON.\n\n{text}", schema))
    return tasks


class Counted(FormatConstraint):
    """Counts forced tokens, and the CPU time of its own work."""

    last: Counted

    def __init__(self, form: AnswerFormat, vocab: FormatVocabulary) -> None:
        super().__init__(form, vocab)
        self.n_forced, self.cpu_s = 0, 0.0
        Counted.last = self

    def allowed(self, path: Sequence[int]) -> Allowed:
        started = time.thread_time()
        found = super().allowed(path)
        self.cpu_s += time.thread_time() - started
        return found

    def forced(self) -> Sequence[int]:
        started = time.thread_time()
        found = super().forced()
        self.cpu_s += time.thread_time() - started
        return found

    def advance(self, tokens: Sequence[int]) -> None:
        self.n_forced += sum(super(Counted, self).allowed(tokens[:i]).only is not None for i in range(len(tokens)))
        super().advance(tokens)


def answered(
    pair: specllama.Pair, prompt: str, schema: dict[str, object], n: int, *, drafts: bool
) -> tuple[str, SpecStats, int]:
    """(text, stats, rows of the target) of a greedy answer."""
    text, rows, stats = b"", 0, SpecStats()
    for event in pair.events(prompt, json_schema=schema, temperature=0.0, max_tokens=n, drafts=drafts, seed=1):
        if isinstance(event, TokenEvent):
            text += pair._models.target.vocab.piece(event.token)
        elif isinstance(event, StepEvent):
            rows += event.n_rows
        elif isinstance(event, Finished):
            stats = event.stats
    return text.decode("utf-8", "replace"), stats, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default=None)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--predict", type=int, default=160)
    args = parser.parse_args()
    api.constraint_of = lambda form, vocab: None if form is None else Counted(form, vocab)  # type: ignore[assignment]
    found: dict[str, list[tuple[float, float, float, float, float]]] = {}
    n_same = n_parsed = 0
    with specllama.load(args.pair) as pair:
        answered(pair, "Hi", {"type": "boolean"}, 4, drafts=True)  # makes the tokenizer of the masks
        for i, (prompt, schema) in enumerate(prompts(args.prompts)):
            kind, speeds, texts = list(KINDS)[i % len(KINDS)], [0.0, 0.0], ["", ""]
            for drafts in (False, True) if i % 2 else (True, False):
                texts[drafts], stats, rows = answered(pair, prompt, schema, args.predict, drafts=drafts)
                speeds[drafts] = stats.n_emitted / stats.decode_s
                if drafts:
                    own, per_pass = Counted.last, stats.n_emitted / stats.n_steps
                    shares = (own.n_forced / stats.n_emitted, stats.from_draft, 1000 * own.cpu_s / rows)
            n_same += texts[0] == texts[1]
            try:
                n_parsed += set(json.loads(texts[1])) == set(schema["required"])  # type: ignore[call-overload]
            except ValueError:
                print(f"cut: {texts[1]}")
            found.setdefault(kind, []).append((speeds[1] / speeds[0], per_pass, *shares))
            print(f"{i} {kind} {speeds[1] / speeds[0]:.2f} {per_pass:.2f} {texts[1]}", flush=True)
    print(f"\n{n_parsed} of {args.prompts} parse, {n_same} equal the plain text")
    print(
        "| schema | answers | tokens a pass | forced | from drafts | masks, ms a row | over plain |\n"
        "|---|---|---|---|---|---|---|"
    )
    for kind, rows_ in [*found.items(), ("all", [row for each in found.values() for row in each])]:
        gains, passes, forced, drafted, masks = zip(*rows_, strict=True)
        print(
            f"| {kind} | {len(rows_)} | {fmean(passes):.2f} | {fmean(forced):.2f} | {fmean(drafted):.2f} "
            f"| {fmean(masks):.2f} | {median(gains):.2f} |"
        )


if __name__ == "__main__":
    main()
