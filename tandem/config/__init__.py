"""The configuration tree, how it is loaded, and its JSON Schema."""
