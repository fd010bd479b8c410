"""Paged K and V: groups, pools, page ownership, prefix reuse."""
