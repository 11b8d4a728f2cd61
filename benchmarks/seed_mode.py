"""How often a drafted token is accepted with p/q, with the noise of `--seed-mode same`, and by equal draws.

    python benchmarks/seed_mode.py [--prompts 2] [--predict 48]

The chance of each at every token of sampled answers of the default pair, from the laws p and q of the token:
sum of min(p, q), sum of 1 / sum_j max(p_j/p_i, q_j/q_i), sum of p*q, and p of the draft's likeliest token.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent))

from loop import opened

from specllama import Distribution, SamplingParams
from specllama.chat.conversation import Conversation, Message
from specllama.core.noise import same_draw
from specllama.core.sampling import law
from specllama.prompts.load import built_in
from specllama.tuning.traces import answer, rows

RULES = ("p/q", "seed-mode same", "equal draws", "greedy draft")


def chances(p: Distribution, q: Distribution) -> tuple[float, ...]:
    """The chance of acceptance under each of RULES."""
    ids, probs = q.items()
    equal = math.fsum(prob * p.prob(token) for token, prob in zip(ids.tolist(), probs.tolist(), strict=True))
    return p.overlap(q), same_draw(p, q), equal, p.prob(int(ids[probs.argmax()]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2, help="of each class")
    parser.add_argument("--predict", type=int, default=48)
    args = parser.parse_args()
    classes: dict[str, list[str]] = {}
    for prompt in built_in():
        classes.setdefault(prompt.category, []).append(prompt.turns[0])
    texts = [text for each in classes.values() for text in each[: args.prompts]]
    with opened(2) as models:
        target, draft = models.target, models.draft
        n_vocab = min(target.vocab_size, draft.vocab_size)
        print(f"| temperature | tokens | {' | '.join(RULES)} |\n|{'---|' * (2 + len(RULES))}")
        for temperature in (0.7, 1.0):
            params, found = SamplingParams(temperature=temperature), list[tuple[float, ...]]()
            for text in texts:
                prompt = Conversation(target.vocab, target.chat_template).tokens([Message("user", text)])
                said = answer(target, "", prompt, n_tokens=args.predict, params=params)
                history = [*said.prompt, *said.tokens]
                read = rows(draft, said.prompt, said.tokens[: len(said.laws) - 1], n_vocab)
                for i, row in enumerate(read):
                    q = law(row, history[: len(said.prompt) + i], params)
                    found.append(chances(said.laws[i], q))
            means = " | ".join(f"{fmean(column):.3f}" for column in zip(*found, strict=True))
            print(f"| {temperature} | {len(found)} | {means} |", flush=True)


if __name__ == "__main__":
    main()
