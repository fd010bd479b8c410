"""Decode workers: receive K and V and generate tokens in graph mode."""
