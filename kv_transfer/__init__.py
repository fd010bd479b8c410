"""Moving K and V pages from prefill to decode workers."""
