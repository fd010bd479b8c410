"""A server that answers with what a test put into it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tandem.pb import generate_pb2, generate_pb2_grpc


class ScriptedServer(generate_pb2_grpc.TandemServicer):
    """Answers every Generate with the same text and remembers the requests."""

    def __init__(self) -> None:
        self.address = ""
        self.requests: list[generate_pb2.GenerateRequest] = []
        self.failure: tuple[grpc.StatusCode, str] | None = None
        self.endless = False
        self.cancelled = threading.Event()
        self.workers: list[generate_pb2.WorkerState] = []

    def Generate(  # noqa: N802
        self, request: generate_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generate_pb2.GenerateResponse]:
        self.requests.append(request)
        context.add_callback(self.cancelled.set)
        for index, (token_id, text) in enumerate([(7, "Sí"), (8, ""), (9, "... €")]):
            chunk = generate_pb2.Chunk(index=index, token_ids=[token_id], text=text)
            if request.sampling.logprobs:
                top = [generate_pb2.TokenLogprob(token_id=1, logprob=-0.5)]
                chunk.logprobs.add(logprob=-0.25, top=top[: request.sampling.top_logprobs])
            yield generate_pb2.GenerateResponse(request_id="r1", chunk=chunk)
        if self.endless:
            self.cancelled.wait(60)
        if self.failure:
            context.abort(*self.failure)
        yield generate_pb2.GenerateResponse(
            request_id="r1",
            finished=generate_pb2.Finished(
                finish_reason=generate_pb2.FINISH_REASON_LENGTH,
                usage=generate_pb2.Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=4),
                timings=generate_pb2.Timings(queue_ms=1, prefill_queue_ms=0.5, total_ms=12.25),
            ),
        )

    def Abort(  # noqa: N802
        self, request: generate_pb2.AbortRequest, context: grpc.ServicerContext
    ) -> generate_pb2.AbortResponse:
        return generate_pb2.AbortResponse(found=request.request_id == "r1")

    def GetModelInfo(  # noqa: N802
        self, request: generate_pb2.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> generate_pb2.GetModelInfoResponse:
        return generate_pb2.GetModelInfoResponse(model="scripted", vocab_size=10)

    def GetStatus(  # noqa: N802
        self, request: generate_pb2.GetStatusRequest, context: grpc.ServicerContext
    ) -> generate_pb2.GetStatusResponse:
        return generate_pb2.GetStatusResponse(
            version="1.2.3", mode="disaggregated", requests_running=2, workers=self.workers
        )


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    running = grpc.server(ThreadPoolExecutor(4))
    generate_pb2_grpc.add_TandemServicer_to_server(scripted, running)
    scripted.address = f"127.0.0.1:{running.add_insecure_port('127.0.0.1:0')}"
    running.start()
    yield scripted
    running.stop(0).wait()
