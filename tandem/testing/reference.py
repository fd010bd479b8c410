"""What a request's output must be: one prompt in one pass, one row a step, nothing of a cluster."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.cache.pool import KVPool
from tandem.models.model import Model, PrefillSequence, StepInputs
from tandem.requests import (
    GenerateRequest,
    OutputChunk,
    RequestId,
    Room,
    SamplingParams,
    StopParams,
)
from tandem.sampling.output import OutputStream
from tandem.sampling.sampler import SequenceSampler, sample
from tandem.tokenizer import Tokenizer
from tandem.wireforms import request_from_wire, request_to_wire

GREEDY = SamplingParams(temperature=0.0)
_rooms = itertools.count(1)


def random_prompt(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Bytes that depend on length and seed."""
    draw = random.Random(seed * 10_007 + num_tokens)
    return tuple(draw.randrange(256) for _ in range(num_tokens))


def new_request(
    token_ids: Sequence[int],
    max_tokens: int = 8,
    sampling: SamplingParams = GREEDY,
    **stopping: Any,
) -> GenerateRequest:
    """A request with its own id and room, as workers receive it; ignores EOS unless told."""
    room = next(_rooms)
    stop = {"max_tokens": max_tokens, "ignore_eos": True, **stopping}
    request = GenerateRequest(
        request_id=RequestId(f"r{room}"),
        room=Room(room),
        token_ids=tuple(token_ids),
        sampling=sampling,
        stop=StopParams(**stop),
    )
    return request_from_wire(request_to_wire(request))


def straight_line(
    model: Model, tokenizer: Tokenizer, request: GenerateRequest, page_tokens: int = 16
) -> list[OutputChunk]:
    """Generate one request with a cache of its own."""
    num_pages = -(-request.max_total_tokens // page_tokens)
    pool = KVPool(model.spec.cache_groups(page_tokens, "float32"), num_pages + 1)
    eos, size = tokenizer.eos_token_ids, tokenizer.vocab_size
    sampler = SequenceSampler(request.sampling, request.stop, request.token_ids, eos, size)
    output = OutputStream(
        request.stop,
        eos,
        tokenizer.stream(),
        model.spec.max_context_tokens,
        len(request.token_ids),
    )
    whole = PrefillSequence(
        token_ids=request.token_ids,
        start=0,
        page_ids=range(1, num_pages + 1),
        needs_logits=True,
    )
    with torch.inference_mode():
        logits = model.prefill([whole], pool, lambda _layer: None)
        chunks: list[OutputChunk] = []
        for position in itertools.count(len(request.token_ids)):
            (token,) = sample(logits, [sampler])
            sampler.observe(token.token_id)
            chunks.append(output.push(token))
            if output.finished:
                break
            logits = model.decode(_one_row(token.token_id, position, num_pages, page_tokens), pool)
    return chunks


def _one_row(token_id: int, position: int, num_pages: int, page_tokens: int) -> StepInputs:
    def tensor(value: int, dtype: torch.dtype) -> Tensor:
        return torch.tensor([value], dtype=dtype)

    return StepInputs(
        token_ids=tensor(token_id, torch.int64),
        positions=tensor(position, torch.int64),
        slots=tensor(position + page_tokens, torch.int64),  # pages 1, 2, ... in order
        block_table=torch.arange(1, num_pages + 1, dtype=torch.int32)[None],
        lengths=tensor(position + 1, torch.int32),
    )
