"""Encrypted K/V over TCP: who is refused, how it is told, and what its settings demand."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from kv_transfer.testing import GROUPS, NUM_PAGES, SECRET, fill, layout_of, make_pair
from kv_transfer.transport import ConnectionLost
from kv_transfer.transports.choose import receiving_transports
from kv_transfer.transports.tls import TlsContexts
from tandem.cache.pool import KVPool
from tandem.config.tree import TlsConfig, TransferConfig
from tandem.errors import ConfigError, PeerLost
from tandem.testing.certificates import Authority

HANG_GUARD_S = 30.0


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def guarded() -> None:
        async with asyncio.timeout(HANG_GUARD_S):
            await scenario

    asyncio.run(guarded())


def settings(tls: TlsConfig) -> TransferConfig:
    return TransferConfig(transport="tcp", tls=tls)


async def refusal(receiving: TlsConfig, sending: TlsConfig, endpoint: str = "tls") -> str:
    """Why a sender with these settings gets no stream, and check that decode refused it too."""
    pools = [KVPool(GROUPS["mha"], NUM_PAGES) for _ in range(2)]
    layout = layout_of(pools[0].groups)
    receiver = KVReceiver(pools[1], layout, settings(receiving), SECRET, "decode-1")
    sender = KVSender(pools[0], layout, settings(sending), SECRET, "prefill-1")
    await receiver.start()
    try:
        assert receiver.endpoints[0].startswith(f"{endpoint}://")
        reservation = receiver.reserve("a", 1, [1], 4)
        with pytest.raises(PeerLost) as caught:
            await sender.open(reservation.target, "a")
        await reservation.release()
        return caught.value.reason
    finally:
        await sender.close()
        await receiver.close()
        if endpoint == "tls" and sending.enabled:
            assert receiver.counters.refused_connections == 1


def test_another_authority_is_refused_by_both(authority: Authority, tmp_path: Path) -> None:
    ours, theirs = authority.config("w"), Authority(tmp_path).config("w")
    trusts_us = replace(theirs, ca_file=ours.ca_file)

    async def scenario() -> None:
        assert "certificate is refused" in await refusal(ours, theirs)
        assert "unknown ca" in await refusal(ours, trusts_us)

    run(scenario())


def test_a_sender_without_tls_finds_no_way(authority: Authority) -> None:
    async def scenario() -> None:
        assert "tls://" in await refusal(authority.config("w"), TlsConfig())
        assert "tcp://" in await refusal(TlsConfig(), authority.config("w"), "tcp")

    run(scenario())


def test_a_sender_without_a_certificate_is_refused(authority: Authority) -> None:
    tls = authority.config("w")

    async def scenario() -> None:
        async with make_pair("tls", tls=tls) as pair:
            host, _, port = pair.receiver.endpoints[0].removeprefix("tls://").rpartition(":")
            context = ssl.create_default_context(cafile=tls.ca_file)
            context.check_hostname = False

            def talk() -> None:
                with (
                    socket.create_connection((host, int(port)), timeout=HANG_GUARD_S) as plain,
                    context.wrap_socket(plain) as sock,
                ):
                    sock.sendall(b"x" * 100)
                    with pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"):
                        sock.recv(1)

            await asyncio.to_thread(talk)
            await pair.transfer(1, [5, 6], [7, 8])
            assert pair.same([5, 6], [7, 8])
            assert pair.receiver.counters.refused_connections == 1

    run(scenario())


def test_large_transfers_both_ways_of_a_busy_connection(authority: Authority) -> None:
    async def scenario() -> None:
        async with make_pair("tls", tls=authority.config("w"), credit_bytes=4096) as pair:
            for round_ in range(20):
                fill(pair.source, round_)
                ids = [1 + (round_ + i) % (NUM_PAGES - 1) for i in range(20)]
                await asyncio.gather(
                    pair.transfer(2 * round_ + 1, ids[:10], ids[10:]),
                    pair.transfer(2 * round_ + 2, ids[10:], ids[:10]),
                )
                assert pair.same(ids[:10], ids[10:])
                assert pair.same(ids[10:], ids[:10])

    run(scenario())


def test_ciphertext_only_travels(authority: Authority) -> None:
    contexts = TlsContexts(authority.config("w"))
    ours, theirs = socket.socketpair()
    prefill = contexts.wrap(ours, server=False)
    prefill.set_deadline(0.0)
    with pytest.raises(TimeoutError):  # nobody answers our first words
        prefill.send([b"keys and values"])
    assert b"keys and values" not in theirs.recv(1 << 16)
    prefill.shutdown()
    theirs.close()
    prefill.set_deadline(None)
    with pytest.raises(ConnectionLost):
        prefill.receive(1)
    prefill.close()


@pytest.mark.parametrize("field", ["cert_file", "key_file", "ca_file"])
def test_an_unusable_file_is_named(authority: Authority, tmp_path: Path, field: str) -> None:
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    for file in (garbage, tmp_path / "missing.pem"):
        tls = replace(authority.config("w"), **{field: str(file)})
        with pytest.raises(ConfigError, match=re.escape(file.name)) as caught:
            receiving_transports(settings(tls))
        assert caught.value.field.startswith("transfer.tls.")


def test_another_workers_key_is_refused(authority: Authority) -> None:
    tls = replace(authority.config("w"), key_file=authority.config("other").key_file)
    with pytest.raises(ConfigError, match=r"other\.key"):
        receiving_transports(settings(tls))
