"""Config: what is read, what is refused, and what the refusal says."""

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

from hvd_adpsgd.config import PREFIX, Config, environment_name
from hvd_adpsgd.errors import ConfigError
from tests.options import another

DEFAULTS = dataclasses.asdict(Config())  # docs/options.md has them, and test_docs.py compares

ALLOWED = [
    ("super_learner_size", " 4 ", 4), ("super_learner_size", "none", None),
    ("averaging", "random_ring:seed=3", "random_ring:seed=3"), ("exchanges_per_step", "1e-3", 0.001),
    ("exchange_share", "Auto", "auto"), ("wire_dtype", "BFloat16", "bfloat16"),
    ("wire_dtype", "Float32", None), ("nics", "eth0,ib0", "eth0,ib0"), ("chunk_kib", "65536", 65536),
    ("deadline_s", "0.05", 0.05), ("report_s", "0", 0.0), ("record", "/tmp/Run", "/tmp/Run"),
    ("log_level", "DEBUG", "debug"),
]  # fmt: skip

REFUSED = {
    "super_learner_size": "0 two 2.0",
    "exchanges_per_step": "0 -1 64.1 nan inf none",
    "exchange_share": "0 some",
    "max_overhead": "0 auto",
    "max_staleness": "0 1" + 20 * "0",
    "wire_dtype": "float64",
    "same_host": "sockets",
    "nonfinite": "ignore",
    "chunk_kib": "63 65537 1e3",
    "deadline_s": "0.04 3601",
    "leave_deadline_s": "0",
    "log_level": "loud",
}
UNFIT: dict[str, tuple[object, ...]] = {
    "super_learner_size": (True, 2.0, 0, "2"),
    "averaging": ("", None, 3),
    "exchanges_per_step": ("1", False, float("nan"), 10**400),
    "exchange_share": ("0.5",),
    "max_overhead": (2.0,),
    "chunk_kib": (None,),
    "timeline": (b"/tmp/x", ""),
    "log_level": (object(),),
}
PRIVATE = {"moments_period", "same_host", "chunk_kib"}


def test_an_environment_without_our_names():
    assert Config.from_environment({"HOME": "/", "HVD_RANK": "x"}) == Config()


@pytest.mark.parametrize("text", ["", "  "])
def test_empty_variable_is_the_default(text):
    environ = {environment_name(name): text for name in DEFAULTS}
    assert Config.from_environment(environ) == Config()


@pytest.mark.parametrize(("name", "text", "value"), ALLOWED)
def test_environment_sets(name, text, value):
    config = Config.from_environment({environment_name(name): text})
    got = getattr(config, name)
    assert got == value
    assert type(got) is type(value)
    assert config == Config(**{name: value})
    assert Config().replace(**{name: value}) == config


@pytest.mark.parametrize(
    ("name", "text"), [(n, t) for n, all_ in REFUSED.items() for t in all_.split()]
)
def test_environment_refuses(name, text):
    with pytest.raises(ConfigError) as caught:
        Config.from_environment({environment_name(name): text})
    message = str(caught.value)
    option = Config.__dataclass_fields__[name].metadata["option"]
    for part in (environment_name(name), text.strip(), option.range, "Set it"):
        assert part in message


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, all_ in UNFIT.items() for v in all_])
def test_constructor_and_replace_refuse(name, value):
    with pytest.raises(ConfigError, match=name):
        Config(**{name: value})
    with pytest.raises(ConfigError, match=name):
        Config().replace(**{name: value})


def test_constructor_stores_plain_values():
    config = Config(
        chunk_kib=np.int64(128), deadline_s=np.float32(2), timeline=pathlib.Path("/tmp/t.json")
    )
    assert (config.chunk_kib, config.deadline_s, config.timeline) == (128, 2.0, "/tmp/t.json")
    assert [type(v) for v in (config.chunk_kib, config.deadline_s)] == [int, float]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("HVD_ADPSGD_EXCHANGES_PR_STEP", "HVD_ADPSGD_EXCHANGES_PER_STEP"),
        ("HVD_ADPSGD_DEADLINE", "HVD_ADPSGD_DEADLINE_S"),
        ("HVD_ADPSGD_STALENESS", "HVD_ADPSGD_MAX_STALENESS"),
        ("HVD_ADPSGD_averaging", "HVD_ADPSGD_AVERAGING"),
    ],
)
def test_unknown_variable_names_the_nearest(wrong, right):
    """First, and not behind the names of all options."""
    with pytest.raises(
        ConfigError, match=rf"{wrong} in environment \(did you mean {right}\?\)\. Rename"
    ) as error:
        Config.from_environment({wrong: "1"})
    assert str(error.value).count("HVD_ADPSGD_") == 2


def test_table_has_a_row_per_option():
    """But for those of tests and studies."""
    rows = Config.table()
    assert [row.name for row in rows] == [name for name in DEFAULTS if name not in PRIVATE]
    assert all(environment_name(name) == "ADPSGD_" + name.upper() for name in PRIVATE)
    for row in rows:
        assert row.env == PREFIX + row.name.upper()
        assert row.range
        assert row.meaning


@pytest.mark.parametrize("name", DEFAULTS)
def test_all_options_but_a_few_are_compared_between_learners(name):
    """An error names the option, both values, and the learner; a new option is compared."""
    pytest.importorskip("torch")
    from hvd_adpsgd.launch import bootstrap

    mine, other = Config(), Config(**{name: another(name)})
    answers = [{"config": config, "problem": None} for config in (mine, mine, other)]
    if name in ("join", "join_secret_file", "log_level"):
        assert bootstrap._agreed_config(answers) == mine
        return
    with pytest.raises(ConfigError) as caught:
        bootstrap._agreed_config(answers)
    told = (f"{name} differs", environment_name(name), f"{another(name)!r} on learner 2")
    assert all(words in str(caught.value) for words in (*told, f"{DEFAULTS[name]!r} on learner 0"))


def test_an_interval_is_off_or_long_enough() -> None:
    assert Config(report_s=0).report_s == 0
    assert Config(report_s=0.01).report_s == 0.01
    for value in (1e-300, 0.009, -1):
        with pytest.raises(ConfigError, match=r"0\.01 to 3600, or 0"):
            Config(report_s=value)


@pytest.mark.parametrize(
    ("options", "period"),
    [
        ({}, 4),
        ({"moments_period": 16, "exchange_share": 0.5}, 8),
        ({"exchange_share": 0.25}, 1),
        ({"exchange_share": "auto"}, 1),
        ({"exchanges_per_step": 0.5}, 2),
        ({"exchanges_per_step": 4}, 4),
        ({"exchanges_per_step": 0.01}, 1),
    ],
)
def test_moments_are_exchanged_as_often_as_parameters_or_once_in_a_period(
    options: dict[str, Any], period: int
) -> None:
    assert Config(**options).period_of_moments == period
