"""The whole configuration as one frozen tree.

Each field's docstring is its documentation and its schema description.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tandem.config.ranges import Bytes, Count, CountOrAuto, Limit, Port, Range, Seconds

Mode = Literal["disaggregated", "colocated"]
WeightsDtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu"]
GraphMode = Literal["auto", "on", "off"]
TransportName = Literal["auto", "shm", "tcp"]
RayAuthMode = Literal["token", "disabled"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which model is served, and in what precision."""

    name: str = "smollm2"
    """A known model's name, a folder with config.json and safetensors, or a .gguf file."""
    served_name: str = ""
    """The name that requests use; empty takes the last part of `name`."""
    dtype: WeightsDtype = "auto"
    """Precision of weights, K and V; auto is float32 on the CPU."""
    max_context_tokens: CountOrAuto = 0
    """Prompt and output together; 0 takes the model's own limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """Pages of K and V."""

    page_tokens: Count = 16
    """Tokens in one page.

    `prefill.page_tokens` and `decode.page_tokens` may differ, if one is a multiple of the other.
    """
    prefix_reuse: bool = True
    """Keep finished requests' pages and reuse them for prompts with the same beginning.

    Prefill then computes and decode receives only what is missing on its side.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """The public server and admission."""

    host: str = "127.0.0.1"
    """Address the gRPC server binds; loopback unless set."""
    port: Port = 50051
    """Port of the gRPC server; 0 takes a free one."""
    registry_port: Port = 0
    """Port at which workers join; 0 takes a free one."""
    max_running_requests: Count = 256
    """Requests being served at once; more wait in the queue."""
    max_queued_requests: Count = 1024
    """Requests waiting at most; more are refused with a retry delay."""
    worker_wait_s: Seconds = 10.0
    """How long a request waits for a live worker before it ends UNAVAILABLE."""
    heartbeat_interval_s: Seconds = 1.0
    """How often each worker reports."""
    heartbeat_timeout_s: Seconds = 5.0
    """A worker that is silent for this long gets no more requests and its running ones end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitsConfig:
    """Upper bounds checked before any work is done."""

    default_max_tokens: Count = 256
    """Output tokens when the request does not say."""
    max_text_bytes: Bytes = 1_048_576
    """Bytes of prompt text or chat messages."""
    max_message_bytes: Annotated[int, Range(minimum=1, maximum=2_147_483_647)] = 16_777_216
    """Bytes of one gRPC message, on every hop."""
    max_stop_strings: Limit = 16
    """Stop strings in one request."""
    max_stop_bytes: Bytes = 1024
    """Bytes of one stop string."""
    max_stop_token_ids: Limit = 256
    """Stop token ids in one request."""
    max_logit_bias: Limit = 1024
    """Entries of logit_bias in one request."""
    max_top_logprobs: Limit = 20
    """top_logprobs of one request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillConfig:
    """Prefill workers."""

    replicas: Count = 1
    """Number of prefill workers."""
    page_tokens: CountOrAuto = 0
    """Tokens in one page of prefill workers; 0 takes `cache.page_tokens`."""
    num_pages: CountOrAuto = 0
    """Pages of K and V per worker.

    0 takes what `model.max_context_tokens` needs twice over, within memory.
    """
    threads: CountOrAuto = 0
    """Compute threads per worker; 0 shares the machine's cores among its workers."""
    chunk_tokens: Count = 256
    """Tokens computed in one forward pass over all prompts in it; a multiple of the page."""
    max_batch_requests: Count = 8
    """Prompts in one forward pass at most."""
    max_queued_requests: Count = 256
    """Prompts waiting in one worker; more are refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """Decode workers."""

    replicas: Count = 1
    """Number of decode workers."""
    page_tokens: CountOrAuto = 0
    """Tokens in one page of decode workers; 0 takes `cache.page_tokens`."""
    num_pages: CountOrAuto = 0
    """Pages of K and V per worker.

    0 takes what `model.max_context_tokens` needs twice over, within memory.
    """
    threads: CountOrAuto = 0
    """Compute threads per worker; 0 shares the machine's cores among its workers."""
    graph: GraphMode = "auto"
    """Replay captured steps.

    on fails without a compiler, auto falls back to eager with a warning, off is eager.
    """
    buckets: tuple[Count, ...] = (1, 2, 4, 8)
    """Batch sizes that are captured, ascending; larger batches are split."""
    max_running_requests: Count = 64
    """Requests being decoded at once in one worker."""
    max_queued_requests: Count = 256
    """Requests waiting for pages in one worker; more are refused."""
    max_unread_chunks: Count = 64
    """Chunks a slow reader may leave unread before its request pauses."""
    growth_pages: Limit = 4
    """Pages that a request is admitted with for its output; it takes more as it grows."""
    swap_bytes: CountOrAuto = 0
    """Host memory for the K and V of preempted requests, per worker; 0 takes twice the pool.

    Requests preempt one another only if this is more than the pool; else the later ones wait.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsConfig:
    """Encryption of K and V over TCP; off unless all three files are named.

    Both ends must then show a certificate that `ca_file` signed. Names in certificates are not
    looked at, so let that authority sign for this deployment's workers only.
    """

    cert_file: str = ""
    """This worker's certificate, PEM."""
    key_file: str = ""
    """Its private key, PEM, not encrypted."""
    ca_file: str = ""
    """Certificates of the authorities that may sign workers' certificates, PEM."""

    @property
    def enabled(self) -> bool:
        """Whether K and V over TCP are encrypted."""
        return bool(self.cert_file and self.key_file and self.ca_file)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferConfig:
    """How K and V pages travel from prefill to decode."""

    transport: TransportName = "auto"
    """shm copies through shared memory on one host, tcp works everywhere, auto picks per pair."""
    host: str = "127.0.0.1"
    """Address that decode workers bind for K and V; loopback unless set."""
    tls: TlsConfig = field(default_factory=TlsConfig)
    """Encryption of K and V over TCP."""
    connect_timeout_s: Seconds = 5.0
    """Connecting and agreeing on the layout."""
    idle_timeout_s: Seconds = 30.0
    """A connection with a transfer under way and no sign of life for this long is given up."""
    lease_s: Seconds = 120.0
    """A reservation whose transfer has not completed by then is released."""
    credit_bytes: Bytes = 16_777_216
    """Bytes under way per connection at most."""
    checksum: bool = True
    """Verify each frame's bytes with xxh3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayConfig:
    """The Ray cluster that places and restarts the actors."""

    address: str = ""
    """Address of a running cluster; empty starts a local one."""
    auth_mode: RayAuthMode = "token"
    """Ray's own authentication; token draws one for a local cluster if RAY_AUTH_TOKEN is unset."""
    object_store_bytes: Annotated[int, Range(minimum=78_643_200)] = 100_000_000
    """Object store of a local cluster; Tandem puts nothing in it, and this is near Ray's least."""
    start_timeout_s: Seconds = 600.0
    """How long workers may take to load and become ready."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersConfig:
    """What all worker processes share."""

    host: str = "127.0.0.1"
    """Address that workers' gRPC servers bind; loopback unless set."""
    device: Device = "auto"
    """Where models run."""
    drain_timeout_s: Seconds = 30.0
    """How long a stopping worker lets running requests finish."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """Logging."""

    level: LogLevel = "info"
    """Least severe level that is written to stderr."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TandemConfig:
    """Root of the tree."""

    mode: Mode = "disaggregated"
    """How the two phases are placed.

    disaggregated runs prefill and decode apart; colocated runs both in each worker, for comparison.
    """
    model: ModelConfig = field(default_factory=ModelConfig)
    """Which model is served."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    """Pages of K and V."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """The public server and admission."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    """Upper bounds on requests."""
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    """Prefill workers."""
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    """Decode workers."""
    transfer: TransferConfig = field(default_factory=TransferConfig)
    """How K and V travel."""
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    """What all worker processes share."""
    ray: RayConfig = field(default_factory=RayConfig)
    """The Ray cluster."""
    log: LogConfig = field(default_factory=LogConfig)
    """Logging."""

    @property
    def prefill_page_tokens(self) -> int:
        """Tokens in one page of prefill workers."""
        return self.prefill.page_tokens or self.cache.page_tokens

    @property
    def decode_page_tokens(self) -> int:
        """Tokens in one page of decode workers."""
        return self.decode.page_tokens or self.cache.page_tokens
