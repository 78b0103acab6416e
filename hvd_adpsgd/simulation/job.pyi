from collections.abc import Callable, Sequence
from typing import Any

from hvd_adpsgd.engine.loop import Loop
from hvd_adpsgd.simulation.network import Network

class Job:
    met: dict[str, int]
    happened: int
    leave_deadline_s: float
    story: list[tuple[float, int, str]] | None
    timeline: list[tuple[int, int | str, float, float, dict[str, Any]]] | None
    def __init__(
        self,
        network: Network,
        seed: int,
        slack: float = 8.0,
        tables: Sequence[Any] | None = None,
        period: int = 1,
        means: str | None = None,
        after: bool = False,
        warm_up: int = 0,
        detect_s: float = 0.5,
        still: bool = False,
        look_s: float = 1e-3,
        checks: bool = True,
        trace: bool = False,
        chunk_s: float = 0.0,
        max_staleness: int = 0,
        reports_s: float = 0.0,
        exchange_share: float = 1.0,
    ) -> None: ...
    def add(
        self,
        schedule: Any,
        weight: float,
        rate: float,
        offered_only: bool,
        model: Any,
        later: int,
        dtype: int,
        wire_type: int,
        lane_nbytes: int,
        steps: int,
        step_s: float,
        spread: float,
        node_s: float,
        deadline_s: float,
        leave_deadline_s: float,
    ) -> None: ...
    def share(self, hosts: Sequence[int], lane_nbytes: int, shown: bool = False) -> None: ...
    def expect(self, plan: Callable[[Sequence[int], int], Sequence[Any]]) -> None: ...
    def strike(self, at: float, kind: str, who: int, *arguments: Any) -> None: ...
    def run(self, seconds: float, limit: int = 2000000) -> None: ...
    def run_for(self, seconds: float) -> None: ...
    def covering(self) -> dict[tuple[str, str], int]: ...
    def describe(self) -> str: ...
    def summary(self) -> dict[str, Any]: ...
    def exchanges_of(self) -> list[int]: ...
    def staleness(self) -> list[int]: ...
    def traffic(self) -> list[tuple[int, int, int]]: ...
    def model(self, i: int) -> Any: ...
    def loop_of(self, i: int) -> Loop: ...
    @property
    def network(self) -> Network: ...
