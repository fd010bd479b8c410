"""Ways for bytes to travel; one module each."""
