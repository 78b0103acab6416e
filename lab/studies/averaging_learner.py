"""One learner of model_averaging.py, which trains every run of a plan, one after another, in one process.

It is started by horovodrun, or without a launcher for one learner. A run uses the same total number of
minibatches for any number of learners: learner r of N takes minibatch r, N + r, 2N + r, ... of one random
order of all frames. All runs with the same activation share one model, which gets new weights for each run;
the optimizer wrapped around it then replaces the previous optimizer, whose engine stops. Learner 0 writes
the record of each run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: learners share the cores
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.acoustic_model import train
from examples.acoustic_model.speech import corpus, journal
from examples.acoustic_model.speech.model import Shape, make
from examples.acoustic_model.speech.problem import run
from lab.studies.keeper import keep

GAIN = {"sigmoid": 4.0, "relu": math.sqrt(2)}  # gain of initial weights: Glorot and Bengio; He


class Frames:
    """Frames of one split of the corpus, each with the window of frames that is a DNN's input.

    Args:
        data: folder of the speech corpus.
        name: name of the split.
        shape: shape of the DNN.
    """

    def __init__(self, data: Path, name: str, shape: Shape) -> None:
        split = corpus.Split(data, name, shape.context)
        features, labels = split[list(range(len(split)))]
        static = torch.from_numpy(features[..., : shape.inputs])
        self._flat = static.reshape(-1, shape.inputs)
        segments, length = static.shape[:2]
        inside = torch.arange(corpus.SEGMENT)
        self._starts = (torch.arange(segments)[:, None] * length + inside).flatten()
        self._window = torch.arange(2 * shape.context + 1)
        self.labels = torch.from_numpy(labels).flatten()

    def __len__(self) -> int:
        """Number of frames."""
        return len(self.labels)

    def __getitem__(self, chosen: Tensor) -> Tensor:
        """Return the windows of the chosen frames, shape (n, 2 context + 1, inputs), as the DNN's input."""
        return self._flat[self._starts[chosen][:, None] + self._window]


def order(count: int, minibatches: int, batch: int, seed: int) -> Tensor:
    """Return the frame indices of all minibatches of a run, shape (minibatches, batch), epoch by epoch."""
    generator = torch.Generator().manual_seed(seed)
    whole = -(-minibatches * batch // count)
    indices = torch.cat([torch.randperm(count, generator=generator) for _ in range(whole)])
    return indices[: minibatches * batch].view(minibatches, batch)


def begin(model: torch.nn.Module, seed: int, stack: str | None) -> None:
    """Give the model new weights: hidden layers by Glorot's rule, or from the RBM stack in file `stack`.

    The output layer gets torch's default initialisation in both cases.
    """
    torch.manual_seed(seed)
    fresh = make(model.shape)
    for layer in fresh.hidden:
        torch.nn.init.xavier_uniform_(layer.weight, GAIN[model.shape.activation])
        torch.nn.init.zeros_(layer.bias)
    if stack:
        train.start_from(Path(stack), fresh)
    model.load_state_dict(fresh.state_dict())


class Learner:
    """Trains the runs of a plan: holds the data and the models that the runs share.

    Args:
        hvd: hvd_adpsgd.torch, or speech/alone.py for one learner.
        plan: "data" (folder), "minibatches", "batch", and "layers" and "hidden" of the DNN.
    """

    def __init__(self, hvd: ModuleType, plan: dict[str, Any]) -> None:
        self.hvd, self.plan = hvd, plan
        data = Path(plan["data"])
        states = len(corpus.read_json(data / "states.json"))
        self._shape = Shape(
            plan["layers"], plan["hidden"], 0, states, inputs=40, kind="dnn", context=5
        )
        self.train, self.dev = (Frames(data, name, self._shape) for name in ("train", "dev"))
        self._models: dict[str, torch.nn.Module] = {}

    def _model(self, activation: str) -> torch.nn.Module:
        if activation not in self._models:
            self._models[activation] = make(
                Shape(**asdict(self._shape) | {"activation": activation})
            )
        return self._models[activation]

    def perform(self, one: dict[str, Any]) -> dict[str, Any]:
        """Train and evaluate one run, whose fields are those of model_averaging.Run.

        Returns:
            held-out loss (None if it is not finite) and frame error rate of the mean model, steps of
            each learner, wall seconds of training, CPU seconds of all learners together.
        """
        hvd = self.hvd
        model = self._model(one["activation"])
        used, began = time.process_time(), time.perf_counter()
        begin(model, one["seed"], one["stack"])
        plain = train.optimizer_for(one["optimizer"], model, one["rate"], 0.0)
        spec = f"periodic_averaging:period={one['period']}" if hvd.size() > 1 else "single"
        optimizer = hvd.DistributedOptimizer(
            plain,
            named_parameters=model.named_parameters(),
            **train.averaging(hvd, spec, one["seed"]),
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        steps = self._train(model, optimizer, one)
        self._take_mean(model)
        seconds = time.perf_counter() - began
        cpu = torch.tensor([time.process_time() - used], dtype=torch.float64)
        cpu = hvd.allreduce(cpu, name="cpu", op=hvd.Sum)
        if hasattr(plain, "remove_hooks"):
            plain.remove_hooks()
        loss, errors = self._heldout(model)
        self._save(model, one)
        found = {"heldout_loss": journal.number(loss), "heldout_fer": errors, "steps": steps}
        return found | {"seconds": seconds, "cpu_s": float(cpu)}

    def _train(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, one: dict[str, Any]
    ) -> int:
        hvd, plan = self.hvd, self.plan
        chosen = order(len(self.train), plan["minibatches"], plan["batch"], one["seed"])
        mine = chosen[hvd.rank() :: hvd.size()]
        for step, minibatch in enumerate(mine):
            for group in optimizer.param_groups:
                group["lr"] = train.exponential(one["rate"] * hvd.size(), step / len(mine))
            optimizer.zero_grad()
            scores = model(self.train[minibatch]).squeeze(1)
            cross_entropy(scores, self.train.labels[minibatch], ignore_index=-1).backward()
            optimizer.step()
        return len(mine)

    def _take_mean(self, model: torch.nn.Module) -> None:
        """Replace the model by the mean of all learners'; keep it if no learner's model is finite."""
        if self.hvd.size() == 1:
            return
        from hvd_adpsgd.errors import NonFiniteModelError

        try:
            self.hvd.average_model(model)
        except NonFiniteModelError as error:
            print(error, flush=True)

    @torch.no_grad()
    def _heldout(self, model: torch.nn.Module) -> tuple[float, float]:
        """Return cross-entropy and error rate per held-out frame; each learner evaluates a part of them."""
        total = torch.zeros(3, dtype=torch.float64)
        for chosen in torch.arange(self.hvd.rank(), len(self.dev), self.hvd.size()).split(4096):
            total += train.tally(model(self.dev[chosen]).squeeze(1), self.dev.labels[chosen])
        total = self.hvd.allreduce(total, name="heldout", op=self.hvd.Sum)
        return float(total[0] / total[2]), float(total[1] / total[2])

    def _save(self, model: torch.nn.Module, one: dict[str, Any]) -> None:
        if one["decoded"] and self.hvd.rank() == 0:
            final = {"model": model.state_dict(), "shape": asdict(model.shape)}
            journal.save(Path(one["folder"]) / "model.pt", final)


def main() -> None:
    """Train all runs of the plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    plan = json.loads(parser.parse_args().plan.read_text())
    hvd = train.horovod_for("single" if plan["learners"] == 1 else "periodic_averaging")
    torch.set_num_threads(1)
    hvd.init()
    learner, runs = Learner(hvd, plan), plan["runs"]
    for place, one in enumerate(runs, 1):
        found = learner.perform(one)
        if hvd.rank() > 0:
            continue
        keep(Path(one["folder"]), one | found)
        loss = found["heldout_loss"]
        said = "diverged" if loss is None else f"held-out {loss:.3f}"
        print(f"{place}/{len(runs)} {one['name']}: {said}, {found['cpu_s']:.0f} CPU s", flush=True)


if __name__ == "__main__":
    run(main)
