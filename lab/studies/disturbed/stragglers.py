"""Measures speed with one slow learner among four, of the others and of all together, by strategy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.acoustic_model.speech.keeper import Job
from hvd_adpsgd import strategies

from . import jobs

# Settings with which two cores are not saturated by four learners: a gradient and an exchange of a model of
# 0.92 M parameters take some milliseconds, the sleep takes 30. So cores are no bottleneck, and the
# measurement shows which learners wait for others.
SETTINGS: dict[str, Any] = {
    "learners": 4,  # as 4 super learners of 1
    "sizes": (256, 1024, 640, 10),
    "batch": 16,
    "wait_s": 0.03,
    "block_s": 2.0,
    "warm_up": 20,
    "slowdowns": (1.0, 2.0, 5.0, 10.0, 100.0),
}
REPETITIONS = 3
SCHEMES = (
    "random_pairs",
    "fixed_ring",
    "random_ring",
    "periodic_averaging:period=10",
    "delay_by_one",
    "synchronous_gossip:order=awc+fixed_ring",
    "synchronous",
)
GOAL = 0.97  # share of their undisturbed speed that healthy learners should keep with gossip
ENVIRONMENT = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1"}

Block = list[dict[str, Any]]  # counts of each learner, by rank; the last learner is slow
# Speeds by scheme and slowdown, per repetition.
Found = dict[str, dict[float, list[dict[str, float]]]]


def order(slowdowns: Sequence[float], repetition: int) -> list[float]:
    """Return the slowdowns of a run's blocks: 1 first and last; the others reversed in odd repetitions."""
    rest = [s for s in slowdowns if s != 1]
    return [1.0, *(rest if repetition % 2 == 0 else rest[::-1]), 1.0]


def job(scheme: str, repetition: int, settings: dict[str, Any] = SETTINGS) -> Job:
    """Return a job that measures a scheme with all slowdowns."""
    told = {**settings, "averaging": scheme, "seed": repetition}
    told["slowdowns"] = order(settings["slowdowns"], repetition)
    options = {k: v for k, v in told.items() if k != "learners"}
    longest = max(told["slowdowns"]) * settings["wait_s"] * 12 + settings["block_s"]

    def act(folder: Path) -> dict[str, Any]:
        command = ["horovodrun", "-np", str(settings["learners"])]
        command += jobs.learner("slow_learner", options, folder / "told.json")
        deadline_s = 120 + 3 * (len(told["slowdowns"]) * settings["block_s"] + longest)
        jobs.run(command, ENVIRONMENT, deadline_s, folder / "log.txt")
        return jobs.told(folder / "told.json")

    return Job(f"stragglers, {scheme}, repetition {repetition}", told, act)


def waits(scheme: str) -> bool:
    """Return whether all learners wait for the slowest one with this scheme."""
    strategy = strategies.parse(scheme)
    return strategy.averages == "nothing" or strategy.plan(0, 4).in_step is not None


def speeds(blocks: list[tuple[float, Block]]) -> dict[float, dict[str, float]]:
    """Return a run's steps/s of all and of healthy learners, and exchanges per healthy step, by slowdown."""
    found: dict[float, list[Block]] = {}
    for slowdown, block in blocks:
        found.setdefault(slowdown, []).append(block)
    return {s: _speeds(several) for s, several in found.items()}


def _speeds(several: list[Block]) -> dict[str, float]:
    healthy = [learner for block in several for learner in block[:-1]]
    return {
        "all": statistics.mean(sum(map(_rate, block)) for block in several),
        "healthy": statistics.mean(sum(map(_rate, block[:-1])) for block in several),
        "exchanges": sum(h["exchanges"] for h in healthy) / sum(h["steps"] for h in healthy),
    }


def _rate(learner: dict[str, Any]) -> float:
    return learner["steps"] / learner["seconds"]


def results(found: Found) -> dict[str, Any]:
    """Return, by scheme, the speed at s = 1 and the shares kept of it by slowdown, with the theory's."""
    return {scheme: _scheme(scheme, by_slowdown) for scheme, by_slowdown in found.items()}


def _scheme(scheme: str, by_slowdown: dict[float, list[dict[str, float]]]) -> dict[str, Any]:
    learners, alone = SETTINGS["learners"], by_slowdown[1.0]
    kept = {}
    for slowdown, runs in by_slowdown.items():
        pairs = list(zip(runs, alone, strict=True))
        # gradients per unit of time of learners of which one is so many times slower and the others make 1
        throughput = learners / slowdown if waits(scheme) else learners - 1 + 1 / slowdown
        kept[f"{slowdown:g}"] = {
            **{who: _spread([a[who] / b[who] for a, b in pairs]) for who in ("all", "healthy")},
            "exchanges": statistics.median(run["exchanges"] for run in runs),
            "model": throughput / learners,
        }
    return {"steps_per_s": _spread([run["all"] for run in alone]), "kept": kept}


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(result: dict[str, Any], batch: int = SETTINGS["batch"]) -> str:
    """Return two Markdown tables of speed kept: of healthy learners; of all together, with the theory's."""
    slowdowns = [s for s in next(iter(result.values()))["kept"] if s != "1"]
    heads = [f"{s} times slower" for s in slowdowns]
    rows = [_row("the healthy learners keep", *heads, "exchanges per healthy step")]
    rows += [_row(*["---"] * (len(heads) + 2))]
    for scheme, one in result.items():
        cells = [_between(one["kept"][s]["healthy"]) for s in slowdowns]
        exchanges = [one["kept"][s]["exchanges"] for s in ("1", slowdowns[-1])]
        rows.append(_row(f"`{scheme}`", *cells, "{:.2f}, {:.2f}".format(*exchanges)))
    rows += ["", _row("all together keep (model)", *heads, "samples/s undisturbed")]
    rows += [_row(*["---"] * (len(heads) + 2))]
    for scheme, one in result.items():
        kept = [one["kept"][s] for s in slowdowns]
        cells = [f"{k['all']['median']:.3f} ({k['model']:.3f})" for k in kept]
        rows.append(_row(f"`{scheme}`", *cells, f"{batch * one['steps_per_s']['median']:.0f}"))
    return "\n".join(rows)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _between(kept: dict[str, float]) -> str:
    return f"{kept['median']:.3f} ({kept['min']:.3f} to {kept['max']:.3f})"


def notes(result: dict[str, Any], repetitions: int) -> list[str]:
    """Return the notes below the tables: settings of the runs, and whether the goal is met."""
    gossip = {scheme: one for scheme, one in result.items() if not waits(scheme)}
    lines = [
        f"{SETTINGS['learners']} super learners of 1, a model of 0.92 M parameters, batch "
        f"{SETTINGS['batch']}; a step is a small real gradient and a wait of "
        f"{1e3 * SETTINGS['wait_s']:.0f} ms; one learner's takes s times as long. Steps/s against "
        f"those of the same run with s = 1; median (least to most) of {repetitions} runs of each "
        "scheme, which take turns.",
    ]
    if gossip:
        scheme, s, kept = min(
            ((scheme, s, k["healthy"]["median"]) for scheme, one in gossip.items()
             for s, k in one["kept"].items()), key=lambda found: found[2],
        )  # fmt: skip
        verdict = "met" if kept >= GOAL else "missed"
        lines.append(
            f"Goal: with gossip the healthy keep at least {GOAL:.0%}. Least: {kept:.1%} "
            f"(`{scheme}`, s = {s}): {verdict}."
        )
    return lines


def gather(schemes: Sequence[str], repetitions: int, records: list[dict | None]) -> Found:
    """Return the speeds of schemes without a failed run; `records` are by repetition, then scheme."""
    found: Found = {}
    for place, scheme in enumerate(schemes):
        mine = records[place :: len(schemes)]
        assert len(mine) == repetitions
        if all(mine):
            runs = [speeds(record["blocks"]) for record in mine if record]
            found[scheme] = {s: [run[s] for run in runs] for s in runs[0]}
    return found
