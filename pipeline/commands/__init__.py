"""Implement the commands: read the options, make one call, print the result."""
