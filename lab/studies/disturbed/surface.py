"""Measures the speed that training keeps on links of 10 Mb/s to 5 Gb/s, by what its exchanges send.

Two hosts, each with one super learner of one learner, which sleeps in place of an accelerator, as in the part
`network`. DDP and DiLoCo are computed: a step of a learner alone, and after every step, or every 128 steps,
an all-reduce at the full speed of the link, which nothing overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hvd_adpsgd_lab.simulation.planner import PATIENT, Cluster, plan

from examples.acoustic_model.speech.keeper import Job

from . import jobs, network, picture
from .hosts import Hosts

LINKS = {
    "10 Mb/s": 10e6,
    "50 Mb/s": 50e6,
    "200 Mb/s": 200e6,
    "1 Gb/s": 1e9,
    "5 Gb/s": 5e9,
}
SCHEMES: dict[str, dict[str, Any]] = {
    "whole": {},
    "auto": {"exchange_share": "auto"},
    "int8": {"wire_dtype": "int8"},
    "int4": {"wire_dtype": "int4"},
    "auto, bits": {"exchange_share": "auto", "wire_dtype": "auto"},
}
KIND = "accelerator"
OFF_S, ON_S = 5.0, 20.0  # seconds of a block; with "auto" shares settle in its first third
PERIOD = 128  # steps between two all-reduces of DiLoCo
VARIABLES = {"HVD_ADPSGD_WIRE": "tcp"}
LATENCY_S = 1e-4  # of the virtual hosts' network, in the simulator

# Utilisation of DiLoCo with 30.8 M parameters and a period of 128, measured by
# https://github.com/Adnan082/diloco-measured, by bits per second
PUBLISHED = {50e6: 0.1155, 200e6: 0.3609, 1e9: 0.7152, 5e9: 0.87}

Cell = tuple[str, str, str]  # link, model, scheme


def cells(links: Iterable[str], models: Iterable[str], schemes: Iterable[str]) -> list[Cell]:
    """Return all combinations of link, model and scheme."""
    return [(link, model, scheme) for link in links for model in models for scheme in schemes]


def job(hosts: Hosts, cell: Cell, repetitions: int) -> Job:
    """Return the measurement of a cell."""
    link, model, scheme = cell
    batch, wait = network.computation(KIND, model)
    told = {
        "averaging": "random_pairs",
        **SCHEMES[scheme],
        **{name: network.SETTINGS[name] for name in ("rate", "momentum", "seed")},
        "sizes": network.sizes(model),
        "computations": [f"{batch}:{wait:.4g}"],
        "block_s": OFF_S,
        "on_s": ON_S,
        "repetitions": repetitions,
    }

    def act(folder: Path) -> dict[str, Any]:
        hosts.shape(LINKS[link])
        command = jobs.learner("far_learner", told, folder / "told.json")
        exchange_s = 8 * 4 * network.MODELS[model] / LINKS[link]
        deadline_s = 120 + repetitions * 3 * (OFF_S + ON_S) + 20 * exchange_s
        hosts.run(command, deadline_s, folder / "log.txt", VARIABLES)
        return jobs.told(folder / "told.json")

    return Job(f"{link}, {model}, {scheme}", {**told, "link": LINKS[link], **VARIABLES}, act)


def results(found: Mapping[Cell, dict[str, Any]]) -> dict[Cell, dict[str, Any]]:
    """Return the speeds and ratios of each cell."""
    return {cell: network.one(next(iter(told["rows"].values()))) for cell, told in found.items()}


def kept_of_period(link: str, model: str, step_s: float, period: int) -> float:
    """Return the share of its speed that training with an all-reduce every `period` steps keeps, computed.

    Two learners send and receive one model each in a ring all-reduce.
    """
    allreduce_s = 8 * 4 * network.MODELS[model] / LINKS[link]
    return period * step_s / (period * step_s + allreduce_s)


def predicted(cell: Cell, step_s: float) -> float:
    """Return the exchanges per step of a cell by the simulator; of a share that is chosen NaN."""
    link, model, scheme = cell
    if "exchange_share" in SCHEMES[scheme]:
        return float("nan")
    parameters, rate = network.MODELS[model], LINKS[link] / 8
    exchange_s = 4 * parameters / rate
    minutes = max(20 * step_s, 20 * exchange_s) / 60
    config = PATIENT.replace(wire_dtype=SCHEMES[scheme].get("wire_dtype"))
    cluster = Cluster(2, parameters, step_s, rate, LATENCY_S, config, minutes=minutes)
    return plan(cluster).exchanges_per_step


HEADS = (
    *("model", "link", "exchanges", "steps/s alone", "kept", "exchanges per step", "simulated"),
    *("MB/step on the wire", "DiLoCo, 128", "DDP"),
)


def table(result: Mapping[Cell, dict[str, Any]]) -> str:
    """Return a Markdown table: a row per model, link and scheme."""
    rows = [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}"]
    for cell, found in sorted(result.items(), key=_place):
        link, model, scheme = cell
        step_s = 1 / found["off_steps_per_s"]
        others = [kept_of_period(link, model, step_s, period) for period in (PERIOD, 1)]
        told = [
            model, link, scheme, f"{found['off_steps_per_s']:.3g}",
            f"{found['kept']:.1%}", f"{found['exchanges_per_step']:.3f}",
            _simulated(cell, step_s), f"{found['wire_bytes_per_step'] / 1e6:.2f}",
            *(f"{other:.1%}" for other in others),
        ]  # fmt: skip
        rows.append(f"| {' | '.join(told)} |")
    return "\n".join(rows)


def _simulated(cell: Cell, step_s: float) -> str:
    found = predicted(cell, step_s)
    return "" if math.isnan(found) else f"{found:.3f}"


def _place(item: tuple[Cell, Any]) -> tuple[int, int, int]:
    link, model, scheme = item[0]
    return [*network.MODELS].index(model), [*LINKS].index(link), [*SCHEMES].index(scheme)


def draw(result: Mapping[Cell, dict[str, Any]], path: Path) -> None:
    """Draw the share kept over the rate of the link: a panel per model, a line per scheme."""
    models = [model for model in network.MODELS if any(cell[1] == model for cell in result)]
    plt = picture.pyplot()
    figure, axes = plt.subplots(
        1,
        max(1, len(models)),
        figsize=(8 + len(models), 4.2),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for axis, model in zip(axes[0], models, strict=False):
        _panel(axis, {cell: one for cell, one in result.items() if cell[1] == model}, model)
    axes[0][0].set_ylabel("steps/s relative to averaging off")
    named = {}  # a model may lack some exchanges
    for axis in axes[0]:
        handles, labels = axis.get_legend_handles_labels()
        named.update(zip(labels, handles, strict=True))
    figure.legend(
        named.values(), named.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _panel(axis: Any, result: Mapping[Cell, dict[str, Any]], model: str) -> None:
    for scheme, style in zip(SCHEMES, picture.LINES, strict=False):
        links = [link for link in LINKS if (link, model, scheme) in result]
        colour, line, marker = style
        if not links:
            continue
        axis.plot(
            [LINKS[link] for link in links], [result[link, model, scheme]["kept"] for link in links],
            color=colour, linestyle=line, marker=marker, markersize=5, label=f"H-ADPSGD, {scheme}",
        )  # fmt: skip
    step_s = sum(1 / one["off_steps_per_s"] for one in result.values()) / max(1, len(result))
    for period, name, line in (
        (PERIOD, "DiLoCo, 128 steps (computed)", "--"),
        (1, "DDP (computed)", ":"),
    ):
        kept = [kept_of_period(link, model, step_s, period) for link in LINKS]
        axis.plot(
            list(LINKS.values()), kept, color="#000000", linestyle=line, linewidth=1, label=name
        )
    axis.plot(
        list(PUBLISHED), list(PUBLISHED.values()), color="#d55e00", marker="x", linestyle="",
        label="DiLoCo, 128 steps (published, 30.8 M)",
    )  # fmt: skip
    axis.set_title(f"{model} parameters, steps of {step_s:.2g} s", fontsize=10)
    axis.set(xscale="log", xlabel="bits per second", ylim=(0, 1.05))
    axis.grid(alpha=0.3)
