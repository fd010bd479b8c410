"""The first four frames of a connection: both ends prove the secret, then compare layouts.

prefill -> HELLO      nonce, incarnation
decode  -> CHALLENGE  nonce, incarnation, proof over both
prefill -> PROOF      proof over both and its layout
decode  -> WELCOME    its layout, the credit         (or REFUSE, naming a field)
"""

from __future__ import annotations

import hmac
import secrets
import sys
from dataclasses import dataclass
from typing import TypeVar

from kv_transfer.layout import KVLayout
from kv_transfer.messages import (
    Challenge,
    Hello,
    Message,
    Proof,
    Refuse,
    Welcome,
    decode,
    encode,
    pack_object,
)
from kv_transfer.transport import Connection, OutFrame
from kv_transfer.wire import MAX_HANDSHAKE_BODY_BYTES, FrameType, Header, WireError
from tandem.errors import LayoutMismatch

_NONCE_BYTES = 32
_MAX_QUOTED = 500
M = TypeVar("M", bound=Message)


class NotAuthentic(Exception):
    """The peer does not hold our secret, or is not the one we looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Who we are on every connection."""

    layout: KVLayout
    secret: bytes
    incarnation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """Who the other end is, after a handshake."""

    incarnation: str
    layout: KVLayout
    credit_bytes: int


def greet(connection: Connection, ours: Identity, wanted: str) -> Peer:
    """Prefill's side.

    Args:
        connection: fresh, with a deadline.
        ours: who we are.
        wanted: incarnation of the decode worker we look for.

    Raises:
        NotAuthentic: the peer is not that worker or does not hold the secret.
        LayoutMismatch: the peer keeps its caches differently.
        WireError: the peer does not speak this protocol.
        ConnectionLost: the peer closed; it does so when our proof is wrong.
        TimeoutError: the peer is silent.
    """
    hello = Hello(nonce=secrets.token_bytes(_NONCE_BYTES), incarnation=ours.incarnation)
    _send(connection, FrameType.HELLO, hello)
    challenge = _receive_one(connection, FrameType.CHALLENGE, Challenge)
    expected = _prove(ours.secret, "decode", hello, challenge, b"")
    if not hmac.compare_digest(expected, challenge.proof):
        raise NotAuthentic("the decode worker does not hold the same secret")
    if challenge.incarnation != wanted:
        raise NotAuthentic(f"decode worker {wanted} is gone; {challenge.incarnation} has its place")
    layout = ours.layout.to_wire()
    proof = _prove(ours.secret, "prefill", hello, challenge, layout)
    _send(connection, FrameType.PROOF, Proof(proof=proof, layout=layout, byte_order=sys.byteorder))
    frame = connection.read(MAX_HANDSHAKE_BODY_BYTES)
    if frame.header.type is FrameType.REFUSE:
        refusal = decode(Refuse, frame.body)
        raise LayoutMismatch(refusal.field, refusal.prefill, refusal.decode)
    if frame.header.type is not FrameType.WELCOME:
        raise WireError(f"{frame.header.type.name} instead of WELCOME")
    welcome = decode(Welcome, frame.body)
    theirs = KVLayout.from_wire(welcome.layout)
    ours.layout.check_compatible(theirs)
    return Peer(incarnation=challenge.incarnation, layout=theirs, credit_bytes=welcome.credit_bytes)


def answer(connection: Connection, ours: Identity, credit_bytes: int) -> Peer:
    """Decode's side.

    Raises:
        NotAuthentic: the peer does not hold the secret.
        LayoutMismatch: the peer keeps its caches differently; it has been told.
        WireError: the peer does not speak this protocol.
        ConnectionLost: the peer closed.
        TimeoutError: the peer is silent.
    """
    hello = _receive_one(connection, FrameType.HELLO, Hello)
    if len(hello.nonce) != _NONCE_BYTES:
        raise WireError("HELLO: wrong nonce")
    unproved = Challenge(
        nonce=secrets.token_bytes(_NONCE_BYTES), incarnation=ours.incarnation, proof=b""
    )
    challenge = Challenge(
        nonce=unproved.nonce,
        incarnation=unproved.incarnation,
        proof=_prove(ours.secret, "decode", hello, unproved, b""),
    )
    _send(connection, FrameType.CHALLENGE, challenge)
    proof = _receive_one(connection, FrameType.PROOF, Proof)
    expected = _prove(ours.secret, "prefill", hello, challenge, proof.layout)
    if not hmac.compare_digest(expected, proof.proof):
        raise NotAuthentic(
            f"prefill worker {hello.incarnation!r:.80} does not hold the same secret"
        )
    theirs = KVLayout.from_wire(proof.layout)
    try:
        _check_byte_order(proof.byte_order)
        ours.layout.check_compatible(theirs)
    except LayoutMismatch as error:
        ours_, theirs_ = error.ours[:_MAX_QUOTED], error.theirs[:_MAX_QUOTED]
        refusal = Refuse(field=error.field[:_MAX_QUOTED], decode=ours_, prefill=theirs_)
        _send(connection, FrameType.REFUSE, refusal)
        raise
    welcome = Welcome(layout=ours.layout.to_wire(), credit_bytes=credit_bytes)
    _send(connection, FrameType.WELCOME, welcome)
    return Peer(incarnation=hello.incarnation, layout=theirs, credit_bytes=credit_bytes)


def _check_byte_order(theirs: str) -> None:
    if theirs != sys.byteorder:
        raise LayoutMismatch("byte_order", sys.byteorder, theirs)


def _prove(secret: bytes, role: str, hello: Hello, challenge: Challenge, layout: bytes) -> bytes:
    """HMAC over both ends' words and the role, so that no proof fits elsewhere."""
    transcript = pack_object(
        [
            "tandem kv 1",
            role,
            hello.nonce,
            hello.incarnation,
            challenge.nonce,
            challenge.incarnation,
            layout,
        ]
    )
    return hmac.digest(secret, transcript, "sha256")


def _send(connection: Connection, kind: FrameType, message: Message) -> None:
    connection.write([OutFrame(header=Header(type=kind), body=encode(message))])


def _receive_one(connection: Connection, kind: FrameType, message: type[M]) -> M:
    frame = connection.read(MAX_HANDSHAKE_BODY_BYTES)
    if frame.header.type is not kind:
        raise WireError(f"{frame.header.type.name} instead of {kind.name}")
    return decode(message, frame.body)
