"""The public server: admission, placement and the life of a request."""
