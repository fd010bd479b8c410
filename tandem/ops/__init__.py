"""Named operations, each with a pure torch reference and a native form."""
