"""One learner of a storm: FOLDER [HOST]. Trains a model with known local updates, and commits its faults.

The model is zero at first; super learner s adds `drift(s)` in each step, and nothing else but averaging
changes it. At each checkpoint the leader leaves its model, FOLDER/CHECKPOINT.SUPER.npy; FOLDER/notes has a
line of JSON for everything that happens.
"""

import contextlib
import faulthandler
import hashlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hvd_adpsgd_lab.simulation import engine_calls

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.launch import world as worlds
from tests.storm.hosts import enter, name
from tests.storm.script import EPOCH, LINKS, Fault, Script, drift

CHUNK_NBYTES = 65536
STEP_S = 0.005  # the rest of a gradient, for which a machine may have too few cores
SHORT_S = 0.01  # within which moments are: of a step, of an operation over all learners
LOOK_S = 1e-4
HANGS_S = 420.0  # then every thread shows where it is
JOINED_S = 240.0  # longest wait until whoever is missing has joined
HELD_S = 5.0  # longest wait until the trainer of a learner that leaves does nothing more
APART = 4.0  # gradients of the learners of a super learner
NEW = "HVD_ADPSGD_JOIN" in os.environ


class Learner:
    """This process: its script, its notes, its model."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.script = Script.from_json((folder / "script.json").read_text())
        self._notes = os.open(folder / "notes", os.O_WRONLY | os.O_APPEND)
        self.step, self.factor, self.checkpoints = 0, 1.0, 0
        self.place: dict[str, int] = {}
        self.engine_stays = threading.Lock()
        self.warned: list[str] = []
        handler = logging.StreamHandler()
        handler.addFilter(lambda record: self.warned.append(record.getMessage()) or True)
        logging.getLogger("hvd_adpsgd").addHandler(handler)
        self.note("start")

    def init(self) -> None:
        """hvd.init; from now on notes say whose they are."""
        hvd.init()
        place = {"rank": hvd.rank(), "who": hvd.super_rank(), "inner": hvd.super_learner.rank()}
        self.place = place
        self.note("initialized")

    def note(self, what: str, **facts: Any) -> None:
        """One line, whole, whoever writes too."""
        line = {"what": what, "at": time.monotonic(), "pid": os.getpid(), "new": NEW, **self.place}
        os.write(self._notes, (json.dumps({**line, "step": self.step, **facts}) + "\n").encode())

    # ---- faults

    def due(self, place: str) -> Iterator[tuple[int, Fault]]:
        """Faults of this learner whose step has come, at this place."""
        who = self.script.n if NEW else self.place["who"]
        for i, fault in enumerate(self.script.faults):
            mine = (fault.who, fault.inner) == (who, self.place["inner"])
            if mine and fault.place == place and self.step >= fault.step:
                yield i, fault

    def here(self, place: str) -> None:
        """Commit what is due here."""
        for i, fault in self.due(place):
            self.commit(i, fault)

    @contextlib.contextmanager
    def during(self, place: str) -> Iterator[None]:
        """Commit what is due here while the block runs, or just behind it."""
        for i, fault in self.due(place):
            threading.Thread(target=self._soon, args=(i, fault), daemon=True).start()
        yield

    def _soon(self, i: int, fault: Fault) -> None:
        time.sleep(SHORT_S * random.random())
        self.commit(i, fault)

    def watch(self) -> None:
        """Commit what is due in the middle of an exchange."""
        if any(fault.place == "exchange" for fault in self.script.faults):
            threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_S)
            due = list(self.due("exchange"))
            if due and self.is_in_exchange():
                for i, fault in due:
                    self.commit(i, fault)

    def is_in_exchange(self) -> bool:
        """Whether some chunks of an exchange are merged, and others are not; hvd.admit changes engines."""
        with self.engine_stays:
            loop = self.optimizer._averaging.engine.loop
            return loop is not None and any(
                0 < x["merged"] < x["chunks"] for x in loop.view()["peers"]
            )

    def commit(self, i: int, fault: Fault) -> None:
        """The fault, once in the life of the job."""
        try:
            (self.folder / f"struck.{i}").touch(exist_ok=False)
        except FileExistsError:
            return
        self.note("fault", fault=i, kind=fault.kind, place=fault.place, checkpoint=self.checkpoints)
        if fault.kind in ("kill", "segfault"):
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSEGV)
        elif fault.kind == "leave":
            for _ in range(3):  # a further one changes nothing
                os.kill(os.getpid(), signal.SIGTERM)
        elif fault.kind == "slow":
            self.factor = fault.value
        elif fault.kind == "raise":
            raise RuntimeError("a fault of the script")
        elif fault.kind == "exit":
            sys.exit(1)
        elif fault.kind == "os_exit":
            os._exit(1)
        elif fault.kind in LINKS:
            side = "apart" if fault.kind == "partition" else "nowhere"
            cut = (self.folder / "links").read_text().split()
            subprocess.run([*cut, str(fault.value), side, *map(name, fault.hosts)], check=True)
        else:
            wake = f"sleep {fault.value}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", wake], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)

    # ---- training

    def run(self) -> None:
        """From wrapping to the end."""
        script = self.script
        dtype = getattr(torch, script.dtype)
        shape = (script.chunks, CHUNK_NBYTES * 8 // torch.finfo(dtype).bits)
        self.model = torch.nn.Module()
        self.model.weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        self.model.last = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
        apart = APART * (2 * hvd.super_learner.rank() - hvd.super_learner.size() + 1)
        self.gradient = apart - torch.from_numpy(drift(hvd.super_rank(), shape)).to(dtype)
        worlds.current().departure.at_leave(self.left)  # behind the engine's departure
        with self.during("wrap"):
            self.optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(self.model.parameters(), lr=1.0),
                named_parameters=self.model.named_parameters(),
                averaging=script.strategy,
                exchanges_per_step=script.rate,
                exchange_share=script.share,
            )
        self.watch()
        # the gradient of `last` comes first, and is with Horovod by then
        self.model.weight.register_hook(lambda _: self.here("gradient"))
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=None)  # 0 may have left
        self.note("wrapped")
        self.epochs()
        self.note("trained", total=hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
        worlds.current().teardown.at_shutdown(lambda: self.here("shutdown"))
        self.note("end", failed=list(hvd.failed_ranks()))
        hvd.shutdown()
        self.note("down")

    def left(self) -> None:
        """Of a super learner of one learner: leave the model with all that is owed to it."""
        self.note("left")
        if self.script.k > 1 or not hasattr(self, "optimizer") or not is_held():
            return
        memory = self.optimizer._averaging.engine.memory.own
        kind = np.float64 if self.script.dtype == "float64" else np.float32
        parts = [np.zeros(chunk.count, kind) for chunk in memory.layout.parts[0].chunks]
        for i, part in enumerate(parts):
            assert engine_calls.share(memory.store, i, part.view(np.uint8))
        model = np.concatenate(parts)[: self.model.weight.numel()].reshape(self.model.weight.shape)
        np.save(self.folder / f"left.{self.place['who']}.npy", model)
        self.note("held", made=self.optimizer._averaging.step)

    def epochs(self) -> None:
        """As many as the script says, and until those that are to join have joined."""
        state = {"epoch": 0, "step": 0, "checkpoints": 0}
        if self.script.joins:
            state = self.admit(state)
        ends = time.monotonic() + JOINED_S
        while True:
            self.step, self.checkpoints = state["step"], state["checkpoints"]
            self.checkpoint()
            missing = self.is_missing_some(time.monotonic() > ends) if self.script.joins else False
            if state["epoch"] >= self.script.epochs and not missing:
                return
            with self.during("collective"):
                hvd.allreduce(torch.ones(1), op=hvd.Sum)
                with hvd.averaged(self.model):
                    pass
            for _ in range(EPOCH):
                with self.during("moment"):
                    self.train_step()
            state = {
                "epoch": state["epoch"] + 1,
                "step": self.step,
                "checkpoints": self.checkpoints,
            }
            if self.script.joins:
                self.checkpoint()
                state = self.admit({**state, "checkpoints": self.checkpoints})

    def train_step(self) -> None:
        """One, which adds the drift."""
        self.optimizer.zero_grad()
        # the backward pass comes to `last` first
        (self.model.weight * self.gradient).sum().add(0 * self.model.last.sum()).backward()
        time.sleep(STEP_S * self.factor)
        self.optimizer.step()
        self.step += 1
        self.here("step")

    def checkpoint(self) -> None:
        """No exchange is under way, and no correction pending: leave the model.

        On a slow machine an exchange may be running still, as a warning says: `rests` tells.
        """
        self.here("before")
        self.warned.clear()
        with hvd.averaging_paused():
            rests = not any("is still running" in warning for warning in self.warned)
            model = self.model.weight.detach().numpy()
            bits = hashlib.sha256(model.tobytes()).hexdigest()[:16]
            if hvd.is_leader():
                new = self.folder / f"{os.getpid()}.new.npy"
                np.save(new, model)
                new.rename(self.folder / f"{self.checkpoints}.{hvd.super_rank()}.npy")
            metrics = hvd.metrics()
            averagings = metrics["exchanges"] + metrics["means"]
            self.note(
                "checkpoint",
                checkpoint=self.checkpoints,
                bits=bits,
                averagings=averagings,
                rests=rests,
            )
            self.here("rest")
        self.checkpoints += 1

    def admit(self, state: dict[str, int]) -> dict[str, int]:
        """Of all learners; where this one joins, the state of the others."""
        with self.during("admit"), self.engine_stays:
            found: dict[str, int] = hvd.admit(
                self.model, self.optimizer, state, patience_s=JOINED_S
            )
        if NEW and not (self.folder / f"joined.{os.getpid()}").exists():
            (self.folder / f"joined.{os.getpid()}").touch()
            self.step = found["step"]
            self.note("joined")
        return found

    def is_missing_some(self, too_late: bool) -> bool:
        """Whether super learners are to join that have not yet, on all alike."""
        comes = self.script.joins == "candidate" and not (self.folder / "nobody comes").exists()
        told = hvd.allgather_object((hvd.super_rank(), self.script.n + comes, too_late))
        expected = min(number for _, number, _ in told)
        return len({who for who, _, _ in told}) < expected and not any(late for *_, late in told)


def is_held() -> bool:
    """Wait until the trainer is, which takes in the last corrections before that; whether it was in time."""
    ends, trainer = time.monotonic() + HELD_S, threading.main_thread().ident
    while time.monotonic() < ends:
        if sys._current_frames()[trainer].f_code.co_name == "block_if_leaving":
            return True
        time.sleep(1e-3)
    return False


def main() -> None:
    if len(sys.argv) > 2:
        enter(int(sys.argv[2]))
    faulthandler.dump_traceback_later(HANGS_S)
    learner = Learner(Path(sys.argv[1]))
    torch.set_num_threads(1)
    learner.init()
    learner.run()


if __name__ == "__main__":
    main()
