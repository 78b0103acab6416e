"""Measures cost and benefit of averaging on two hosts with a link of limited rate."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.acoustic_model.speech.keeper import Job
from examples.acoustic_model.speech.problem import Problem

from . import jobs
from .hosts import Hosts

# There are two kinds of computation. "cpu": gradients on the CPU, with one core per host, which the trainer
# shares with the engine and the kernel's TCP. "accelerator": a small batch, and a sleep in place of an
# accelerator, proportional to the model's size (0.25 s for the largest), during which the core is free. With
# such a model an accelerator's step is rarely shorter; a longer step would hide more communication.
# A block is as long as a dozen steps of its model; with averaging on, at least as long as two exchanges, but
# at most longest_on_s. The learning rate is the best of 0.02, 0.05 and 0.1 for one learner with the smallest
# model, batch 8 and seed 7. All of these settings were chosen before any measurement.
SETTINGS: dict[str, Any] = {
    "inputs": 16,
    "classes": 10,
    "hidden_layers": 3,
    "batch": {"cpu": 32, "accelerator": 8},
    "wait_s": 0.25,  # seconds that each step of the largest model sleeps
    "rate": 0.02,
    "momentum": 0.9,
    "seed": 0,
    "longest_on_s": 20.0,
}
MODELS = {"1 M": 1e6, "10 M": 10e6, "43.15 M": 43.15e6}
BLOCK_S = {"1 M": 1.5, "10 M": 2.5, "43.15 M": 5.0}
LINKS = {"10 Gb/s": 10e9, "1 Gb/s": 1e9, "100 Mb/s": 100e6}
REPETITIONS = 2
KINDS = ("cpu", "accelerator")
GOSSIP, SYNCHRONOUS, HALVED = "random_pairs", "synchronous", "random_pairs, bfloat16"
ALONE = "averaging off"
SCHEMES = {
    GOSSIP: {"averaging": "random_pairs"},
    SYNCHRONOUS: {"averaging": "synchronous"},
    HALVED: {"averaging": "random_pairs", "wire_dtype": "bfloat16"},
    ALONE: {},
}
HALVED_ON = (("1 Gb/s", "43.15 M"),)
CURVE = ("1 Gb/s", "43.15 M", "accelerator", 45.0)  # link, model, computation, seconds
GOAL_CELL = ("1 Gb/s", "43.15 M")
GOAL_KEPT, GOAL_FASTER = 0.95, 3.0

Cell = tuple[str, str, str]  # link, model, scheme


def hidden(parameters: float, inputs: int, classes: int) -> int:
    """Return the width of each of three hidden layers, for a model of about `parameters` parameters.

    It is the larger root h of 2 h^2 + (inputs + classes + 3) h + classes = parameters.
    """
    b = inputs + classes + 3
    return round((-b + math.sqrt(b * b + 8 * (parameters - classes))) / 4)


def sizes(model: str) -> list[int]:
    """Return the layer sizes of a model in MODELS, from inputs to classes."""
    inputs, classes = SETTINGS["inputs"], SETTINGS["classes"]
    units = hidden(MODELS[model], inputs, classes)
    return [inputs, *[units] * SETTINGS["hidden_layers"], classes]


def count(layers: Sequence[int]) -> int:
    """Return the number of parameters of an MLP with these layer sizes."""
    return sum((a + 1) * b for a, b in itertools.pairwise(layers))


def wire_s(link: str, model: str) -> float:
    """Return the seconds to send a model's float32 parameters over a link, in one direction."""
    return 8 * 4 * MODELS[model] / LINKS[link]


def computation(kind: str, model: str) -> tuple[int, float]:
    """Return the batch, and the seconds of sleep per step, of a kind of computation with a model."""
    share = MODELS[model] / max(MODELS.values())
    return SETTINGS["batch"][kind], SETTINGS["wait_s"] * share if kind == "accelerator" else 0.0


def cells(links: Iterable[str], models: Iterable[str]) -> list[Cell]:
    """Return all combinations of link, model and scheme whose speed is measured."""
    found = []
    for link in links:
        for model in models:
            schemes = [GOSSIP, SYNCHRONOUS, *[HALVED] * ((link, model) in HALVED_ON)]
            found += [(link, model, scheme) for scheme in schemes]
    return found


def options(cell: Cell, repetitions: int) -> dict[str, Any]:
    """Return the options of far_learner.py for measuring the speed of a cell."""
    link, model, scheme = cell
    on_s = min(max(BLOCK_S[model], 2 * wire_s(link, model)), SETTINGS["longest_on_s"])
    pairs = [computation(kind, model) for kind in KINDS]
    return {
        **_common(model, scheme),
        "computations": [f"{batch}:{wait:.4g}" for batch, wait in pairs],
        "block_s": BLOCK_S[model],
        "on_s": on_s,
        "repetitions": repetitions,
    }


def curve_options(link: str, model: str, kind: str, seconds: float, scheme: str) -> dict[str, Any]:
    """Return the options of far_learner.py for recording a loss curve."""
    batch, wait = computation(kind, model)
    return {
        **_common(model, scheme),
        "computations": [f"{batch}:{wait:.4g}"],
        "block_s": 0,
        "on_s": 0,
        "repetitions": 0,
        "curve_s": seconds,
    }


def _common(model: str, scheme: str) -> dict[str, Any]:
    chosen = {name: SETTINGS[name] for name in ("rate", "momentum", "seed")}
    return {**SCHEMES[scheme], **chosen, "sizes": sizes(model)}


def job(hosts: Hosts, name: str, link: str, told: dict[str, Any]) -> Job:
    """Return a job that runs far_learner.py on two hosts, with the options `told`."""

    def act(folder: Path) -> dict[str, Any]:
        hosts.shape(LINKS[link])
        command = jobs.learner("far_learner", told, folder / "told.json")
        hosts.run(command, deadline(link, told), folder / "log.txt")
        return jobs.told(folder / "told.json")

    return Job(name, {**told, "link": LINKS[link]}, act)


def deadline(link: str, told: Mapping[str, Any]) -> float:
    """Return a deadline in seconds, several times what the run should take."""
    model_s = 8 * 4 * count(told["sizes"]) / LINKS[link]
    blocks = 2 * told["repetitions"] * (told["block_s"] + told["on_s"] + 8 * model_s)
    return 120 + 3 * (blocks + told.get("curve_s", 0.0)) + 40 * model_s


# ---- results ------------------------------------------------------------------------------------


def results(found: Mapping[Cell, dict[str, Any]]) -> dict[str, Any]:
    """Return speeds, ratios, bytes and times per step, by link, model, computation and scheme."""
    result: dict[str, Any] = {}
    for (link, model, scheme), told in found.items():
        for kind, rows in zip(KINDS, told["rows"].values(), strict=True):
            place = result.setdefault(link, {}).setdefault(model, {}).setdefault(kind, {})
            place[scheme] = one(rows)
    for _, _, kinds in walk(result):
        for schemes in kinds.values():
            _compare(schemes)
    return result


def walk(result: Mapping[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (link, model, results by kind of computation) of every link and model."""
    return [(link, model, kinds) for link, row in result.items() for model, kinds in row.items()]


def one(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the blocks of a run; ratios are between a block with averaging on and off."""
    kept = [rate(row["on"]) / rate(row["off"]) for row in rows]
    return {
        "off_steps_per_s": statistics.median(rate(row["off"]) for row in rows),
        "steps_per_s": statistics.median(rate(row["on"]) for row in rows),
        "kept": statistics.median(kept),
        "kept_min": min(kept),
        "kept_max": max(kept),
        **{f"{name}_per_step": _per_step(rows, "on", name) for name in COUNTED},
        **{f"off_{name}_per_step": _per_step(rows, "off", name) for name in COUNTED},
        "consensus_distance": _last_distance(rows),
    }


COUNTED = (
    *("exchanges", "bytes_sent", "wire_bytes", "engine_cpu_s", "cpu_s"),
    *("gradient_s", "step_s", "optimizer_s", "collect_s", "offer_s"),
)


def rate(block: list[dict[str, Any]]) -> float:
    """Return the mean over learners of their steps per second in a block."""
    return statistics.mean(learner["steps"] / learner["seconds"] for learner in block)


def _per_step(rows: list[dict[str, Any]], which: str, name: str) -> float:
    """Return a count per step of a learner, the median over blocks."""
    blocks = [row[which] for row in rows]
    return statistics.median(
        sum(told[name] for told in block) / sum(told["steps"] for told in block) for block in blocks
    )


def _last_distance(rows: list[dict[str, Any]]) -> float | None:
    told = [learner.get("consensus_distance") for learner in rows[-1]["on"]]
    known = [distance for distance in told if distance is not None and math.isfinite(distance)]
    return max(known) if known else None


def _compare(schemes: dict[str, Any]) -> None:
    """Add the speed relative to SSGD, as a ratio of shares kept of the speed with averaging off."""
    if SYNCHRONOUS not in schemes:
        return
    for scheme, found in schemes.items():
        if scheme != SYNCHRONOUS:
            found["times_synchronous"] = found["kept"] / schemes[SYNCHRONOUS]["kept"]


def goal(result: Mapping[str, Any]) -> list[str]:
    """Return a line for each kind of computation: the goals for GOAL_CELL, and whether they are met."""
    link, model = GOAL_CELL
    lines = []
    for kind, schemes in result.get(link, {}).get(model, {}).items():
        if GOSSIP not in schemes or SYNCHRONOUS not in schemes:
            continue
        kept, times = (schemes[GOSSIP][name] for name in ("kept", "times_synchronous"))
        lines.append(
            f"Goal at {link} with {model}, {kind}: at least {GOAL_KEPT:.0%} of averaging off: "
            f"{kept:.1%}, {_verdict(kept >= GOAL_KEPT)}; at least {GOAL_FASTER:g} times SSGD: "
            f"{times:.2f}, {_verdict(times >= GOAL_FASTER)}."
        )
    return lines


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


# ---- tables -------------------------------------------------------------------------------------

HEADS = (
    *("link", "model", "computation", "scheme", "off, steps/s", "on, steps/s", "kept"),
    *("times SSGD", "exchanges per step", "MB/step sent", "MB/step on the wire"),
)


def table(result: Mapping[str, Any]) -> str:
    """Return a Markdown table with one row per link, model, computation and scheme."""
    rows = [_row(*HEADS), _row(*["---"] * len(HEADS))]
    for link, model, kinds in walk(result):
        for kind, schemes in kinds.items():
            rows += [_row(link, model, kind, *_cells(s, found)) for s, found in schemes.items()]
    return "\n".join(rows)


def _cells(scheme: str, found: Mapping[str, Any]) -> list[str]:
    gossip = scheme != SYNCHRONOUS
    return [
        scheme,
        f"{found['off_steps_per_s']:.3g}",
        f"{found['steps_per_s']:.3g}",
        f"{found['kept']:.1%} ({found['kept_min']:.1%} to {found['kept_max']:.1%})",
        f"{found['times_synchronous']:.2f}" if "times_synchronous" in found else "",
        f"{found['exchanges_per_step']:.2f}" if gossip else "",
        f"{found['bytes_sent_per_step'] / 1e6:.1f}" if gossip else "",
        f"{found['wire_bytes_per_step'] / 1e6:.1f}",
    ]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def profile(result: Mapping[str, Any], link: str, model: str) -> str:
    """Return a Markdown table of the parts of a step's time, in ms per step of a learner."""
    names = ("gradient_s", "optimizer_s", "collect_s", "offer_s", "engine_cpu_s", "cpu_s")
    heads = ("computation", "scheme", "averaging", *(name.removesuffix("_s") for name in names))
    rows = [_row(*heads), _row(*["---"] * len(heads))]
    for kind, schemes in result.get(link, {}).get(model, {}).items():
        for scheme, found in schemes.items():
            for which, prefix in (("off", "off_"), ("on", "")):
                values = [1e3 * found[f"{prefix}{name}_per_step"] for name in names]
                rows.append(_row(kind, scheme, which, *(f"{v:.1f}" for v in values)))
    return "\n".join(rows)


def at(curve: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    """Return the copy of a curve with that name, None if there is none."""
    return next((copy for copy in curve if copy["at"] == name), None)


def common(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return the names of the copies that every scheme has: first by number of steps, then by time."""
    first, *others = curves.values()
    names = [copy["at"] for copy in first if all(at(other, copy["at"]) for other in others)]
    return sorted(names, key=lambda name: (name.startswith("time"), float(name.split()[1])))


def curve_table(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return a Markdown table of held-out loss and consensus distance at equal samples and equal time."""
    rows = [_row("at", *(f"{s}: steps, loss, distance" for s in curves))]
    rows += [_row(*["---"] * (1 + len(curves)))]
    for name in common(curves):
        copies = [at(curve, name) for curve in curves.values()]
        cells = [_copy(copy) for copy in copies if copy is not None]
        rows.append(_row(_when(name, copies[0]), *cells))
    return "\n".join(rows)


def _when(name: str, copy: Mapping[str, Any] | None) -> str:
    assert copy is not None
    return f"{copy['seconds']:.0f} s" if name.startswith("time") else name


def _copy(copy: Mapping[str, Any]) -> str:
    steps = statistics.mean(copy["steps"])
    return f"{steps:.0f}, {copy['loss']:.3f}, {copy['consensus_distance']:.3g}"


def require_known(names: Iterable[str], known: Iterable[str], option: str) -> None:
    """Check that all values of an option are known.

    Raises:
        Problem: if a value is unknown.
    """
    for name in names:
        if name not in known:
            raise Problem(f"{option}: {name!r} is unknown, known are {', '.join(known)}")
