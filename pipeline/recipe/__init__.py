"""Make recipes: what a user asks for, from plain values and YAML."""

from enginesmith.pipeline.recipe.parsing import commented, make, parsed, plain_words, read, unknown_field
from enginesmith.pipeline.recipe.recipe import Recipe

__all__ = ["Recipe", "commented", "make", "parsed", "plain_words", "read", "unknown_field"]
