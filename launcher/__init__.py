"""The command line, and Tandem on Ray."""
