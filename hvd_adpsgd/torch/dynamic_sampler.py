"""Samplers, and shards: an epoch is divided while it runs, by the learners' speeds.

The laws: hvd_adpsgd/data/parts (between super learners), hvd_adpsgd/data/steps (inside one).
"""

import functools
import math
import os
from collections.abc import Iterator, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Sampler

from hvd_adpsgd.data import samplers
from hvd_adpsgd.data.channel import Channel, channel_of
from hvd_adpsgd.data.ranges import EPOCH, Ranges, count, without
from hvd_adpsgd.data.sharding import Sharding, View
from hvd_adpsgd.data.steps import Steps
from hvd_adpsgd.errors import ConfigError, StrategyMismatchError, WorldError
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.training.presence import live


class Progress(NamedTuple):
    """How many samples all learners have trained with, and how many epochs these are."""

    samples: int
    epochs: float


class _Dynamic:
    """What the samplers share; the arguments: see DynamicSampler."""

    _each: int | None = None  # see Sharding; None: batch_size

    def __init__(
        self,
        dataset: Sized | int,
        *,
        batch_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        samples: int | None = None,
    ) -> None:
        self._length = dataset if isinstance(dataset, int) else len(dataset)
        self._number = self._length if samples is None else samples
        values = self._length, batch_size, seed, self._number
        for name, value in zip(("dataset", "batch_size", "seed", "samples"), values, strict=True):
            self._require_integer(f"({name}={value!r})", value, int(name == "batch_size"))
        if self._number > self._length:
            raise ConfigError(
                f"{type(self).__name__}(samples={samples}): there are {self._length}. Give at most these."
            )
        self.batch_size, self.drop_last, self.epoch = batch_size, drop_last, samplers.register(self)
        self._shuffle = shuffle
        self._identity = {"length": self._length, "seed": seed, "shuffle": shuffle}
        self._begun: set[int] = set()
        self._ends: list[int] = []  # see set_ends
        self._unmade: Ranges = []  # positions left of an epoch in which all make equally many steps
        self._samples_before = 0  # of the job that is resumed, and of former Worlds
        self._sharding: Sharding | None = None
        self._channel: Channel | None = None
        self._rest: dict[int, Steps] = {}  # what is left of epochs that a resumed job continues
        self._order = functools.lru_cache(3)(  # positions of an earlier epoch may be left over
            lambda epoch: np.random.default_rng([seed, epoch]).permutation(self._length)
        )

    @property
    def is_open(self) -> bool:
        """Whether this learner is in an epoch."""
        return self._sharding is not None and self._sharding.is_open

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, which gives its order; without a call it is the next integer."""
        self._require_integer(f".set_epoch({epoch!r})", epoch)
        self.epoch = epoch
        if self._sharding is None:
            self._samples_before = max(self._samples_before, self._first(epoch))

    def _require_integer(self, where: str, value: Any, minimum: int = 0) -> None:
        if type(value) is not int or value < minimum:
            raise ConfigError(
                f"{type(self).__name__}{where}: give an integer of {minimum} or more."
            )

    def set_ends(self, ends: Sequence[int], start: int = 0) -> None:
        """Let iteration i end with the job's sample number `ends[i]`, where all learners can meet.

        `epoch` then counts iterations; the order of the samples stays. All learners call it with the same
        numbers, before they iterate; ends of epochs are among them. `start`: samples of the resumed job.
        """
        self._ends, self._samples_before, self.epoch = [start, *ends], start, 0
        self._identity["ends"] = hash(tuple(self._ends))

    def _first(self, epoch: int) -> int:
        """Return the job's number of the first sample of an epoch, or of an iteration."""
        return self._ends[epoch] if self._ends else epoch * self._number

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and which positions of it no learner is known to have trained with.

        Any learner can call it alone. What was consumed in the last second may be repeated after a resume.
        """
        epoch, rest = self.epoch, self._unmade
        if epoch in self._rest and epoch not in self._begun:  # loaded, not begun
            left = self._rest[epoch].between(0, self._rest[epoch].number)
            return {**self._identity, "epoch": epoch, "left": left}
        if self._sharding is not None and epoch - 1 in self._begun:
            first = EPOCH * (epoch - 1)
            rest = without([(first, first + self._size(epoch - 1))], self._sharding.consumed())
        left = [pair for ranges in rest for pair in self._real(ranges)]
        return {**self._identity, "epoch": epoch - bool(left), "left": left or None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called, with any number of learners; all load the same state.

        To go back in the same process, all make a new sampler, and load the state into it.
        """
        other = {key: state.get(key) for key in self._identity}
        if other != self._identity:
            raise StrategyMismatchError(
                f"{type(self).__name__}.load_state_dict: the state is of {other}, this sampler of "
                f"{self._identity}. Give the sampler the dataset and the arguments that it was saved with."
            )
        self.epoch = state["epoch"]
        self._samples_before = self._first(self.epoch)
        if state["left"] is not None:
            self._rest[self.epoch] = Steps(1, 1)
            self._rest[self.epoch].append([(start, stop) for start, stop in state["left"]])
            self._samples_before = self._first(self.epoch + 1) - count(state["left"])

    def _progress(self) -> Progress:
        samples = self._samples_before + (self._sharding.samples() if self._sharding else 0)
        return Progress(samples, samples / max(1, self._number))

    def _steps(self) -> Iterator[list[int]]:
        """Iterate over the indices of this learner's steps of the next epoch."""
        epoch = self.epoch
        self._require_usable(epoch)
        self._begun.add(epoch)
        self.epoch = epoch + 1
        waits = any(averaging.plan.in_step is not None for averaging in live())
        steps = self._equal(epoch) if waits else self._sharding_of_world().begin(epoch)
        for ranges in steps:
            yield [index for pair in ranges for index in self._indices(pair)]

    def _equal(self, epoch: int) -> Iterator[Ranges]:
        """Iterate over equally many steps on all learners, whose super learners wait for each other."""
        world, first = worlds.current(), EPOCH * epoch
        steps = Steps(world.size, self.batch_size, self.drop_last)
        steps.append([(first, first + self._size(epoch))])
        steps.ended, step = True, 0
        while ranges := steps.of_step(step, world.rank):
            self._unmade = steps.made(step, steps.number)
            yield ranges
            self._samples_before += count(steps.made(step, step + 1))
            step += 1
        self._unmade = []

    def _require_usable(self, epoch: int) -> None:
        doing = f"{type(self).__name__}, epoch {epoch}"
        if epoch in self._begun or epoch < min(self._begun, default=epoch):
            raise ConfigError(
                f"{doing}: the first one was {min(self._begun)}, and each is begun once. Call set_epoch with "
                "numbers that grow, or never. To go back, load the state into a new sampler on all learners."
            )
        if self._ends and epoch + 1 >= len(self._ends):
            raise ConfigError(
                f"{doing}: set_ends has named {len(self._ends) - 1} iterations. Name more."
            )
        if self._channel is not None and self._channel.pid != os.getpid():
            raise WorldError(
                f"{doing}: in a forked process. Use the process that called hvd.init()."
            )
        if worlds.is_initialized() and worlds.current().collectives.joining:
            raise WorldError(f"{doing}: this super learner has not joined. Call hvd.admit before.")
        for averaging in live() if self._each == 0 else ():
            if averaging.plan.in_step is not None:
                raise StrategyMismatchError(
                    f"{doing}: with averaging={averaging.spec.strategy.spec()} all super learners must make "
                    "the same number of steps. Use DynamicSampler, or a strategy without rounds."
                )

    def _sharding_of_world(self) -> Sharding:
        """Return the Sharding; the first time, and in another World, make it."""
        each, made = (self.batch_size, _made) if self._each is None else (self._each, lambda: None)
        of_sampler = self._size, each, self.drop_last, made
        if worlds.is_initialized():
            channel = channel_of(worlds.current())
            if self._sharding is None or self._channel is not channel:
                first = self._first(self.epoch - 1)  # of the epoch that begins
                self._samples_before = max(self._progress().samples, first)
                self._channel, self._sharding = (
                    channel,
                    channel.open({**self._identity, "samples": self._number}, *of_sampler),
                )
        elif self._sharding is None:
            self._sharding = Sharding(0, [[0]], 1, lambda: None, *of_sampler)
            self._sharding.talk(View([[0]], frozenset((0,))), [])
        return self._sharding

    def _size(self, epoch: int) -> int:
        if epoch in self._rest:
            return self._rest[epoch].number
        return self._first(epoch + 1) - self._first(epoch)

    def _real(self, pair: tuple[int, int]) -> Ranges:
        """Return the positions in the whole epoch of positions in what was left of it when it began here."""
        epoch, start = divmod(pair[0], EPOCH)
        stop = start + pair[1] - pair[0]
        return self._rest[epoch].between(start, stop) if epoch in self._rest else [(start, stop)]

    def _indices(self, pair: tuple[int, int]) -> list[int]:
        epoch, first = divmod(self._first(pair[0] // EPOCH), max(1, self._number))
        real = [(first + start, first + stop) for start, stop in self._real(pair)]
        if not self._shuffle:
            return [i for start, stop in real for i in range(start, stop)]
        order = self._order(epoch)
        return [i for start, stop in real for i in order[start:stop].tolist()]

    def _estimate(self) -> int:
        """Return how many steps an epoch has on a learner if all are equally fast."""
        world = worlds.current() if worlds.is_initialized() else None
        learners = 1 if world is None else world.super_size if self._each == 0 else world.size
        return math.ceil(self._number / learners / self.batch_size)


class DynamicSampler(_Dynamic, Sampler[int]):
    """A sampler for DataLoader(sampler=...) that gives faster learners more of each epoch.

        sampler = hvd.DynamicSampler(dataset, batch_size=32)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)

    Instead of DistributedSampler, which gives all learners equally many. Every index of an epoch goes to one
    learner. No step waits for another super learner, and all end the epoch within about a step of each other.
    What a super learner has not trained with when it fails, or not asked for when its loop ends early, goes
    to the others, if need be in the next epoch.
    The last step of a super learner of several learners is filled up by repeating an index.
    With a strategy whose super learners wait for each other, all learners get equally many.

    All learners make their samplers in the same order, with the same arguments. Indices are claimed when the
    loader asks for them: its workers' prefetching counts as claimed.

    Args:
        dataset: the dataset, or its length.
        batch_size: that of the loader: learners of a super learner get so many indices per step.
        shuffle: whether an epoch has a random order, which follows from `seed` and the epoch's number.
        seed: of the orders.
        drop_last: whether to leave out the last step of a super learner if it is short.
        samples: number of indices of an epoch, at most all; the first ones of its order.

    Raises:
        ConfigError: for a value out of its range, and on iterating over an epoch twice.
        StrategyMismatchError: on iterating, if samplers differ between learners.
        WorldError: on iterating before a joining super learner has called hvd.admit, or in a forked process.
        LearnerFailedError: on iterating, if a learner of this super learner has failed.
    """

    def __iter__(self) -> Iterator[int]:
        """Iterate over this learner's indices of the next epoch."""
        for indices in self._steps():
            yield from indices

    def __len__(self) -> int:
        """Estimate the number of indices: those of an epoch, divided equally."""
        return self._estimate() * self.batch_size


class DynamicBatchSampler(_Dynamic, Sampler[list[int]]):
    """The same for DataLoader(batch_sampler=...): each item is the list of a step's indices."""

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the indices of this learner's steps of the next epoch."""
        return self._steps()

    def __len__(self) -> int:
        """Estimate the number of steps: those of an epoch, divided equally."""
        return self._estimate()


class _DynamicShards(_Dynamic):
    """What dynamic_shards returns."""

    _each = 0

    def __init__(self, urls: Sequence[str], **order: Any) -> None:
        super().__init__(urls, **order)
        self._urls = urls

    def __iter__(self) -> Iterator[str]:
        """Iterate over the URLs of this super learner in the next epoch."""
        return (self._urls[index] for (index,) in self._steps())

    def __len__(self) -> int:
        """Estimate their number: those of an epoch, divided equally."""
        return self._estimate()


def dynamic_shards(urls: Sequence[str], shuffle: bool = True, seed: int = 0) -> _DynamicShards:
    """Return an iterable that gives faster super learners more of the URLs (files) in each epoch.

        shards = hvd.dynamic_shards(urls)
        for epoch in range(3):
            for url in shards:
                train(islice(wds.WebDataset(url), hvd.local_rank(), None, hvd.local_size()))

    For data that is read in shards: WebDataset, Lhotse, files of text. As DynamicSampler, with `set_epoch`,
    `state_dict` and `load_state_dict`; all end an epoch within about the time of a shard. The learners of a
    super learner get the same URLs: each trains with a part of the samples, all with equally many. A URL
    counts as consumed when the next one is asked for.

    Raises:
        ConfigError, StrategyMismatchError, WorldError, LearnerFailedError: as DynamicSampler.
    """
    return _DynamicShards(urls, shuffle=shuffle, seed=seed)


def progress(sampler: DynamicSampler | DynamicBatchSampler | None = None) -> Progress:
    """Return the samples, and the epochs with their fraction, that the whole job has trained with so far.

    For schedules: a slow learner's rate follows the job, not the number of its own steps.

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.95 ** hvd.progress().epochs)
        ...
        optimizer.step()
        schedule.step()  # in every step; the scheduler's own count does not matter

    Each index counts once per epoch. Nothing is waited for: what others did is up to a second and a few steps
    late. Learners of a super learner get the same number after the same step. After `load_state_dict` it
    continues.

    Args:
        sampler: of which; needed if the process has several.

    Raises:
        ConfigError: without `sampler`, unless the process has exactly one.
    """
    every = [each for made in samplers.samplers if (each := made()) is not None]
    if sampler is None and len(every) != 1:
        raise ConfigError(
            f"hvd.progress(): this process has {len(every)} samplers. Name the one of the "
            "training data: hvd.progress(sampler)."
        )
    return (every[0] if sampler is None else sampler)._progress()


def _made() -> int | None:
    """Return how many batches the optimizers have stepped with; None without an optimizer that averages."""
    counts = (
        averaging.super_learner.mates.sets
        * getattr(averaging.optimizer(), "backward_passes_per_step", 1)
        for averaging in live()
    )
    return max(counts, default=None)
