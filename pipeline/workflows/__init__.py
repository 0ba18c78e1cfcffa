"""Carry out what a command asks for, from a recipe to files."""
