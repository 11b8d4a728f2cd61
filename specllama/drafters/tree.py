"""Drafts a tree: level by level from a smaller model, beside looked-up continuations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specllama.core.arrays import FloatArray
from specllama.core.constraint import AllowedAfter
from specllama.core.distribution import Distribution
from specllama.core.sampling import SamplingParams, peak_share
from specllama.core.types import Chooser, Decision, Draft, LanguageModel, Observation
from specllama.drafters.lookup import LookupDrafter
from specllama.drafters.model import PREFILL_AT_ONCE, ModelReader
from specllama.drafters.shape import FixedShape, Situation, TreePolicy

CHAINS_ONLY = "the {} evaluates no trees of drafted tokens: the drafts are chains"


@dataclass(slots=True)
class _Tree:
    """The nodes in the order in which they joined the tree; -1 is the pending token."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    laws: list[Distribution | None] = field(default_factory=list)  # of the draw; None = chosen without chance
    children: list[list[int]] = field(default_factory=lambda: [[]])  # [node + 1]

    def add(self, token: int, parent: int, law: Distribution | None) -> None:
        self.children[parent + 1].append(len(self.tokens))
        self.tokens.append(token)
        self.parents.append(parent)
        self.laws.append(law)
        self.children.append([])

    def path(self, node: int) -> list[int]:
        """Tokens from the root to `node`."""
        path: list[int] = []
        while node >= 0:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    def draft(self) -> Draft:
        """Depth first, so that the first child of a node follows it: its path keeps the KV as a chain does."""
        order, waiting = list[int](), [-1]
        while waiting:
            node = waiting.pop()
            order.append(node)
            waiting += reversed(self.children[node + 1])
        at = {node: i - 1 for i, node in enumerate(order)}
        nodes = order[1:]
        points = [law or Distribution.point(token) for law, token in zip(self.laws, self.tokens, strict=True)]
        return Draft(
            tuple(self.tokens[node] for node in nodes),
            tuple(points[node] for node in nodes) if any(self.laws) else None,
            tuple(at[self.parents[node]] for node in nodes),
        )


@dataclass(frozen=True, slots=True)
class _Drawing:
    """How the children of all nodes of a step are drawn."""

    params: SamplingParams  # of the law that they are drawn from, or whose likeliest tokens they are
    greedy: bool
    n_most: int  # nodes of the tree
    window: Sequence[int]  # what penalties see of the text
    n_text: int  # tokens of the text
    choose: Chooser


def _likeliest(law: Distribution) -> int:
    """Its token of the largest mass, the lowest id of equals."""
    ids, probs = law.items()
    return int(ids[probs.argmax()])


class TreeDrafter(ModelReader):
    """Drafts from the model's law q, and from what followed the same words earlier.

    The children of a node are drawn from q without replacement. A greedy draft takes the likeliest tokens, without
    chance. Looked-up tokens are also chosen without chance, and come first among the root's children. The model reads a
    node only to draw its children, a level in one pass. It reads no looked-up tokens.
    """

    name = "tree"

    def __init__(
        self,
        model: LanguageModel,
        policy: TreePolicy,
        *,
        lookup: LookupDrafter | None = None,
        n_leaves: int = 1,
        temperature: float | None = None,
        vocab_size: int | None = None,
        n_at_once: int = PREFILL_AT_ONCE,
    ) -> None:
        """`n_leaves`: the most that the target evaluates; 1 = chains. The other arguments are those of `ModelReader`.

        The policy decides for `lookup`, whose own is not used.
        """
        super().__init__(model, temperature=temperature, vocab_size=vocab_size, n_at_once=n_at_once)
        self.policy = policy
        self.lookup = lookup
        self.n_leaves = min(n_leaves, model.caps.max_leaves if model.caps.tree else 1)
        self._asks_confidence = not isinstance(policy, FixedShape)
        self._why_chains = ""
        if self.n_leaves == 1:
            self._why_chains = CHAINS_ONLY.format("target" if n_leaves == 1 else "draft")
        self._at: dict[int, int] = {}  # of the nodes that the model read: their numbers for `Growing.grow`
        self._n_grown = 0  # nodes that it read by `grow`

    def begin(self, tokens: Sequence[int], features: FloatArray | None = None) -> None:
        super().begin(tokens)
        if self.lookup is not None:
            self.lookup.begin(tokens)

    def constrain(self, allowed: AllowedAfter) -> None:
        super().constrain(allowed)
        if self.lookup is not None:
            self.lookup.constrain(allowed)

    def propose(self, tokens: Sequence[int], limit: int, params: SamplingParams, choose: Chooser) -> Draft:
        """At most `limit` nodes, depth first, with the law of each draw (None = all chosen without chance)."""
        self._start_step(choose)
        if self._why_chains:
            self._say(self._why_chains)
            self._why_chains = ""  # once, not in every answer
        guesses = [] if self.lookup is None else list(self.lookup.offer(tokens, limit, self.n_leaves))
        offer, depth = [(guess.confidence, guess.parent) for guess in guesses], len(tokens)
        plan = self._planned(
            lambda lag: self.policy.plan_tree(Situation(limit, self.n_leaves, offer, lag, depth)),
            self.policy.learn,
            tokens,
            self._lag(tokens),
            params,
        )
        tree = _Tree()
        for guess in guesses[: plan.n_given]:
            tree.add(guess.token, guess.parent, None)
        if plan.n_drawn > 0:
            self._grow(tree, tokens, plan.n_given + plan.n_drawn, self._own(params), choose)
        return replace(tree.draft(), n_given=min(plan.n_given, len(guesses))) if tree.tokens else Draft()

    def _grow(self, tree: _Tree, tokens: Sequence[int], n_most: int, params: SamplingParams, choose: Chooser) -> None:
        """Draw nodes until there are `n_most`. params: the draft's own."""
        unread = tokens[self.model.length :]
        room = self._room_after(unread)  # a node takes a cell when it is read
        self._kv.feed(unread[:-1])
        greedy, window = params.greedy, params.window(tokens)
        if greedy:
            params = replace(params, temperature=1.0, top_k=n_most, top_p=1.0, min_p=0.0)
        how = _Drawing(params, greedy, n_most, window, len(tokens), choose)
        self._at, self._n_grown = {}, 0
        level: Sequence[int] = (-1,)
        while level and len(tree.tokens) < n_most:
            level = self.policy.expand(level)
            if self._at:
                level = level[:room]
                room -= len(level)
            n_before, n_rows = len(tree.tokens), self.model.caps.max_block
            for i in range(0, len(level), n_rows):
                nodes = level[i : i + n_rows]
                for node, row in zip(nodes, self._read(tree, nodes, tokens[-1]), strict=True):
                    self._draw_children(tree, node, row, how)
            drawn = range(n_before, len(tree.tokens))
            level = [node for node in drawn if tree.tokens[node] not in self.model.end_tokens]

    def _read(self, tree: _Tree, nodes: Sequence[int], pending: int) -> FloatArray:
        """Logits after each of `nodes`, over the ids in both vocabularies. Their parents were read.  (len(nodes), n)"""
        tokens = [pending if node < 0 else tree.tokens[node] for node in nodes]
        if len(nodes) == 1 and not self._n_grown:  # so far a chain, which needs no tree in the KV
            self._at = {nodes[0]: -1}
            return self._eval(tokens)
        rows = self._kv.grow(tokens, [self._at[tree.parents[node]] for node in nodes], self._narrow)
        for node in nodes:
            self._at[node] = self._n_grown
            self._n_grown += 1
        return self._in_both(rows)

    def _draw_children(self, tree: _Tree, parent: int, row: FloatArray, how: _Drawing) -> None:
        """Draw children of `parent` until the policy, the law or the number of nodes ends it.  row: (n,)"""
        path = tree.path(parent)
        row, ids = self._cells(row, path)
        q = self._law(row, [*how.window, *path], how.params, ids)
        if q is None:
            return
        siblings = [tree.tokens[child] for child in tree.children[parent + 1]]
        left, n_out = q, 0
        # How much of the whole law at temperature 1 is in q, which holds only the likeliest tokens.
        share = peak_share(row) / q.peak() if how.greedy and self._asks_confidence else 1.0
        while len(tree.tokens) < how.n_most:
            for token in siblings[n_out:]:
                rest = left.without(token)
                if rest is left:
                    return  # no other token has mass
                left = rest
            n_out = len(siblings)
            confidence = left.peak()
            if share < 1.0:
                out = sum(map(q.prob, siblings))
                confidence *= share * (1.0 - out) / (1.0 - share * out)
            go_on = self.policy.go_on_tree(parent, confidence)
            self._decisions.append(Decision(len(path), confidence, go_on))
            one = Distribution.point(_likeliest(left)) if how.greedy else self._drawn_from(left, how.n_text + len(path))
            if not go_on:
                if not siblings:
                    self._undrawn[tuple(path)] = (confidence, one)
                return
            token = how.choose.pick(one)
            tree.add(token, parent, None if how.greedy or self._settled else q)
            siblings.append(token)

    def observe(self, seen: Observation) -> None:
        self.policy.observe(seen)
        self._follow(seen, self.policy.learn)
