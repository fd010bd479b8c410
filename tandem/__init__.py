"""Tandem: disaggregated prefill/decode serving. This package holds what all processes share."""

__version__ = "0.1.0"
