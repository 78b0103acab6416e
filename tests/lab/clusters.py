"""Planned clusters with other attributes, or other options of training."""

import dataclasses
from typing import Any

from hvd_adpsgd_lab.simulation.planner import Cluster

from hvd_adpsgd.config import Config

_OPTIONS = {field.name for field in dataclasses.fields(Config)}


def changed(cluster: Cluster, **changes: Any) -> Cluster:
    """Return the cluster with attributes changed, and options of its `config`."""
    options = {name: value for name, value in changes.items() if name in _OPTIONS}
    others = {name: value for name, value in changes.items() if name not in _OPTIONS}
    return dataclasses.replace(cluster, config=cluster.config.replace(**options), **others)
