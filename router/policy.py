"""Which prefill and which decode worker serve a request: pure functions on a view of the cluster.

The least loaded worker that fits wins; among equals, the one that was picked longest ago.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tandem.workers import WorkerIdentity


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What this router has placed on one worker and not seen the end of."""

    requests: int = 0
    tokens: int = 0
    """Prefill: prompt tokens that may still have to be computed."""
    pages: int = 0
    """Decode: pages that the requests take if all of them run to their last token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One worker that can take requests."""

    identity: WorkerIdentity
    load: Load = Load()
    picked: int = 0
    """Number of the placement that chose it last; 0 is never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """All workers that can take requests at one moment."""

    prefill: tuple[Candidate, ...] = ()
    decode: tuple[Candidate, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Pools:
    """Tokens that fit into the largest K/V pool of each role."""

    prefill_tokens: int
    decode_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What a request takes up."""

    prompt_tokens: int
    total_tokens: int
    """Prompt and output together, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The two workers that serve one request."""

    prefill: WorkerIdentity
    decode: WorkerIdentity


def pool_tokens(worker: WorkerIdentity) -> int:
    """Tokens whose K and V fit into the worker's pool."""
    return worker.pages_total * worker.page_tokens


def pages_for(tokens: int, worker: WorkerIdentity) -> int:
    """Pages that ``tokens`` tokens take in the worker's pool."""
    return -(-tokens // worker.page_tokens)


def same_process(prefill: WorkerIdentity, decode: WorkerIdentity) -> bool:
    """Whether one process plays both roles, as in colocated mode."""
    hosts = [worker.address.rpartition(":")[0] for worker in (prefill, decode)]
    return prefill.pid == decode.pid and hosts[0] == hosts[1]


def mismatch(prefill: WorkerIdentity, decode: WorkerIdentity) -> str:
    """The first thing the two must agree on and do not; empty when they can be paired."""
    for field, ours, theirs in (
        ("weights", prefill.model.weights_digest, decode.model.weights_digest),
        ("dtype", prefill.model.dtype, decode.model.dtype),
        ("K/V layout", prefill.layout_digest, decode.layout_digest),
    ):
        if ours != theirs:
            return (
                f"{field} of prefill worker {prefill.worker_id} ({ours}) and of decode worker "
                f"{decode.worker_id} ({theirs}) differ"
            )
    sizes = prefill.page_tokens, decode.page_tokens
    if max(sizes) % min(sizes):
        return (
            f"page_tokens of prefill worker {prefill.worker_id} ({sizes[0]}) and of decode worker "
            f"{decode.worker_id} ({sizes[1]}): neither is a multiple of the other"
        )
    return ""


def pairs(view: View, *, colocated: bool = False) -> list[tuple[Candidate, Candidate]]:
    """All (prefill, decode) pairs that may serve a request together."""
    return [
        (prefill, decode)
        for prefill in view.prefill
        for decode in view.decode
        if not mismatch(prefill.identity, decode.identity)
        and (not colocated or same_process(prefill.identity, decode.identity))
    ]


def pools(usable: Sequence[tuple[Candidate, Candidate]]) -> Pools | None:
    """The largest pools among ``usable`` pairs, or None without any."""
    if not usable:
        return None
    return Pools(
        prefill_tokens=max(pool_tokens(prefill.identity) for prefill, _ in usable),
        decode_tokens=max(pool_tokens(decode.identity) for _, decode in usable),
    )


def choose(usable: Sequence[tuple[Candidate, Candidate]], need: Need) -> Pair | None:
    """The least loaded of ``usable`` pairs with room for ``need``, or None if it fits nowhere.

    The decode worker is chosen first: it is the one a request stays on.
    """
    fitting = [
        (prefill, decode)
        for prefill, decode in usable
        if pool_tokens(prefill.identity) >= need.prompt_tokens
        and pool_tokens(decode.identity) >= need.total_tokens
    ]
    if not fitting:
        return None
    decode = _least((decode for _, decode in fitting), _decode_load)
    prefill = _least((prefill for prefill, other in fitting if other is decode), _prefill_load)
    return Pair(prefill=prefill.identity, decode=decode.identity)


def _least(
    candidates: Iterable[Candidate], load: Callable[[Candidate], tuple[float, ...]]
) -> Candidate:
    return min(candidates, key=lambda candidate: (*load(candidate), candidate.picked))


def _decode_load(candidate: Candidate) -> tuple[float, ...]:
    return (candidate.load.pages / candidate.identity.pages_total, candidate.load.requests)


def _prefill_load(candidate: Candidate) -> tuple[float, ...]:
    return (candidate.load.tokens, candidate.load.requests)
