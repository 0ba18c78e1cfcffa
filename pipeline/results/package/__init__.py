"""Packages: a variant of a run as a folder that serves it elsewhere, with digests of everything in it."""
