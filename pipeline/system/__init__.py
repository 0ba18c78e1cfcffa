"""Describe the machine and run processes on it."""
