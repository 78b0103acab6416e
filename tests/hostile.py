"""Messages of a stranger."""

import random


def mutated(data: bytes, draw: random.Random) -> bytes:
    """With bits flipped, bytes dropped or added, or parts exchanged; not the same."""
    changed = bytearray(data)
    while changed == data:
        kind, at = draw.randrange(4), draw.randrange(len(data))
        if kind == 0:
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[at : at + draw.randint(1, 8)]
        elif kind == 2:
            changed[at:at] = draw.randbytes(draw.randint(1, 8))
        else:
            changed = changed[at:] + changed[:at]
    return bytes(changed)
