"""Trees against chains: recorded acceptance by rank, replayed with the costs of several machines, and real answers.

    python benchmarks/trees.py record FILE.jsonl --answers ANSWERS.jsonl [--minutes 4]    # repeat it to continue
    python benchmarks/trees.py report FILE.jsonl
    python benchmarks/trees.py run RUN.jsonl [--minutes 9]; python benchmarks/trees.py show RUN.jsonl

`record` takes the answers of a recording by `replay.py`. At every token the draft's law is compared with the target's:
which sibling would be accepted. Siblings are the likeliest tokens at temperature 0, else drawn without replacement,
several times. The answers at temperature 1 are also judged at temperature 0.7.

`report` replays the answers. A step walks down the drafted tree as long as the next token of the answer is the child of
the recorded rank. Off the answer's path the draft's laws are not known; there a node has the confidences of its depth.
Lookups do not draft here.

`run` lets the default pair answer plainly, with chains and with trees, in turn; `show` prints its table.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bars_arms import RULE, SAMPLER, SOURCES, prepared, prompts_of, published_draft
from replay import as_answer, read, say
from rows import append, mend, rows_of
from tree_report import ARMS, N_RANKS, report, show

from specllama import Engine, Finished, PromptProgress, SamplingParams, StepEvent, TokenEvent, llama
from specllama.audit.models import Passing
from specllama.chat.conversation import Conversation, Message
from specllama.core.arrays import FloatArray
from specllama.core.distribution import Distribution
from specllama.core.sampling import RandomChooser, law
from specllama.core.types import Cancel, LanguageModel
from specllama.drafters import REGISTRY, TREE, DraftSettings
from specllama.drafters.controller import PROBE_TOKENS
from specllama.drafters.length import DraftLength
from specllama.pairs.setup import LEAVES, Listener, Setup, load_models
from specllama.tuning import traces
from specllama.tuning.first_use import FirstUse
from specllama.tuning.traces import TracedAnswer

N_DRAWS = 4  # of the siblings at every token, above temperature 0


def likeliest(row: FloatArray, p: Distribution) -> list[tuple[float, float]]:
    """(confidence, chance of acceptance given that those before are rejected) of the most likely tokens.  row: (V,)"""
    shares = np.exp(row.astype(np.float64) - row.max())
    shares /= shares.sum()
    found, mass, left = list[tuple[float, float]](), 1.0, 1.0
    for token in np.argsort(-shares, kind="stable")[:N_RANKS].tolist():
        share, chance = float(shares[token]), p.prob(token)
        found.append((share / mass, min(chance / left, 1.0) if left > 1e-9 else 0.0))
        mass, left = max(mass - share, 1e-12), left - chance
    return found


def drawn(q: Distribution, p: Distribution, choose: RandomChooser) -> list[tuple[float, float]]:
    """The same for tokens drawn without replacement."""
    found = list[tuple[float, float]]()
    for _ in range(min(N_RANKS, len(q.support()))):
        token = choose.pick(q)
        found.append((q.peak(), min(1.0, p.prob(token) / q.prob(token))))
        p, q = p.residual(q), q.without(token)
    return found


def rounded(ranks: Sequence[tuple[float, float]]) -> list[list[float]]:
    return [[round(each, 4) for each in pair] for pair in ranks]


def tempered(p: Distribution, temperature: float) -> Distribution:
    """The law at another temperature, of a law at temperature 1: filters come before the temperature."""
    ids, probs = p.items()
    powers = probs ** (1.0 / temperature)
    return Distribution.on(ids, powers / powers.sum())


def judged(rows: Sequence[FloatArray], said: TracedAnswer) -> dict[str, list[Any]]:
    """At every token, "top": the likeliest siblings; "draws": several draws of siblings, none at temperature 0."""
    choose, history = RandomChooser(0), [*said.prompt, *said.tokens]
    top, draws = list[Any](), list[Any]()
    for i, row in enumerate(rows[: len(said.tokens)]):
        top.append(rounded(likeliest(row, said.laws[i])))
        if not said.params.greedy:
            q = law(row, history[: len(said.prompt) + i], said.params)
            draws.append([rounded(drawn(q, said.laws[i], choose)) for _ in range(N_DRAWS)])
    return {"top": top, "draws": draws}


def record(args: argparse.Namespace) -> None:
    until = time.monotonic() + 60 * args.minutes
    llama.set_log(None)
    setup = published_draft()
    assert setup.draft is not None
    mend(args.file)
    known = {(row["judged"]["prompt"], row["judged"]["temperature"]) for row in rows_of(args.file)}
    with llama.load(
        args.draft or setup.draft.path, replace(setup.draft_options(4096), max_block=PROBE_TOKENS)
    ) as draft:
        for row in read(args.answers).answers.values():
            said = as_answer(row, draft.vocab_size)
            kinds = [said]
            if row["temperature"] == 1.0:
                laws = tuple(tempered(p, 0.7) for p in said.laws)
                kinds.append(replace(said, laws=laws, params=replace(said.params, temperature=0.7)))
            kinds = [each for each in kinds if (row["prompt"], each.params.temperature) not in known]
            if not kinds or not said.tokens:
                continue
            if time.monotonic() > until:
                say("time ran out: the same command continues")
                return
            rows = traces.rows(draft, said.prompt, said.tokens, draft.vocab_size)
            for each in kinds:
                append(args.file, "judged", {"group": row["group"], "prompt": row["prompt"],
                                             "temperature": each.params.temperature, **judged(rows, each)})  # fmt: skip
            say(f"{row['prompt']} at {row['temperature']:g}")


def policies(setup: Setup, arm: str, *, greedy: bool) -> tuple[str, DraftSettings]:
    """(strategy, settings) of an arm; auto decides, except for a tree of fixed size."""
    if arm == "tree of 16":
        return TREE, DraftSettings(length=DraftLength(16))
    strategy = "none" if arm == "plain" else arm
    return strategy, DraftSettings(length=setup.length, policy=setup.policy(greedy=greedy, strategy=strategy))


class Counted(Passing):
    """A model that adds up what its passes cost by a profile, in T(1); what it reads before the first token is free."""

    def __init__(self, model: LanguageModel, cost: Callable[[int], float]) -> None:
        super().__init__(model)
        self.spent, self._cost, self._unread = 0.0, cost, 0

    @property
    def busy_s(self) -> float:
        return float(getattr(self.model, "busy_s"))  # noqa: B009  # only loaded models have it

    def feed(self, tokens: Sequence[int]) -> None:
        super().feed(tokens)
        self._unread += len(tokens)

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._unread = self._unread if length else 0

    def _pay(self, n_rows: int) -> None:
        self.spent += self._cost(n_rows + self._unread)
        self._unread = 0

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        self._pay(len(tokens))
        return super().eval(tokens, parents)

    def grow(self, tokens: Sequence[int], parents: Sequence[int]) -> FloatArray:
        self._pay(len(tokens))
        return super().grow(tokens, parents)

    def keep(self, length: int, path: Sequence[int]) -> None:
        super().keep(length, path)
        self._unread += sum(node != i for i, node in enumerate(path))  # computed again with the next pass


def answered(
    setup: Setup, target: Counted, draft: Counted, arm: str, prompt: Sequence[int], params: SamplingParams, n: int
) -> dict[str, Any]:
    """One answer of `n` tokens without an end; the draft reads the prompt anew."""
    draft.truncate(0)
    params = replace(params, logit_bias=dict.fromkeys(target.end_tokens, -math.inf))
    strategy, settings = policies(setup, arm, greedy=params.greedy)
    settings = replace(settings, vocab_size=target.vocab_size, n_leaves=target.caps.max_leaves)
    engine = Engine(target, REGISTRY[strategy].make(draft, settings), rule=RULE)
    events = engine.generate(prompt, params, RandomChooser(1), max_tokens=n)
    steps, tokens = list[StepEvent](), list[int]()
    for event in events:
        if isinstance(event, PromptProgress):
            target.spent, draft.spent = 0.0, 0.0  # the prompt is read in every arm
        elif isinstance(event, TokenEvent):
            tokens.append(event.token)
        elif isinstance(event, StepEvent):
            steps.append(event)
        elif isinstance(event, Finished):
            last = event
    return {
        "n_tokens": last.stats.n_emitted - last.stats.n_first,
        "decode_s": last.stats.decode_s,
        "cost": target.spent + draft.spent,
        "n_steps": len(steps),
        "n_nodes": sum(len(step.drafted) for step in steps),
        "n_branched": sum(step.parents is not None for step in steps),
        "step_s": sum(step.step_s for step in steps[1:]),
        "loop_s": sum(step.loop_s for step in steps[1:]),
        "tokens": tokens,
    }


def run(args: argparse.Namespace) -> None:
    """Real answers of the default pair, arm by arm; the order of the arms turns."""
    until = time.monotonic() + 60 * args.minutes
    llama.set_log(None)
    setup = prepared()
    setup = replace(setup, target_options=replace(setup.target_options, max_leaves=LEAVES))
    mend(args.file)
    known = {(row["run"]["prompt"], row["run"]["temperature"], row["run"]["round"], row["run"]["arm"])
             for row in rows_of(args.file)}  # fmt: skip
    with load_models(setup, Listener(), Cancel()) as models:
        setup = FirstUse(setup, models).finish()
        assert models.draft is not None, "the default pair has a draft"
        assert setup.profile is not None, "FirstUse has measured one"
        target = Counted(models.target, setup.profile.costs.verify_cost)
        draft = Counted(models.draft, setup.profile.costs.draft_cost)
        talk = Conversation(models.target.vocab, setup.target.template)
        plan = [(round_, i, group, temperature) for round_ in range(args.rounds) for i in range(args.prompts)
                for group in SOURCES for temperature in (0.0, 1.0)]  # fmt: skip
        for turn, (round_, i, group, temperature) in enumerate(plan):
            prompt = prompts_of(group)[i]
            tokens = talk.tokens([Message("user", prompt.turns[0])])
            for k in range(len(ARMS)):
                arm = ARMS[(turn + k) % len(ARMS)]
                if (prompt.id, temperature, round_, arm) in known:
                    continue
                if time.monotonic() > until:
                    say("time ran out: the same command continues")
                    return
                found = answered(
                    setup, target, draft, arm, tokens, replace(SAMPLER, temperature=temperature), args.tokens
                )
                append(args.file, "run", {"group": group, "prompt": prompt.id, "temperature": temperature,
                                          "round": round_, "arm": arm, **found})  # fmt: skip
                say(f"{prompt.id} at {temperature:g}, {arm}: {found['n_tokens'] / found['decode_s']:.1f} t/s")


ACTIONS = {"record": record, "report": report, "run": run, "show": show}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer of `run`")
    parser.add_argument("--prompts", type=int, default=2, choices=range(1, 9), help="of each class, in `run`")
    parser.add_argument("--rounds", type=int, default=1, help="of `run`")
    parser.add_argument("--answers", type=Path, help="recorded by replay.py")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no answer after this time")
    parser.add_argument("--draft", type=Path, help="another draft than the pair's")
    parser.add_argument("--siblings", choices=("draws", "top"), default="draws", help="above temperature 0")
    parser.add_argument("--only", default="", help="report each class on the machines whose name contains this")
    args = parser.parse_args()
    ACTIONS[args.action](args)


if __name__ == "__main__":
    main()
