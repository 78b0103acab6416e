"""Models are compared by digest; two descriptions travel only if they differ."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvd_adpsgd import PROTOCOL, __version__
from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.errors import LaunchError, ModelMismatchError, WorldError
from hvd_adpsgd.launch import bootstrap
from hvd_adpsgd.training import consistency
from hvd_adpsgd.training.consistency import described, require_same, require_same_inside, unanimous
from hvd_adpsgd.training.engines import _with_chunks_for
from tests.gathers import Gathers, together


class Meeting:
    """Learners of these ranks, one thread each."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks, self._gathers = ranks, Gathers(len(ranks))
        self.sent = dict.fromkeys(ranks, 0)  # bytes, by rank

    def world(self, rank: int) -> Any:
        gathered = self._gathers.of(self.ranks.index(rank))

        def gather(doing: str, value: Any) -> list[Any]:
            self.sent[rank] += len(pickle.dumps(value))
            return gathered(value)

        return SimpleNamespace(
            rank=rank, collectives=SimpleNamespace(ranks=self.ranks, gather=gather)
        )


def compared(meeting: Meeting, tensors: dict[int, list[str]]) -> list[str]:
    """What each learner raises, by place."""

    def learner(rank: int) -> str:
        try:
            require_same(meeting.world(rank), "wrap", tensors[rank])
        except ModelMismatchError as error:
            return str(error)
        return ""

    return together(learner, meeting.ranks)


MODEL = [f"layer{i}.weight float32[512, 512]" for i in range(1000)]


def test_equal_models_send_a_digest_each() -> None:
    meeting = Meeting((0, 1, 3, 4, 7))
    assert compared(meeting, dict.fromkeys(meeting.ranks, MODEL)) == [""] * 5
    assert max(meeting.sent.values()) < 100


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ([*MODEL[:7], "x float32[1]", *MODEL[8:]], "at tensor 7: learner 1 has layer7"),
        (MODEL[:-1], "learner 1 averages 1000 tensors, learner 4 999"),
        ([*MODEL, "x float32[1]"], "x float32[1] is only on learner 4"),
        ([], "learner 1 averages 1000 tensors, learner 4 0"),
    ],
)
def test_a_difference_is_named_alike_on_all(other: list[str], told: str) -> None:
    meeting = Meeting((1, 2, 4, 6))
    errors = compared(meeting, {1: MODEL, 2: MODEL, 4: other, 6: [*other, "y"]})
    assert len(set(errors)) == 1
    assert told in errors[0]
    # neither the first, nor the first that differs
    assert max(meeting.sent[2], meeting.sent[6]) < 100


def test_a_difference_inside_a_super_learner_names_ranks_of_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = ([("w", torch.zeros(n))] for n in (2, 3))
    told = [described(one), described(other)]
    monkeypatch.setattr(consistency, "allgather_object", lambda *_: told)
    world: Any = SimpleNamespace(inner=None, super_rank=1, groups=((0, 1), (2, 3)))
    with pytest.raises(ModelMismatchError, match="learner 2 has w .* learner 3 has w"):
        require_same_inside(world, "add_param_group", one)


def test_two_versions_refuse_each_other_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def init_beside(*others: str) -> None:
        gathered = lambda comm, mine: [mine, *others]  # noqa: E731
        monkeypatch.setattr(bootstrap, "allgather_object", gathered)
        bootstrap._require_one_build(None)

    mine = f"{__version__} (protocol {PROTOCOL})"
    init_beside(mine, mine)
    with pytest.raises(LaunchError) as raised:
        init_beside(mine, "0.9.9 (protocol 7)")
    assert f"learner 2 runs hvd_adpsgd 0.9.9 (protocol 7), learner 0 runs {mine}." in str(
        raised.value
    )


def test_chunks_above_the_default_size_are_bounded_by_the_model() -> None:
    small, large = (TensorSpec("w", (mib << 18,), "float32") for mib in (1, 256))
    assert _with_chunks_for(Config(chunk_kib=65536), [small]).chunk_kib == Config.chunk_kib
    assert _with_chunks_for(Config(chunk_kib=65536), [large]).chunk_kib == 32 * 1024
    assert _with_chunks_for(Config(chunk_kib=64), [large]).chunk_kib == 64


@pytest.mark.parametrize(
    ("error", "elsewhere"),
    [(TypeError("no tensor"), WorldError), (ModelMismatchError("no tensor"), ModelMismatchError)],
)
def test_an_error_of_any_class_on_one_learner_is_raised_on_all(
    error: Exception, elsewhere: type[Exception]
) -> None:
    """Otherwise the others would wait in the operation in which all say whether they failed."""
    meeting = Meeting((0, 1, 2))

    def fail() -> None:
        raise error

    with ThreadPoolExecutor(3) as threads:
        acts = [int, fail, int]
        done = [
            threads.submit(unanimous, meeting.world(rank), "wrap", act)
            for rank, act in enumerate(acts)
        ]
    raised = [each.exception() for each in done]
    assert [type(each) for each in raised] == [elsewhere, type(error), elsewhere]
    assert raised[1] is error
    for each in (raised[0], raised[2]):
        assert "learner 1" in str(each) and "no tensor" in str(each)
