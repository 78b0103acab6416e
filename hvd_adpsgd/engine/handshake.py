"""How the two ends of a new connection prove to each other that they belong to the job.

Both know the engines' secret, 32 random bytes that were handed out when they met. The side that dials
speaks first:

    dials                                   accepts
    Hello: magic, version, who calls whom,
        incarnations, nonce         ->
                                    <-      nonce, proof over all that was said so far
    proof over all of that          ->
                                    <-      WELCOME

If the Hello is of another version, or for another engine, the called side sends `Refused` in place of its
proof, and the caller stops dialing. A refusal needs no proof: a live engine would listen at its own port.

A proof is an HMAC-SHA256 with a word for the side that gives it, so that neither proof serves as the other.
Fresh nonces make a recorded one worthless. Each message has a fixed length; nothing is read beyond it.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass
from typing import Self

from hvd_adpsgd import PROTOCOL, __version__

__all__ = [
    "HELLO_NBYTES",
    "PROOF_NBYTES",
    "RELEASE",
    "REPLY_NBYTES",
    "SECRET_NBYTES",
    "WELCOME",
    "Hello",
    "NotAMember",
    "Refused",
]

SECRET_NBYTES = 32
WELCOME = b"+"

_MAGIC = b"hvd_adpsgd"
RELEASE = f"{__version__} (protocol {PROTOCOL})"  # of which all learners of a job must be
_FORM = struct.Struct("!10sHIIQQ32s")
_NONCE_NBYTES = 32

HELLO_NBYTES = _FORM.size
PROOF_NBYTES = 32
REPLY_NBYTES = _NONCE_NBYTES + PROOF_NBYTES


class NotAMember(Exception):
    """What the other end sent is not what a member of the job sends."""


class Refused(NotAMember):
    """The Hello is of a member, but not meant for the engine that is called, which answers so."""

    def pack(self) -> bytes:
        """In place of a reply: REPLY_NBYTES bytes, with the reason."""
        return (_MAGIC + str(self).encode())[:REPLY_NBYTES].ljust(REPLY_NBYTES, b"\0")


@dataclass(frozen=True)
class Hello:
    """The first message: who calls whom.

    Attributes:
        caller, called: ranks of the engines.
        caller_incarnation, called_incarnation: random numbers of 64 bits, one per start of an engine.
        nonce: 32 random bytes.
    """

    caller: int
    called: int
    caller_incarnation: int
    called_incarnation: int
    nonce: bytes

    @classmethod
    def new(
        cls, caller: int, called: int, caller_incarnation: int, called_incarnation: int
    ) -> Self:
        """With a fresh nonce."""
        nonce = secrets.token_bytes(_NONCE_NBYTES)
        return cls(caller, called, caller_incarnation, called_incarnation, nonce)

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """The message in HELLO_NBYTES bytes.

        Raises:
            NotAMember: if there is none. Refused: if it is of another version.
        """
        if len(data) != HELLO_NBYTES:
            raise NotAMember(f"{len(data)} bytes, not {HELLO_NBYTES}")
        magic, version, *fields = _FORM.unpack(data)
        if magic != _MAGIC:
            raise NotAMember("another protocol")
        if version != PROTOCOL:
            raise Refused(f"it has version {PROTOCOL} of the protocol, not {version}")
        return cls(*fields)

    def pack(self) -> bytes:
        """The message, HELLO_NBYTES bytes."""
        return _FORM.pack(
            _MAGIC,
            PROTOCOL,
            self.caller,
            self.called,
            self.caller_incarnation,
            self.called_incarnation,
            self.nonce,
        )

    def reply(self, secret: bytes) -> bytes:
        """The answer to this message, REPLY_NBYTES bytes: a fresh nonce and the proof of the called side."""
        nonce = secrets.token_bytes(_NONCE_NBYTES)
        return nonce + self._proof(secret, b"accepts", nonce)

    def answer(self, secret: bytes, reply: bytes) -> bytes:
        """The proof of the side that calls, PROOF_NBYTES bytes.

        Raises:
            NotAMember: if the reply does not prove that the called side knows the secret, or refuses.
        """
        if reply.startswith(_MAGIC):  # no nonce does
            reason = reply[len(_MAGIC) :].rstrip(b"\0").decode("ascii", "replace")
            raise NotAMember(f"the called side refuses: {reason!r}")
        nonce, proof = reply[:_NONCE_NBYTES], reply[_NONCE_NBYTES:]
        if not hmac.compare_digest(proof, self._proof(secret, b"accepts", nonce)):
            raise NotAMember("the called side has not the job's secret")
        return self._proof(secret, b"dials", nonce)

    def check(self, secret: bytes, reply: bytes, proof: bytes) -> None:
        """Check the proof of the side that calls.

        Raises:
            NotAMember: if it does not prove that it knows the secret.
        """
        nonce = reply[:_NONCE_NBYTES]
        if not hmac.compare_digest(proof, self._proof(secret, b"dials", nonce)):
            raise NotAMember("the calling side has not the job's secret")

    def _proof(self, secret: bytes, side: bytes, nonce: bytes) -> bytes:
        return hmac.digest(secret, side + self.pack() + nonce, "sha256")
