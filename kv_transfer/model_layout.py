"""The K/V layout of a model, the same on both sides of a transfer."""

from __future__ import annotations

from kv_transfer.layout import KVLayout
from tandem.cache.groups import CacheDtype
from tandem.weights.store import ModelFolder


def model_layout(folder: ModelFolder, page_tokens: int, dtype: CacheDtype) -> KVLayout:
    """How a worker that has loaded ``folder`` keeps K and V.

    Args:
        folder: the model.
        page_tokens: tokens in one page.
        dtype: of keys and values.
    """
    rope = folder.spec.rope
    return KVLayout(
        model=folder.spec.architecture,
        weights_digest=folder.weights_digest,
        groups=folder.spec.cache_groups(page_tokens, dtype),
        rope=f"layout={rope.layout} theta={rope.theta!r} scaling={rope.scaling}",
    )
