"""Prefill workers: compute prompts and stream their K and V away."""
