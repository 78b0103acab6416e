"""Lightning trains by AdpsgdStrategy: the script of docs/lightning.md, and what its hooks see."""

import csv
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from tests.launcher import ROOT, Result, run_learners
from tests.uneven import time_over_ideal

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="no Lightning"),
]

PROGRAMS = Path(__file__).with_name("programs")
PAGE = ROOT / "docs" / "lightning.md"
SIZE = "HVD_ADPSGD_SUPER_LEARNER_SIZE"
# of the page's script, whose epochs come before the two that are watched
ROWS, BATCH, PASSES, EPOCHS = 1040, 20, 3, 2

Facts = dict[str, Any]


def run(tmp_path: Path, np: int, k: int, launcher: str) -> list[Facts]:
    (script,) = re.findall(r"(?ms)^```python\n(.*?)^```", PAGE.read_text())
    file = tmp_path / "script.py"
    file.write_text(script)
    args = [str(tmp_path), str(file)]
    return launched(np, "lightning_run.py", args, k, launcher).checked().by_rank()


def launched(np: int, program: str, args: list[str], k: int, launcher: str) -> Result:
    how: dict[str, Any] = {"launcher": launcher, "imports": ("lightning.pytorch",)}
    return run_learners(np, PROGRAMS / program, args=args, env={SIZE: str(k)}, **how)


def check(learners: list[Facts], k: int) -> None:
    n = len(learners)
    batches = ROWS // n // BATCH
    steps = -(-batches // PASSES)  # the last one of an epoch with the batches that are left
    assert batches % PASSES, "no epoch ends with fewer batches than a step has"
    for rank, facts in enumerate(learners):
        first = rank // k * k
        # learners
        assert (facts["size"], facts["zero"], facts["group"]) == (n, rank == 0, False), facts
        assert (facts["any"], facts["all"]) == (True, False), facts
        # the page's run, and how it resumes
        assert facts["page"] and facts["resumed"] and facts["momentum"], facts
        assert facts["first"] == [EPOCHS, EPOCHS * steps], facts
        # steps: where super learner 1 waits for the end of an epoch in super learner 0, this makes more
        rows = facts["shards"]
        assert sum(rows) == 2 * ROWS == 2 * facts["data"], facts
        more = {facts["steps"] > 2 * steps, rows[first] > rows[2 - first]}
        assert more == {k < n and not first}, facts
        assert 0 <= facts["gradient"] < 1e-5 and 0 <= facts["own"] < 1e-5, facts
        assert 0 < facts["clipped"] < 1.001e-2, facts
        assert facts["same_inside"], facts
        assert (facts["apart"] > 0) == (k < n), facts
        # the mean
        assert 0 <= facts["mean"] < 1e-6 and facts["at_validation"] < 1e-6, facts
        assert facts["at_epoch_end"] < 1e-6, facts
        assert facts["back"] and facts["after_fit"], facts
        # data and numbers
        assert (facts["gathered"], facts["gathered_held_out"]) == (k, n), facts
        assert facts["learner_step"] == pytest.approx(first + (k - 1) / 2), facts
        assert facts["learner_held_out"] == pytest.approx(n * (n - 1) / (2 * n - 1)), facts
        assert facts["metric"] == pytest.approx((n - 1) / 2), facts
        assert facts["learner_epoch"] == learners[0]["learner_epoch"] <= (n - 1) / 2, facts
        assert facts["logs"] == [f"lightning_logs/version_{i}" for i in (0, 1)], facts


def test_the_page_trains_and_resumes(tmp_path: Path) -> None:
    check(run(tmp_path, 4, 2, "mpirun"), 2)


@pytest.mark.extended
@pytest.mark.parametrize("launcher", ["horovodrun", "gloo", "torchrun", "srun"])
def test_under_every_launcher(tmp_path: Path, launcher: str) -> None:
    check(run(tmp_path, 4, 2, launcher), 2)


@pytest.mark.extended
def test_as_plain_horovod(tmp_path: Path) -> None:
    check(run(tmp_path, 4, 4, "mpirun"), 4)


class Claimed(Sampler[int]):
    """Of a learner that gets three batches up to the job's first meeting, and none up to the second."""

    epoch, batch_size = 0, 1
    parts: ClassVar[Any] = [[4, 1, 0], []]

    def __iter__(self) -> Iterator[int]:
        return iter(self.parts[self.epoch])

    def __len__(self) -> int:
        return 4

    def set_ends(self, *ends: Any) -> None:
        assert ends == ([4, 8], 0)


def test_a_loader_gives_the_numbers_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of two batches, validation after each; the last batch is made of a first row."""
    from hvd_adpsgd.integrations import lightning

    monkeypatch.setattr(lightning.hvd, "size", lambda: 2)
    monkeypatch.setattr(lightning.hvd, "progress", lambda _: SimpleNamespace(samples=7))
    new, cleared = SimpleNamespace, []
    total, current, fetcher = new(completed=9), new(ready=9), new(fetched=5)
    optimization = new(optim_progress=new(optimizer=new(step=new(total=total))))
    loop = new(batch_progress=new(current=current), automatic_optimization=optimization)
    trainer = new(
        accumulate_grad_batches=2, current_epoch=0, global_step=10, max_epochs=1, max_steps=-1, callbacks=[],
        val_check_interval=2, val_check_batch=2, check_val_every_n_epoch=1,
        fit_loop=new(epoch_loop=loop, _data_fetcher=fetcher),
        optimizers=[new(zero_grad=lambda: cleared.append(1))],
    )  # fmt: skip
    data = Claimed()
    loader = lightning._Divided(range(8), sampler=data)  # type: ignore[arg-type]
    vars(loader).update(trainer=trainer, data=data, samples=8, row=0)
    seen = [
        (batch.tolist(), current.ready, total.completed, loader.is_last, trainer.val_check_batch == 1,
         fetcher.length - fetcher.fetched, len(cleared))
        for batch in loader
    ]  # fmt: skip
    assert seen == [
        ([4], 0, 10, False, False, 2, 0),
        ([1], 1, 9, False, False, 2, 0),  # makes a step whose number is not the meeting's
        (
            [0],
            1,
            10,
            True,
            True,
            2,
            1,
        ),  # of two batches it has one, before which gradients are cleared
        ([0], 3, 11, True, True, 1, 2),
    ]


def test_speeds_divide_no_data_of_several_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    from hvd_adpsgd.integrations import lightning

    monkeypatch.setattr(lightning.hvd, "size", lambda: 2)
    module = SimpleNamespace(training_step=lambda batch: None)
    module.trainer = SimpleNamespace(
        training=True, current_epoch=3, limit_train_batches=4, callbacks=[], max_steps=-1, overfit_batches=0,
        val_check_interval=1.0, check_val_every_n_epoch=1, lightning_module=module, max_epochs=5,
    )  # fmt: skip
    strategy = lightning.AdpsgdStrategy.__new__(lightning.AdpsgdStrategy)
    strategy._lightning_module, strategy._divided_at, strategy._row = module, -1, 0
    sampler = DistributedSampler(range(31), 2, 0)  # type: ignore[arg-type]
    first, second = (DataLoader(range(31), batch_size=3, sampler=sampler) for _ in range(2))  # type: ignore[arg-type]
    for loader in (first, second):
        assert strategy.process_dataloader(loader) is loader
        assert (type(first) is DataLoader) == (loader is second)
    assert first.batch_sampler.sampler is second.batch_sampler.sampler is sampler  # type: ignore[union-attr]


def case(tmp_path: Path, name: str, np: int = 4, k: int = 2, launcher: str = "mpirun") -> Result:
    return launched(np, "lightning_cases.py", [name, str(tmp_path)], k, launcher)


def saved(tmp_path: Path) -> set[str]:
    return {path.name for path in tmp_path.glob("*.ckpt")}


ALL_SAVED = {"epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("what", "launcher", "finishing"),
    [
        ("killed", "mpirun", [2, 3]),
        ("killed", "gloo", [2, 3]),
        ("raises", "mpirun", [0, 1]),
        ("preempted", "mpirun", [0, 1]),
    ],
)
def test_the_others_finish(tmp_path: Path, what: str, launcher: str, finishing: list[int]) -> None:
    """They save every epoch's checkpoint and log every epoch, also if learner 0 was killed."""
    result = case(tmp_path, what, launcher=launcher)
    done = [facts for facts in result.said if "epochs" in facts]
    assert sorted(facts["rank"] for facts in done) == finishing, result.report()
    for facts in done:
        assert facts["epochs"] == 4 and facts["zero"] == (facts["rank"] == finishing[0]), facts
        assert (facts["same"], facts["loss"]) == (done[0]["same"], done[0]["loss"])
    assert saved(tmp_path) == ALL_SAVED, result.report()
    assert (result.returncode == 0) == (what == "preempted"), result.report()
    logged = set()
    for path in tmp_path.rglob("metrics.csv"):
        with path.open() as file:
            logged |= {row["epoch"] for row in csv.DictReader(file) if row["val_loss"]}
    assert logged == {"0", "1", "2", "3"}, result.report()


@pytest.mark.extended
@pytest.mark.parametrize("k", [1, 2, 4])
def test_manual_optimization_with_two_optimizers(tmp_path: Path, k: int) -> None:
    learners = case(tmp_path, "manual", k=k).checked().by_rank()
    for facts in learners:
        assert facts["same_inside"] and facts["same"] == learners[0]["same"], facts
        assert facts["rates"] == pytest.approx([0.05 * 0.99 ** facts["steps"]] * 2), facts
    assert saved(tmp_path) == ALL_SAVED


@pytest.mark.extended
@pytest.mark.alone
@pytest.mark.parametrize(
    ("name", "validated", "best"),
    [
        ("slow", [0, 200, 400], "epoch=1-step=400.ckpt"),
        ("by_steps", [0, 100, 200, 300], "epoch=1-step=300.ckpt"),
    ],
)
def test_a_slow_learner_gets_less(
    name: str, validated: list[int], best: str, tmp_path: Path
) -> None:
    """It takes the time of the summed speeds; with equal numbers of steps it would be 2.5 times."""
    learners = case(tmp_path, name, k=1).checked().by_rank()
    assert time_over_ideal(learners) < 1.1
    steps = validated[-1]
    for epoch in range(-(-steps // 200)):
        made = min(200, steps - 200 * epoch)  # limit_train_batches is of each learner
        rows = [row for facts in learners for row in facts["rows"][epoch]]
        assert len(rows) == len(set(rows)) == 4 * made * 5
        assert all(facts["bars"][epoch] == [200, made] for facts in learners)
    for facts in learners:  # validation, files, schedules and bars follow the job's steps
        assert facts["validated"] == validated and facts["best"].endswith(best), facts
        assert facts["scheduled"][-1] == steps, facts["scheduled"]


@pytest.mark.extended
def test_early_stopping_and_a_sharded_module(tmp_path: Path) -> None:
    learners = case(tmp_path, "stopped").checked().by_rank()
    for facts in learners:
        assert facts["epochs"] == 3, facts
        assert "fully_shard" in facts["refused"] and "without Trainer" in facts["refused"], facts
    assert sum(facts["steps"] for facts in learners) == 4 * 3 * 8
    assert saved(tmp_path) == ALL_SAVED - {"epoch=3.ckpt"}


@pytest.mark.extended
def test_a_callback_that_averages_validates_and_saves_the_mean(tmp_path: Path) -> None:
    learners = case(tmp_path, "ema").checked().by_rank()
    for facts in learners:
        assert facts["seen"] == learners[0]["seen"], "each has validated an average of its own"
        assert len(facts["saved"]) == 4 and set(facts["saved"]) <= set(facts["seen"]), facts
        assert facts["same"] == learners[0]["same"], facts
    assert len({facts["own"] for facts in learners}) == 2, "one per super learner"


@pytest.mark.extended
def test_uneven_numbers_of_batches(tmp_path: Path) -> None:
    """Learner i has 4 + 2 i batches: super learners differ, and learners of each, which call hvd.join()."""
    learners = case(tmp_path, "uneven").checked().by_rank()
    for rank, facts in enumerate(learners):
        assert facts["steps"] == 4 * (4 + 2 * rank) and facts["same"] == learners[0]["same"], facts
    assert saved(tmp_path) == ALL_SAVED


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "end", "first", "rest"),
    [
        ("resumed", 0, [0, 8, 16], [16, 23, 30]),  # then epochs of 160 / 5 / 5 batches, rounded up
        # in mid-epoch: 80 of its 160 rows are left, of which a step takes 50 instead of 40
        ("resumed_by_steps", 20, [0, *range(2, 21, 2)], [7, 11, 15, 19]),
    ],
)
def test_another_number_of_super_learners_resumes(
    name: str, end: int, first: list[int], rest: list[int], tmp_path: Path
) -> None:
    before = case(tmp_path, name).checked().by_rank()
    after = case(tmp_path, name, np=5, k=1, launcher="torchrun").checked().by_rank()
    for learners, validated in ((before, first), (after, rest)):
        assert all(facts["validated"] == validated for facts in learners), learners
        assert all(facts["counted"] == max(validated[-1], end) for facts in learners)
    assert all(
        set(facts["asked"]) <= set(first) for facts in before
    )  # to save, after its steps alone
    assert all(facts["begins"] and facts["size"] == 5 for facts in after)
    assert name != "resumed" or after[0]["loss"] < before[0]["loss"]


@pytest.mark.extended
def test_strategies_with_passes_that_change(tmp_path: Path) -> None:
    """Also one that refuses step(closure), and one that joins all learners."""
    said = case(tmp_path, "strategies").checked().said
    assert len(said) == 4 * 4
    assert all(facts["same_inside"] and facts["counted"] == 8 + 3 for facts in said), said
