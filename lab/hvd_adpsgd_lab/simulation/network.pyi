from collections.abc import Sequence

from hvd_adpsgd.engine.wire import AnyClock, AnyWire

class Network:
    def __init__(
        self,
        n: int,
        seed: int,
        latency_s: float,
        jitter: float,
        bytes_per_s: float,
        bytes_scale: float = 1.0,
        eager: float = 0.5,
        late: float = 0.0,
        late_write: float = 0.5,
        trace: bool = False,
        room: int = 0,
        late_control: float = 0.0,
        streams: bool = False,
    ) -> None: ...
    def slow_paths(self, slowness: Sequence[Sequence[float]]) -> None: ...
    def messages(self) -> list[tuple[float, float, int, int, int, int, int, int]]: ...

class SimulatedWire(AnyWire):
    def __init__(self, network: Network, at: int) -> None: ...

class SimulatedClock(AnyClock):
    def __init__(self, network: Network) -> None: ...
