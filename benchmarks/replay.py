"""How near the controller comes to the best fixed setting: recorded answers replayed with measured costs.

    python benchmarks/replay.py record FILE.jsonl [--tokens 256] [--minutes 9]    # repeat it to continue
    python benchmarks/replay.py report FILE.jsonl [--json OUT.json]
    python benchmarks/replay.py report FILE.jsonl --ablate [--only TEXT]    # what each part of the controller is worth

`record` lets the target of the default pair answer the prompts of `bars.py` at both temperatures, and the draft judge
every token. Each answer is saved before the next. `--drafts` lets further drafts judge; `--two-layers` adds a hopeless
one: the published draft with only its first and last layer.

`report` replays the answers (see `replaying.py`) with the profile of this machine, if `specllama tune` made one, and
with the costs of other machines. A replay has no noise, which hides 5 % on a real machine. With these costs the
controller begins with its default prior, on this machine with the profile's. The draft's reading of the prompt counts
in every setting with a draft model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import ablation
from bars_arms import SAMPLER, SOURCES, prepared, prompts_of, published_draft
from replaying import MODEL, N_ROUNDS, Found, Machine, Recorded, Replays, bounds, hopeless
from rows import append, mend, rows_of

from specllama import llama
from specllama.base.disk import meant
from specllama.chat.conversation import Conversation, Message
from specllama.core.distribution import Distribution
from specllama.core.types import Cancel
from specllama.derive import make as derive
from specllama.drafters.controller import PROBE_TOKENS, CostProfile, Points
from specllama.llama import LlamaModel
from specllama.pairs import derived as drafts
from specllama.pairs.derived import Recipe
from specllama.pairs.draft_in_target_ids import in_target_ids
from specllama.pairs.setup import Listener, Setup, load_models
from specllama.prompts.load import BenchPrompt
from specllama.tuning import traces
from specllama.tuning.traces import GREEDY, TracedAnswer

PUBLISHED, TWO_LAYERS = "published", "two layers"
TEMPERATURES = (0.0, 1.0)
NEAR_BEST, NEAR_PLAIN = 0.97, 0.98  # the aims
LENGTHS = (1, 2, 3, 4, 5, 7, 11, 15)

# T(n)/T(1) of the 1.5B target as measured for the design (two cores, AMX), and in this folder's README (Zen 4).
AMX: Points = ((1, 1.0), (2, 1.59), (3, 1.67), (4, 1.73), (5, 1.83), (6, 1.90), (8, 2.08), (12, 2.42), (16, 2.79))
REPACK: Points = ((1, 1.0), (2, 1.6), (3, 2.0), (4, 1.5), (5, 1.83), (6, 2.19), (8, 2.3), (12, 3.07), (16, 3.4))
ZEN4: Points = ((1, 1.0), (2, 1.98), (3, 2.77), (4, 2.93), (5, 4.41), (6, 4.32), (7, 6.13), (8, 6.96), (12, 8.66),
                (16, 8.99))  # fmt: skip
# specllama's kernels on the machine with AMX: target and draft in the README's first tables.
OURS: Points = ((1, 1.0), (2, 1.06), (3, 1.13), (4, 1.23), (6, 1.32), (8, 1.53), (12, 2.05), (16, 2.54))
OURS_READS: Points = ((1, 1.0), (2, 1.11), (4, 1.27), (8, 1.44), (16, 2.33), (512, 53.5))
# Only `tune` measures a draft's blocks; here they have the shape of the target's.
AMX_READS: Points = (*AMX, (32, 4.0), (64, 6.5), (256, 22.0))
ZEN4_READS: Points = (*ZEN4, (256, 74.0))


def _costs(verify: Points, reads: Points, c: float) -> CostProfile:
    return CostProfile(verify=verify, draft=tuple((n, c * cost) for n, cost in reads))


ELSEWHERE = (
    Machine("specllama's kernels, published draft (c = 0.39)", _costs(OURS, OURS_READS, 0.39)),
    Machine("specllama's kernels, draft in Q4_0 (c = 0.29)", _costs(OURS, OURS_READS, 0.29)),
    Machine("AMX, published draft (c = 0.42)", _costs(AMX, AMX_READS, 0.42)),
    Machine("AMX, draft in Q4_0 (c = 0.21)", _costs(AMX, AMX_READS, 0.21)),
    Machine("target in CPU_REPACK, published draft (c = 0.42)", _costs(REPACK, AMX_READS, 0.42)),
    Machine("target in CPU_REPACK, draft in Q4_0 (c = 0.21)", _costs(REPACK, AMX_READS, 0.21)),
    Machine("Zen 4, published draft (c = 0.70)", _costs(ZEN4, ZEN4_READS, 0.70)),
)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt at one temperature."""

    group: str
    prompt: str  # its id
    temperature: float

    @property
    def key(self) -> tuple[str, float]:
        return self.prompt, self.temperature


@dataclass(slots=True)
class Recording:
    """The content of a recording."""

    answers: dict[tuple[str, float], dict[str, Any]]
    judged: dict[tuple[str, float, str], dict[str, Any]]
    n_tokens: int | None = None


def read(path: Path) -> Recording:
    """The rows so far, without a damaged last line, which `record` removes."""
    found = Recording({}, {})
    for row in rows_of(path):
        what = row.get(row.get("kind"), {})
        if row.get("kind") == "settings":
            found.n_tokens = what["tokens"]
        elif row.get("kind") == "answer":
            found.answers[what["prompt"], what["temperature"]] = what
        elif row.get("kind") == "judged":
            found.judged[what["prompt"], what["temperature"], what["draft"]] = what
    return found


def everything(groups: Sequence[str], n_prompts: int) -> Iterator[tuple[Asked, BenchPrompt]]:
    """Every prompt; the classes take turns, so a part of a recording has all classes."""
    for i in range(n_prompts):
        for group in groups:
            prompt = prompts_of(group)[i]
            for temperature in TEMPERATURES:
                yield Asked(group, prompt.id, temperature), prompt


def heard(target: LlamaModel, asked: Asked, prompt: Sequence[int], n_tokens: int) -> dict[str, Any]:
    """The target's answer; above temperature 0 with its laws, to judge any draft later."""
    params = replace(SAMPLER, temperature=asked.temperature)
    found = traces.answer(target, asked.group, prompt, n_tokens=n_tokens, params=params)
    laws = [[each.tolist() for each in law.items()] for law in found.laws[: len(found.tokens)]]
    return {**asdict(asked), "tokens_of_prompt": list(prompt), "tokens": list(found.tokens),
            "laws": None if asked.temperature == 0.0 else laws}  # fmt: skip


def as_answer(row: dict[str, Any], n_vocab: int) -> TracedAnswer:
    """An answer as `traces.judged` takes it. At temperature 0 the law of a token is the token itself."""
    tokens = tuple(row["tokens"])
    points = tuple(map(Distribution.point, tokens))
    greedy = row["laws"] is None
    laws = points if greedy else tuple(Distribution.on(ids, probs) for ids, probs in row["laws"])
    params = GREEDY if greedy else replace(SAMPLER, temperature=row["temperature"])
    return TracedAnswer(row["group"], tuple(row["tokens_of_prompt"]), tokens, n_vocab, params, laws, points)


def two_layers(draft: Path, path: Path) -> Path:
    """Write the draft with only its first and last layer; returns `path`."""
    header = llama.read_header(draft)
    derive.make(header, Recipe(dropped=tuple(range(1, header.n_layer - 1))), path, lambda what, share: None)
    return path


def judge_all(target: LlamaModel, setup: Setup, path: Path, name: str, draft: Path, until: float) -> bool:
    """Let a draft judge the answers that it has not judged yet; False if time ran out."""
    found = read(path)
    missing = [row for key, row in found.answers.items() if (*key, name) not in found.judged]
    if not missing:
        return True
    options = replace(setup.draft_options(target.n_ctx), max_block=PROBE_TOKENS)
    with llama.load(draft, options) as loaded:
        model = in_target_ids(target, loaded)
        for n, row in enumerate(missing):
            if time.monotonic() > until:
                return False
            sampled, greedy = traces.judged(model, as_answer(row, target.vocab_size))
            trace = greedy if row["temperature"] == 0.0 else sampled
            append(path, "judged", {"prompt": row["prompt"], "temperature": row["temperature"], "draft": name,
                                    "acceptance": trace.acceptance, "confidence": trace.confidence})  # fmt: skip
            say(f"{n + 1}/{len(missing)} {row['prompt']} at {row['temperature']:g} judged by {name}: "
                f"{sum(trace.acceptance) / max(len(trace.acceptance), 1):.2f} accepted")  # fmt: skip
    return True


def record(args: argparse.Namespace) -> None:
    path, until = args.file, time.monotonic() + 60 * args.minutes
    llama.set_log(None)
    setup, published = prepared(), published_draft()
    assert published.draft is not None
    found = read(path)
    mend(path)
    if found.n_tokens is None:
        append(path, "settings", {"tokens": args.tokens, "target": setup.target.path.name})
    elif found.n_tokens != args.tokens:
        raise SystemExit(f"{path} has --tokens {found.n_tokens}")
    plan = [each for each in everything(args.classes.split(","), args.prompts) if each[0].key not in found.answers]
    with load_models(replace(setup, draft=None), Listener(), Cancel()) as models:
        target, finished = models.target, True
        talk = Conversation(target.vocab, setup.target.template)
        for n, (asked, prompt) in enumerate(plan):
            began = time.monotonic()
            if began > until:
                finished = False
                break
            tokens = talk.tokens([Message("user", prompt.turns[0])])
            row = heard(target, asked, tokens, args.tokens)
            append(path, "answer", row)
            took = time.monotonic() - began
            say(
                f"{n + 1}/{len(plan)} {prompt.id} at {asked.temperature:g}: {len(row['tokens'])} tokens in {took:.0f} s"
            )
        named = [(name, drafts.named(name) or meant(name)) for name in (args.drafts or "").split(",") if name]
        for name, draft in ((PUBLISHED, published.draft.path), *named):
            finished = judge_all(target, published, path, name, draft, until) and finished
        if args.two_layers:
            with tempfile.TemporaryDirectory() as folder:
                draft = two_layers(published.draft.path, Path(folder) / "two-layers.gguf")
                finished = judge_all(target, published, path, TWO_LAYERS, draft, until) and finished
    say("everything is recorded" if finished else "time ran out: the same command continues")


def recorded(found: Recording, group: str, temperature: float, draft: str) -> list[Recorded]:
    """The answers of a class that a draft judged."""
    rows = [
        (row, found.judged[row["prompt"], temperature, draft])
        for row in found.answers.values()
        if (row["group"], row["temperature"]) == (group, temperature) and row["tokens"]
        if (row["prompt"], temperature, draft) in found.judged
    ]
    return [
        Recorded(group, tuple(row["tokens_of_prompt"]), tuple(row["tokens"]), tuple(seen["acceptance"]),
                 tuple(seen["confidence"]))
        for row, seen in rows
    ]  # fmt: skip


def machines() -> list[Machine]:
    """This one first, if it was tuned."""
    setup = prepared()
    profile = setup.profile
    if profile is None:
        say(f"note: this machine has no profile ({setup.stale or '`specllama tune` makes one'})")
        return list(ELSEWHERE)
    name = f"this machine, tuned {profile.made[:10]} (c = {profile.costs.draft_cost():.2f})"
    here = Machine(name, profile.costs, profile.prior(greedy=True), profile.prior(greedy=False))
    return [here, *ELSEWHERE]


def rounds(temperature: float) -> int:
    return 1 if temperature == 0.0 else N_ROUNDS


def _row(temperature: float, found: Found, n: int) -> str:
    near = "yes" if found.share >= NEAR_BEST else "no"
    plain = "yes" if found.auto >= NEAR_PLAIN else "no"
    alone = "not loaded | " if found.model is None else f"{found.model:.2f} | {found.model_share:.2f}"
    return (
        f"| {temperature:g} | {found.group} | {n} | {found.best_length}: {found.fixed[found.best_length]:.2f} "
        f"| {alone} | {found.best}: {found.fixed[found.best]:.2f} "
        f"| **{found.auto:.2f}** | **{found.share:.2f}** | {near} | {found.worst:.2f} | {plain} |"
    )


def bound_table(every: Sequence[Machine]) -> list[str]:
    """The highest gain: everything accepted, from the model and from lookups, which cost nothing."""
    lines = ["\n**The most that drafts can give**: (k+1) / (k c + T(k+1)), all k accepted, times plain decoding\n",
             "| machine | source | " + " | ".join(f"k = {k}" for k in LENGTHS) + " |",
             "|---|---|" + "---|" * len(LENGTHS)]  # fmt: skip
    for here in every:
        drafted = [k for k in LENGTHS if k + 1 <= here.costs.verify[-1][0]]
        for source, c in (("draft model", None), ("lookup, c = 0", 0.0)):
            most = bounds(here.costs, drafted, c)
            best = max(most.values())
            told = [f"**{most[k]:.2f}**" if most[k] == best else f"{most[k]:.2f}" for k in drafted]
            told += [""] * (len(LENGTHS) - len(drafted))
            lines.append(f"| {here.name} | {source} | " + " | ".join(told) + " |")
    return lines


def report(args: argparse.Namespace) -> None:
    found, every = read(args.file), machines()
    cases = [(temperature, group, kept) for temperature in TEMPERATURES for group in SOURCES
             if (kept := recorded(found, group, temperature, args.draft))]  # fmt: skip
    if not cases:
        raise SystemExit(f"{args.file} holds no answers judged by {args.draft}")
    lengths = [len(each.tokens) for _, _, kept in cases for each in kept]
    print(f"{len(lengths)} answers of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all; draft: "
          f"{args.draft}; rates are tokens per T(1), plain decoding is 1")  # fmt: skip
    told: dict[str, Any] = {"draft": args.draft, "machines": {}, "hopeless": []}
    replays = [(temperature, Replays(kept, rounds(temperature))) for temperature, _, kept in cases]
    for here in every:
        print(f"\n**{here.name}**: `auto` drafts with {here.auto}\n\n"
              "| temperature | class | answers | best K of the model | controller, model alone | over it "
              f"| best fixed setting | `auto` | over it | >= {NEAR_BEST} | worst answer | >= {NEAR_PLAIN} of plain |\n"
              "|---|---|---|---|---|---|---|---|---|---|---|---|")  # fmt: skip
        told["machines"][here.name] = {"costs": asdict(here.costs), "auto": here.auto, "cases": []}
        for temperature, each in replays:
            seen = each.on(here.at(temperature))
            print(_row(temperature, seen, len(each.answers)), flush=True)
            told["machines"][here.name]["cases"].append({"temperature": temperature, **asdict(seen),
                                                         "best": seen.best, "share": seen.share,
                                                         "model_share": seen.model_share})  # fmt: skip
    for line in bound_table(every):
        print(line)
    print("\n**With a hopeless draft**: the controller with the model alone, over plain decoding; the worst answer in "
          "brackets. It begins with an acceptance of 80 %. Machines on which no draft can pay load none and are "
          "left out.\n\n"
          f"| machine | draft | temperature | {' | '.join(SOURCES)} | all >= 0.98 |\n"
          f"|---|---|---|{'---|' * len(SOURCES)}---|")  # fmt: skip
    for line in hopeless_rows(found, every, args.draft, told["hopeless"]):
        print(line, flush=True)
    if args.json:
        args.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def hopeless_rows(found: Recording, every: Sequence[Machine], draft: str, told: list[Any]) -> Iterator[str]:
    """Made-up drafts, and the real one with two layers if it judged the answers."""
    kinds: dict[str, tuple[str, float | None]] = {
        "made up: 0 % right, with the published confidence": (draft, 0.0),
        "made up: 5 % right, with the published confidence": (draft, 0.05),
        "published draft, two of its layers left": (TWO_LAYERS, None),
    }
    for kind, (judge, chance) in kinds.items():
        for temperature in TEMPERATURES:
            by_group = {group: recorded(found, group, temperature, judge) for group in SOURCES}
            if not any(by_group.values()):
                continue
            n = rounds(temperature) if chance is None else 1
            replays = {
                group: Replays([each if chance is None else hopeless(each, chance) for each in kept], n)
                for group, kept in by_group.items()
                if kept
            }
            for here in (each for each in every if each.draft_can_pay):  # elsewhere it is not loaded
                doubting = Machine(here.name, here.costs)
                rates = {group: each.controlled(doubting, MODEL) for group, each in replays.items()}
                told.append({"machine": here.name, "draft": kind, "temperature": temperature, "rates": rates})
                cells = [
                    f"{rates[group][0]:.3f} ({rates[group][1]:.2f})" if group in rates else "" for group in SOURCES
                ]
                kept_up = all(rate >= NEAR_PLAIN for rate, _ in rates.values())
                yield (f"| {here.name} | {kind} | {temperature:g} | {' | '.join(cells)} "
                       f"| {'yes' if kept_up else 'no'} |")  # fmt: skip


FLAT: Points = ((1, 1.0), (2, 1.03), (4, 1.06), (8, 1.1), (17, 1.25))  # as on a GPU
FLAT_READS: Points = (*FLAT, (256, 4.0))


def ablation_cases(found: Recording, draft: str) -> list[ablation.Case]:
    """The classes at both temperatures on machines of every kind, and with a draft that is right in 5 % of cases."""
    machines = [
        Machine("flat T, c = 0.1", _costs(FLAT, FLAT_READS, 0.1)),
        Machine("flat T, c = 0.25", _costs(FLAT, FLAT_READS, 0.25)),
        Machine("AMX, c = 0.42", _costs(AMX, AMX_READS, 0.42)),
        Machine("AMX, c = 0.21", _costs(AMX, AMX_READS, 0.21)),
        Machine("REPACK, c = 0.42", _costs(REPACK, AMX_READS, 0.42)),
        Machine("Zen 4, c = 0.15", _costs(ZEN4, ZEN4_READS, 0.15)),
        Machine("Zen 4, c = 0.70", _costs(ZEN4, ZEN4_READS, 0.70)),
    ]
    groups = [(group, temperature) for temperature in TEMPERATURES for group in SOURCES]
    judged = {each: kept for each in groups if (kept := recorded(found, *each, draft))}
    answers = [Replays(kept, 1) for kept in judged.values()]
    wrong = [Replays([hopeless(each, 0.05) for each in kept], 1) for (_, temperature), kept in judged.items()
             if temperature == 0.0]  # fmt: skip
    cases = [ablation.Case(here.name, here, here.auto, each) for here in machines for each in answers]
    cases += [ablation.Case(f"{here.name}, model alone", here, MODEL, each)
              for here in (machines[0], machines[3]) for each in answers]  # fmt: skip
    return cases + [ablation.Case(f"{here.name}, 5 % right", here, MODEL, each)
                    for here in (machines[0], machines[2], machines[3]) for each in wrong]  # fmt: skip


def ablate(args: argparse.Namespace) -> None:
    changes = {name: change for name, change in ablation.CHANGES.items() if args.only in name}
    for row in ablation.table(ablation_cases(read(args.file), args.draft), changes):
        print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "report"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=256, help="longest answer")
    parser.add_argument("--classes", default=",".join(SOURCES))
    parser.add_argument("--prompts", type=int, default=8, choices=range(1, 9), help="of each class")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no answer after this time")
    parser.add_argument("--drafts", help="more drafts that judge the answers: names or files, separated by commas")
    parser.add_argument("--two-layers", action="store_true", help="also let a hopeless draft judge them")
    parser.add_argument("--draft", default=PUBLISHED, help="the draft to report")
    parser.add_argument("--ablate", action="store_true", help="report what each constant of the controller is worth")
    parser.add_argument("--only", default="", help="with --ablate: only changes whose name contains this")
    parser.add_argument("--json", type=Path, help="the figures of the report as JSON")
    args = parser.parse_args()
    (record if args.action == "record" else ablate if args.ablate else report)(args)


if __name__ == "__main__":
    main()
