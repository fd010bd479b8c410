from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.errors import WorkerError
from tandem.pb import worker_pb2
from tandem.workers import ModelIdentity, WorkerIdentity, WorkerStatus, new_incarnation

IDENTITY = WorkerIdentity(
    role="decode",
    worker_id="decode-1",
    incarnation="a1b2",
    pid=77,
    address="127.0.0.1:4000",
    model=ModelIdentity(
        name="m",
        architecture="llama",
        weights_digest="d",
        dtype="float32",
        vocab_size=300,
        max_context_tokens=512,
    ),
    pages_total=63,
    page_tokens=16,
    layout_digest="e",
)


def test_identity_survives_the_wire() -> None:
    wire = worker_pb2.WorkerInfo.FromString(IDENTITY.to_wire().SerializeToString())
    assert WorkerIdentity.from_wire(wire) == IDENTITY


def test_status_survives_the_wire_and_names_its_worker() -> None:
    status = WorkerStatus(
        state="draining",
        pages_used=3,
        pages_cached=4,
        pages_swapped=6,
        preemptions=7,
        running=1,
        queued=2,
        transfers_pending=5,
        graph="graph 1,2",
    )
    wire = status.to_wire(IDENTITY)
    assert WorkerStatus.from_wire(wire) == status
    assert (wire.worker_id, wire.role, wire.pid) == ("decode-1", "decode", 77)
    assert (wire.incarnation, wire.address, wire.pages_total) == ("a1b2", "127.0.0.1:4000", 63)


@pytest.mark.parametrize(
    "field", ["worker_id", "incarnation", "address", "pages_total", "page_tokens", "role"]
)
def test_incomplete_identities_are_refused(field: str) -> None:
    wire = IDENTITY.to_wire()
    wire.ClearField(field)
    with pytest.raises(WorkerError, match=field):
        WorkerIdentity.from_wire(wire)


def test_unknown_roles_and_states_are_refused() -> None:
    wire = IDENTITY.to_wire()
    wire.role = "encode"
    with pytest.raises(WorkerError, match="unknown role 'encode'"):
        WorkerIdentity.from_wire(wire)
    state = WorkerStatus().to_wire(IDENTITY)
    state.state = "asleep"
    with pytest.raises(WorkerError, match="unknown state 'asleep'"):
        WorkerStatus.from_wire(state)


def test_identities_are_values() -> None:
    assert replace(IDENTITY, pid=77) == IDENTITY
    assert new_incarnation() != new_incarnation()
