from hvd_adpsgd.engine.wire import AnyClock, AnyWire

class TcpWire(AnyWire):
    DIALED: int
    ACCEPTED: int
    REFUSED: int
    def __init__(
        self,
        clock: AnyClock,
        rank: int,
        size: int,
        news: int,
        dials: int,
        most: int,
        idle_s: float,
        failure_s: float,
    ) -> None: ...
    @property
    def unsent(self) -> bool: ...
    @property
    def connections(self) -> tuple[int, int, int, int]: ...
    def progress(self) -> None: ...
    def close(self) -> None: ...
    def forget(self) -> None: ...
