"""The proof that both ends of a connection give each other."""

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.engine.handshake import (
    HELLO_NBYTES,
    PROOF_NBYTES,
    REPLY_NBYTES,
    SECRET_NBYTES,
    Hello,
    NotAMember,
)

SECRET = bytes(range(SECRET_NBYTES))
OTHER = bytes(SECRET_NBYTES)


def test_both_sides_accept_a_member() -> None:
    hello = Hello.new(3, 5, 2**64 - 1, 17)
    received = Hello.parse(hello.pack())
    reply = received.reply(SECRET)
    proof = hello.answer(SECRET, reply)
    received.check(SECRET, reply, proof)
    assert received == hello
    assert (len(hello.pack()), len(reply), len(proof)) == (HELLO_NBYTES, REPLY_NBYTES, PROOF_NBYTES)


def test_a_called_side_without_the_secret_is_refused() -> None:
    hello = Hello.new(3, 5, 1, 2)
    with pytest.raises(NotAMember, match="called side"):
        hello.answer(SECRET, hello.reply(OTHER))


def test_a_calling_side_without_the_secret_is_refused() -> None:
    hello = Hello.new(3, 5, 1, 2)
    reply = hello.reply(SECRET)
    forged = hello._proof(OTHER, b"dials", reply[:32])
    with pytest.raises(NotAMember, match="calling side"):
        hello.check(SECRET, reply, forged)


def test_a_proof_does_not_serve_the_other_side() -> None:
    """A stranger who sends a member's own proof back to it."""
    hello = Hello.new(3, 5, 1, 2)
    reply = hello.reply(SECRET)
    with pytest.raises(NotAMember):
        hello.check(SECRET, reply, reply[32:])


def test_a_recorded_proof_is_worthless() -> None:
    hello = Hello.new(3, 5, 1, 2)
    recorded = hello.answer(SECRET, hello.reply(SECRET))
    with pytest.raises(NotAMember):
        hello.check(SECRET, hello.reply(SECRET), recorded)  # another nonce


@pytest.mark.parametrize("field", ["caller", "called", "caller_incarnation", "called_incarnation"])
def test_a_proof_is_for_one_call_only(field: str) -> None:
    """What was said about who calls whom cannot be changed on the way."""
    hello = Hello.new(3, 5, 1, 2)
    changed = dataclasses.replace(hello, **{field: 9})
    reply = changed.reply(SECRET)
    with pytest.raises(NotAMember):
        hello.answer(SECRET, reply)


@given(st.binary(max_size=2 * HELLO_NBYTES))
def test_bytes_of_strangers_are_no_hello(data: bytes) -> None:
    with pytest.raises(NotAMember):
        Hello.parse(data)


@given(st.integers(0, 8 * HELLO_NBYTES - 1), st.integers(0, 8 * REPLY_NBYTES - 1))
def test_one_wrong_bit_anywhere_is_refused(in_hello: int, in_reply: int) -> None:
    hello = Hello.new(3, 5, 1, 2)
    with pytest.raises(NotAMember):
        heard = Hello.parse(_flipped(hello.pack(), in_hello))
        hello.answer(SECRET, heard.reply(SECRET))
    reply = hello.reply(SECRET)
    with pytest.raises(NotAMember):
        proof = hello.answer(SECRET, _flipped(reply, in_reply))
        hello.check(SECRET, reply, proof)


def _flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


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


@pytest.mark.parametrize("count", [10_000, pytest.param(1_000_000, marks=pytest.mark.extended)])
def test_no_mutated_message_is_accepted(count: int) -> None:
    """Each of the three messages in turn; nothing but NotAMember is raised."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    hello = Hello.new(3, 5, 1, 2)
    reply = hello.reply(SECRET)
    proof = hello.answer(SECRET, reply)
    sent = hello.pack()
    for i in range(count):
        with pytest.raises(NotAMember):
            if i % 3 == 0:  # the proof is one of what was sent, not of what has arrived
                Hello.parse(mutated(sent, draw)).check(SECRET, reply, proof)
            elif i % 3 == 1:
                hello.answer(SECRET, mutated(reply, draw))
            else:
                hello.check(SECRET, reply, mutated(proof, draw))
