STATE_NAMES: tuple[str, ...]
KINDS: tuple[str, ...]
