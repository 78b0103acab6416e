"""Who is told that a script is synchronous, and of which line; without learners."""

import logging
from typing import Any

import pytest

from hvd_adpsgd.collectives import usage
from hvd_adpsgd.collectives.usage import LIMIT, WINDOW, counted, end_step, totals


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "tally", usage._Tally())


def train(steps: int, operations: int, warns: bool = True) -> None:
    """A first step, then windows with operations in their first steps."""
    end_step(warns)
    for step in range(steps):
        if step % WINDOW < operations:
            with counted("allreduce"):
                pass
        end_step(warns)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_the_script_is_in_an_operation_while_that_runs_or_it_waits_for_it() -> None:
    with counted("allreduce") as caller:
        with counted("barrier"):
            assert usage.is_waiting()
        assert usage.is_waiting()
    assert not usage.is_waiting()
    with usage.on_behalf(caller):
        assert not usage.is_waiting(), "another thread runs it, the script goes on"
    with usage.waiting(caller):
        assert usage.is_waiting()
    assert not usage.is_waiting()


def test_one_warning_names_the_line_that_calls_most(caplog: pytest.LogCaptureFixture) -> None:
    with counted("broadcast_parameters"):
        pass
    train(3 * WINDOW, LIMIT + 1)
    (message,) = warnings(caplog)
    line = train.__code__.co_firstlineno + 5
    assert f"allreduce at {__file__}:{line} " in message
    assert f"{LIMIT + 1} operations over all learners in {WINDOW} steps" in message
    assert f" is {LIMIT + 1} of them" in message
    assert "process_set=hvd.super_learner" in message


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        (["lightning.pytorch.loops"], False),
        (["transformers.trainer", "accelerate.utils"], False),
        (["accelerate.utils"], True),
        (["lightning.pytorch.loops", "my_module"], True),
        (["my_module", "lightning.pytorch.loops"], False),
    ],
)
def test_only_lines_of_the_script_are_named(
    modules: list[str], named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """`modules`: each calls the next one, the last one calls this library."""

    names: dict[str, Any] = {"__name__": "hvd_adpsgd.integrations", "counted": counted}
    exec("def call():\n    with counted('allreduce'):\n        pass\n", names)
    call = names["call"]
    for module in reversed(modules):
        names = {"__name__": module, "inner": call}
        exec("def call():\n    inner()\n", names)
        call = names["call"]
    for _ in range(WINDOW + 1):
        call()
        end_step(True)
    assert bool(warnings(caplog)) == named


def test_several_lines_that_call_are_summed(caplog: pytest.LogCaptureFixture) -> None:
    for step in range(WINDOW + 1):
        if step <= LIMIT:
            with counted("allreduce"):
                pass
        if step == 1:
            with counted("barrier"):
                pass
        end_step(True)
    (message,) = warnings(caplog)
    assert f"{LIMIT + 1} operations over all learners" in message
    assert f" is {LIMIT} of them" in message


@pytest.mark.parametrize(("waited_s", "named"), [(11.0, True), (9.0, False)])
def test_long_means_are_told_of_and_what_does_not_wait(
    waited_s: float, named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    end_step(True)
    for operation in ("averaged", *["barrier"] * 3):
        with counted(operation):
            pass
    caller = next(one for one in usage.tally.callers if one.operation == "averaged")
    usage.tally.callers[caller] = 1, waited_s
    for _ in range(WINDOW):
        end_step(True)
    assert bool(warnings(caplog)) == named
    assert not named or "averaged at" in warnings(caplog)[0]
    assert not named or "1 of them, 11.0 s. Call" in warnings(caplog)[0]


def test_few_operations_are_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    train(3 * WINDOW, LIMIT)
    train(WINDOW - 2, WINDOW)
    assert not warnings(caplog)


def test_the_others_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    train(WINDOW, WINDOW, warns=False)
    assert not warnings(caplog)


def test_an_operation_of_several_counts_once_and_its_failure_too() -> None:
    with counted("average_model"), counted("allgather_object"):
        pass
    with pytest.raises(ArithmeticError), counted("allreduce"):
        raise ArithmeticError
    with counted("allreduce"):
        pass
    assert totals()["global_operations"] == 3
