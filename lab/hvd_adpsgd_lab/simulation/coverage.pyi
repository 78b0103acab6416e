STATES: tuple[str, ...]
MESSAGES: tuple[str, ...]
