"""Measure and limit host and device memory."""
