"""How the two ends of a new connection prove to each other that they belong to the job.

Both ends know the engines' secret, 32 random bytes that all engines received in the gather at their start.
The side that dials sends first:

    dials                                   accepts
    Hello: magic, version, ranks of both,
        incarnations, nonce         ->
                                    <-      nonce, proof over the Hello and this nonce
    proof over the same             ->
                                    <-      WELCOME

If the Hello is of another version, or for another engine, the called side sends `Refused` in place of its
proof, and the caller stops dialing. A refusal needs no proof: a live engine would listen at its own port.

A proof is an HMAC-SHA256 over a word for its side too, so that neither side's proof can serve as the other's.
Fresh nonces make a recorded proof worthless. Each message has a fixed length; nothing is read beyond it.
"""

import hmac
import secrets
import struct
from dataclasses import dataclass
from typing import Self

from hvd_adpsgd import PROTOCOL, __version__

SECRET_NBYTES = 32
WELCOME = b"+"

_MAGIC = b"hvd_adpsgd"
RELEASE = f"{__version__} (protocol {PROTOCOL})"  # must be equal on all learners of a job
_FORM = struct.Struct("!10sHIIQQ32s")
_NONCE_NBYTES = 32

HELLO_NBYTES = _FORM.size
PROOF_NBYTES = 32
REPLY_NBYTES = _NONCE_NBYTES + PROOF_NBYTES


class NotAMember(Exception):
    """The other end of a connection sent what no member of the job sends."""


class Refused(NotAMember):
    """A Hello of another protocol version, or for another engine; the caller receives the reason."""

    def pack(self) -> bytes:
        """The refusal with its reason as REPLY_NBYTES bytes, which are sent in place of a reply."""
        return (_MAGIC + str(self).encode())[:REPLY_NBYTES].ljust(REPLY_NBYTES, b"\0")


@dataclass(frozen=True)
class Hello:
    """The first message of a handshake: which engine calls which.

    Attributes:
        caller, called: ranks of the two engines.
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
        """Make a Hello with a fresh random nonce."""
        nonce = secrets.token_bytes(_NONCE_NBYTES)
        return cls(caller, called, caller_incarnation, called_incarnation, nonce)

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Parse a Hello from HELLO_NBYTES bytes.

        Raises:
            NotAMember: if the bytes are no Hello.
            Refused: if the Hello is of another version of the protocol.
        """
        if len(data) != HELLO_NBYTES:
            raise NotAMember(f"a first message of {len(data)} bytes, not {HELLO_NBYTES}")
        magic, version, *fields = _FORM.unpack(data)
        if magic != _MAGIC:
            raise NotAMember("a first message of another protocol")
        if version != PROTOCOL:
            raise Refused(f"this end has version {PROTOCOL} of the protocol, not {version}")
        return cls(*fields)

    def pack(self) -> bytes:
        """Return the Hello as HELLO_NBYTES bytes."""
        incarnations = self.caller_incarnation, self.called_incarnation
        return _FORM.pack(_MAGIC, PROTOCOL, self.caller, self.called, *incarnations, self.nonce)

    def reply(self, secret: bytes) -> bytes:
        """The reply to this Hello, REPLY_NBYTES bytes: a fresh nonce and the proof of the called side."""
        nonce = secrets.token_bytes(_NONCE_NBYTES)
        return nonce + self._proof(secret, b"accepts", nonce)

    def answer(self, secret: bytes, reply: bytes) -> bytes:
        """Check the called side's reply, and return the proof of the calling side, PROOF_NBYTES bytes.

        Raises:
            NotAMember: if the reply does not prove that the called side knows the secret, or refuses.
        """
        if reply.startswith(_MAGIC):  # a refusal: a random nonce does not begin with _MAGIC
            reason = reply[len(_MAGIC) :].rstrip(b"\0").decode("ascii", "replace")
            raise NotAMember(f"the called side refuses: {reason!r}")
        nonce, proof = reply[:_NONCE_NBYTES], reply[_NONCE_NBYTES:]
        if not hmac.compare_digest(proof, self._proof(secret, b"accepts", nonce)):
            raise NotAMember("the called side does not know the job's secret")
        return self._proof(secret, b"dials", nonce)

    def check(self, secret: bytes, reply: bytes, proof: bytes) -> None:
        """Check the proof of the calling side.

        Raises:
            NotAMember: if the proof does not show that the calling side knows the secret.
        """
        nonce = reply[:_NONCE_NBYTES]
        if not hmac.compare_digest(proof, self._proof(secret, b"dials", nonce)):
            raise NotAMember("the calling side does not know the job's secret")

    def _proof(self, secret: bytes, side: bytes, nonce: bytes) -> bytes:
        return hmac.digest(secret, side + self.pack() + nonce, "sha256")
