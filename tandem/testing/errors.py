"""One example of every error, for tests that all of them must pass."""

from __future__ import annotations

from tandem import errors
from tandem.errors import ServingError

EXAMPLES: tuple[ServingError, ...] = (
    errors.ServingError("something"),
    errors.ConfigError("decode.buckets", "must ascend"),
    errors.RequestError("top_p", "must be in (0, 1], is 2"),
    errors.RequestTooLong("token_ids", "2000 tokens need 125 pages of 64"),
    errors.RequestEnded("r1", "over"),
    errors.RequestCancelled("r1", "the caller went away"),
    errors.DeadlineExceeded("r1", "its deadline passed"),
    errors.Overloaded("256 prompts are waiting", 1.5),
    errors.TransferError("r1", "failed"),
    errors.PeerLost("r1", "connection reset"),
    errors.TransferTimeout("r1", "silent for 30 s"),
    errors.TransferAborted("r1", "cancelled"),
    errors.TransferCorrupt("r1", "checksum of layer 3"),
    errors.LayoutMismatch("page_tokens", "16", "128"),
    errors.WorkerError("decode-0", "the step failed"),
    errors.WorkerLost("decode-0", "no heartbeat for 5 s"),
    errors.WeightsError("model.safetensors", "truncated"),
    errors.MissingTensor("model.safetensors", "lm_head.weight"),
    errors.ShapeMismatch("model.safetensors", "lm_head.weight is [2, 3], not [3, 2]"),
    errors.TokenizerError("tokenizer.json", "unknown pre-tokenizer"),
)
