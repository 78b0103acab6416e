"""Measures training speed with a slow learner and on slow networks, against theory and a plain loop.

    python -m lab.studies.cluster                      the first two parts, half an hour on two cores
    python -m lab.studies.cluster --parts stragglers   one slow learner among four; no root needed
    python -m lab.studies.cluster --parts network      two hosts and a shaped link; needs root
    python -m lab.studies.cluster --parts surface      five links, by what exchanges send; needs root

The part `stragglers` measures every averaging strategy and SSGD with one of 4 super learners 2 to 100 times
slower. The part `network` uses two hosts, which are network namespaces of this machine, with 10 Gb/s, 1 Gb/s
and 100 Mb/s between them, and models of 1, 10 and 43.15 M parameters. It measures H-ADPSGD, SSGD and
averaging off, and the held-out loss of each at 1 Gb/s with the largest model. The part `surface` measures
the speed kept at 10 Mb/s to 5 Gb/s with whole exchanges, in 8 and 4 bits, with a chosen share, and with
chosen bits too, beside DDP and DiLoCo (50 minutes). Finished runs are kept.
Written to --out: result.json, table.md, stragglers.png, network.png, surface.png and all runs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from examples.acoustic_model.speech import launch
from examples.acoustic_model.speech.keeper import perform_jobs
from examples.acoustic_model.speech.problem import Problem, new_parser, run, within
from lab.studies import sweep
from lab.studies.disturbed import hosts, jobs, network, picture, stragglers, surface

PARTS = ("stragglers", "network", "surface")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options; raise Problem if one is out of range."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=["stragglers", "network"])
    add("--schemes", nargs="+", default=list(stragglers.SCHEMES), metavar="SPEC",
        help="strategies beside a slow learner (default: seven)")  # fmt: skip
    add("--repetitions", type=int, help="runs of each scheme (default: 3 stragglers, 2 network)")
    known = [*network.LINKS, *surface.LINKS]
    add("--links", nargs="+", help=f"link rates (default: all of the part, of {', '.join(known)})")
    add(
        "--models", nargs="+", default=list(network.MODELS), help="model sizes (default: all three)"
    )
    add("--exchanges", nargs="+", choices=surface.SCHEMES, default=list(surface.SCHEMES),
        help="what exchanges send, of the surface (default: all)")  # fmt: skip
    add("--no-curves", action="store_true", help="measure speeds only, no held-out loss")
    add("--recall", action="store_true", help="measure nothing, print tables of finished runs")
    add("--out", type=Path, default=Path("out/cluster"))
    options = parser.parse_args(argv)
    if options.repetitions is not None:
        within("--repetitions", options.repetitions, 1, 100)
    network.require_known(options.links or (), known, "--links")
    network.require_known(options.models, network.MODELS, "--models")
    return options


def measure_stragglers(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every scheme beside a slow learner, in turn, `--repetitions` times; return results and text."""
    repetitions = options.repetitions or stragglers.REPETITIONS
    told = [
        stragglers.job(scheme, repetition)
        for repetition in range(repetitions)
        for scheme in options.schemes
    ]
    records, failed = perform_jobs(told, options.out / "runs", options.recall)
    found = stragglers.gather(options.schemes, repetitions, records)
    result = stragglers.results(found)
    lines = [stragglers.table(result)] if result else []
    lines += stragglers.notes(result, repetitions)
    if result:
        picture.draw_stragglers(result, options.out / "stragglers.png")
    return {"result": result, "failed": failed, "lines": [*lines, jobs.loads(records)]}


def measure_network(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every link with every model, then the loss curves; return results and text."""
    missing = hosts.missing()
    if missing and not options.recall:
        raise Problem(f"--parts network: {missing}; --parts stragglers does not need it")
    cells = network.cells(within_part(options.links, network.LINKS), options.models)
    repetitions = options.repetitions or network.REPETITIONS
    curves = [] if options.no_curves else [network.GOSSIP, network.SYNCHRONOUS, network.ALONE]
    with hosts.Hosts(start=not options.recall) as both:
        told = [
            network.job(both, f"{link}, {model}, {scheme}", link,
                        network.options((link, model, scheme), repetitions))
            for link, model, scheme in cells
        ]  # fmt: skip
        told += [
            network.job(both, f"curve of {scheme}", network.CURVE[0],
                        network.curve_options(*network.CURVE, scheme))
            for scheme in curves
        ]  # fmt: skip
        records, failed = perform_jobs(told, options.out / "runs", options.recall)
    blocks = dict(zip(cells, records, strict=False))
    result = network.results({cell: record for cell, record in blocks.items() if record})
    trained = dict(zip(curves, records[len(cells) :], strict=True))
    judged = {scheme: record["curve"] for scheme, record in trained.items() if record}
    lines = [network.table(result), *network.goal(result)]
    lines += [network.profile(result, *network.GOAL_CELL)]
    lines += [network.curve_table(judged)] if judged else []
    picture.draw_network(result, judged, options.out / "network.png")
    found = {"result": result, "curves": judged, "failed": failed}
    return {**found, "lines": [*lines, jobs.loads(records)]}


def within_part(links: list[str] | None, known: Iterable[str]) -> list[str]:
    """Return the links that a part knows, of those asked for; all of them by default."""
    return [link for link in known if links is None or link in links]


def measure_surface(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every link, model and kind of exchange; return results and text."""
    missing = hosts.missing()
    if missing and not options.recall:
        raise Problem(f"--parts surface: {missing}; --parts stragglers does not need it")
    links = within_part(options.links, surface.LINKS)
    cells = surface.cells(links, options.models, options.exchanges)
    repetitions = options.repetitions or 1
    with hosts.Hosts(start=not options.recall) as both:
        told = [surface.job(both, cell, repetitions) for cell in cells]
        records, failed = perform_jobs(told, options.out / "runs", options.recall)
    blocks = dict(zip(cells, records, strict=True))
    result = surface.results({cell: record for cell, record in blocks.items() if record})
    surface.draw(result, options.out / "surface.png")
    named = {", ".join(cell): one for cell, one in result.items()}
    lines = [surface.table(result), jobs.loads(records)]
    return {"result": named, "failed": failed, "lines": lines}


def main() -> None:
    """Measure the parts, and write result.json, table.md and the figures."""
    options = arguments()
    launch.check(["torch", "horovod", "hvd_adpsgd", "matplotlib"], launcher=True)
    options.out.mkdir(parents=True, exist_ok=True)
    measures = {
        "stragglers": measure_stragglers,
        "network": measure_network,
        "surface": measure_surface,
    }
    found = {part: measures[part](options) for part in PARTS if part in options.parts}
    text = "\n\n".join(line for one in found.values() for line in one.pop("lines"))
    failed = [line for one in found.values() for line in one["failed"]]
    settings = {"stragglers": stragglers.SETTINGS, "network": network.SETTINGS}
    result = {**found, "settings": settings, "versions": launch.versions()}
    result |= {"cores": os.cpu_count()}
    sweep.publish(options.out, result, text, "and a figure of each part", failed)


if __name__ == "__main__":
    run(main)
