"""Drawing tokens and deciding when to stop."""
