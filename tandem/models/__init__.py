"""Model architectures, written against tandem.ops."""
