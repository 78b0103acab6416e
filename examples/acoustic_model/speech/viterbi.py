"""Viterbi decoder of the best word sequence, over a loop of all pronunciations; vectorised over utterances.

Every pronunciation is a chain of states, silence is a chain of one state. In each frame the path stays in its
state or moves to the next one of the chain; both have the same cost, which is therefore omitted. From the
last state of a chain the path may enter any chain; entering a word costs the word penalty, entering silence
costs nothing.

Instead of a back-pointer per state and frame, every state stores the frame in which its chain was entered.
The best chain that ends in each frame, with its first frame, is enough to trace the words back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SILENCE_WORD = ""
_NEVER = np.float32(-1e30)


@dataclass(frozen=True)
class Graph:
    """The loop of words, laid out as one row of S graph states.

    Attributes:
        states: acoustic state (column of the scores) of each graph state, shape (S,).
        first, last: positions of the first and last state of each of C chains in the row, shape (C,).
        words: word of each chain; "" is silence.
    """

    states: np.ndarray
    first: np.ndarray
    last: np.ndarray
    words: tuple[str, ...]


def word_loop(chains: dict[str, list[list[int]]], silence: int = 0) -> Graph:
    """Return the graph of a lexicon.

    Args:
        chains: acoustic states of each pronunciation of each word.
        silence: the acoustic state of silence.
    """
    rows = [(SILENCE_WORD, [silence])]
    rows += [(word, chain) for word in sorted(chains) for chain in chains[word]]
    last = np.cumsum([len(chain) for _, chain in rows]) - 1
    first = np.concatenate(([0], last[:-1] + 1))
    states = np.concatenate([chain for _, chain in rows])
    return Graph(states, first, last, tuple(word for word, _ in rows))


def decode(
    graph: Graph, scores: np.ndarray, lengths: np.ndarray, penalty: float
) -> list[tuple[str, ...]]:
    """Return the best word sequence of each utterance.

    Args:
        graph: from `word_loop`.
        scores: log-likelihood of each acoustic state, float32, shape (batch, time, states).
        lengths: frames of each utterance, shape (batch,).
        penalty: subtracted whenever a word is entered.

    Returns:
        The words of each utterance, silences left out.
    """
    cost = np.array([penalty if word else 0.0 for word in graph.words], np.float32)
    chains, starts = _forward(graph, scores, cost)
    return [_trace(graph, chains[:, b], starts[:, b], n) for b, n in enumerate(lengths)]


def _forward(graph: Graph, scores: np.ndarray, cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the best chain that ends in each frame, and its first frame, both of shape (time, batch)."""
    batch, time, _ = scores.shape
    size = len(graph.states)
    value = np.full((batch, size), _NEVER, np.float32)
    entered = np.zeros((batch, size), np.int32)
    ended = np.zeros(batch, np.float32)  # score of the best path whose last chain has ended
    chains, starts = np.empty((time, batch), np.int32), np.empty((time, batch), np.int32)
    rows = np.arange(batch)
    from_left, entered_left = np.empty_like(value), np.empty_like(entered)
    for t in range(time):
        from_left[:, 1:], entered_left[:, 1:] = value[:, :-1], entered[:, :-1]
        from_left[:, graph.first] = ended[:, None] - cost
        entered_left[:, graph.first] = t
        entered = np.where(from_left > value, entered_left, entered)
        value = np.maximum(from_left, value) + scores[:, t, graph.states]
        best = value[:, graph.last].argmax(1)
        at = graph.last[best]
        ended = value[rows, at]
        chains[t], starts[t] = best, entered[rows, at]
    return chains, starts


def _trace(graph: Graph, chains: np.ndarray, starts: np.ndarray, frames: int) -> tuple[str, ...]:
    found, t = [], int(frames) - 1
    while t >= 0:
        found.append(graph.words[chains[t]])
        t = int(starts[t]) - 1
    return tuple(word for word in reversed(found) if word)
