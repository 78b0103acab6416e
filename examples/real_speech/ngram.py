"""A model of letter sequences: interpolated n-grams of the training texts, and their automaton.

Source: Witten, Bell, The zero-frequency problem, IEEE Transactions on Information Theory 1991.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from examples.acoustic_model.speech.problem import require

BEGIN, END = "<", ">"  # around each text; no letters of any text


class LetterModel:
    """p(c | h) = (count(h c) + kinds(h) p(c | h')) / (count(h) + kinds(h)); h' is h without its first letter.

    kinds(h) is the number of different letters that follow h. Below n-grams of one letter all letters are
    equally likely.

    Args:
        texts: texts to learn from.
        letters: all letters.
        order: length of the longest n-gram.
    """

    def __init__(self, texts: Iterable[str], letters: str, order: int) -> None:
        self.order, self.symbols = order, [*letters, END]
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        for text in texts:
            whole = BEGIN + text + END
            for end in range(1, len(whole)):
                for start in range(max(0, end - order + 1), end + 1):
                    self.counts[whole[start:end]][whole[end]] += 1

    def probability(self, symbol: str, history: str) -> float:
        """Return p(symbol | history), of which the last order - 1 letters count."""
        history = history[-(self.order - 1) :] if self.order > 1 else ""
        shorter = self.probability(symbol, history[1:]) if history else 1 / len(self.symbols)
        counts = self.counts.get(history)
        if not counts:
            return shorter
        return (counts[symbol] + len(counts) * shorter) / (counts.total() + len(counts))

    def automaton(self, weight: float, bonus: float) -> Any:
        """Return the model as an acceptor of letter numbers (from 1), with costs in nats.

        A letter that was not seen after a history costs what leaving the history costs, and its cost after
        the shorter one.

        Args:
            weight: factor of all costs.
            bonus: what each letter gains, in nats.
        """
        kaldifst = require("kaldifst", "kaldifst")
        fst, codes = kaldifst.StdVectorFst(), {c: i + 1 for i, c in enumerate(self.symbols)}
        states = {history: fst.add_state() for history in sorted(self.counts)}
        fst.start = states[BEGIN] if self.order > 1 else states[""]
        for history, state in states.items():
            seen = self.symbols if history == "" else sorted(self.counts[history])
            for symbol in seen:
                cost = -weight * math.log(self.probability(symbol, history))
                if symbol == END:
                    fst.set_final(state, cost)
                    continue
                after = states[self._known(history + symbol)]
                fst.add_arc(
                    state, _arc(kaldifst, codes[symbol], codes[symbol], cost - bonus, after)
                )
            if history:
                counts = self.counts[history]
                left = len(counts) / (counts.total() + len(counts))
                cost = -weight * math.log(left)
                fst.add_arc(state, _arc(kaldifst, 0, 0, cost, states[self._known(history[1:])]))
        return fst

    def _known(self, history: str) -> str:
        """Return the longest end of a history that letters follow in the training texts."""
        history = history[-(self.order - 1) :] if self.order > 1 else ""
        while history not in self.counts:
            history = history[1:]
        return history


def topology(letters: int) -> Any:
    """Return the transducer from outputs of CTC to letters: column c of the scores is label c + 1.

    State 0: after a blank; state s: after letter s, whose repetition writes nothing.
    """
    kaldifst = require("kaldifst", "kaldifst")
    fst = kaldifst.StdVectorFst()
    for _ in range(letters + 1):
        fst.set_final(fst.add_state(), 0.0)
    fst.start = 0
    for state in range(letters + 1):
        fst.add_arc(state, _arc(kaldifst, 1, 0, 0.0, 0))
        for letter in range(1, letters + 1):
            written = 0 if letter == state else letter
            fst.add_arc(state, _arc(kaldifst, letter + 1, written, 0.0, letter))
    return fst


def graph(model: LetterModel, weight: float, bonus: float) -> Any:
    """Return the decoding graph: outputs of CTC to letters, with the costs of the letter model."""
    kaldifst = require("kaldifst", "kaldifst")
    outputs = topology(len(model.symbols) - 1)
    kaldifst.arcsort(outputs, sort_type="olabel")
    return kaldifst.compose(outputs, model.automaton(weight, bonus))


def _arc(kaldifst: Any, read: int, written: int, cost: float, to: int) -> Any:
    return kaldifst.StdArc(ilabel=read, olabel=written, weight=cost, nextstate=to)
