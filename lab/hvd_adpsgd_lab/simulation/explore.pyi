from collections.abc import Callable, Sequence

class Explorer:
    states: int
    transitions: int
    compared: int
    @property
    def deepest(self) -> int: ...
    def __init__(
        self,
        scripts: Sequence[str],
        schedules: Sequence[Sequence[int]],
        chunks: int = 2,
        lanes: int = 1,
        weight: float = 0.5,
        completion: int = 0,
        shared: bool = False,
        crashes: int = 0,
        suspicions: int = 0,
        retries: int = 0,
        deadlines: int = 0,
        ends: bool = False,
    ) -> None: ...
    def explore(
        self, progress: Callable[[Explorer], None] | None = None, every: int = 20000
    ) -> None: ...
    def covering(self) -> dict[tuple[str, str], int]: ...
    def describe(self) -> str: ...
