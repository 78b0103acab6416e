NOTHING_LOST: str
ONE_DECISION: str

class BrokenPromise(Exception):
    promise: str
    def __init__(self, promise: str, what: str) -> None: ...
