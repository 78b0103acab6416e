from typing import Any

from hvd_adpsgd.engine.wire import AnyWire

class MpiWire(AnyWire):
    CHANNELS: int
    def __init__(self, comm: Any, address: int, number: int = 0) -> None: ...
