FAULTS: tuple[str, ...]
