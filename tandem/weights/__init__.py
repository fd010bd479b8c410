"""Finding, checking and reading a model's files."""
