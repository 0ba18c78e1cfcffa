"""What the user asks for: the recipe, how it is made of plain values, and its YAML."""

from enginesmith.pipeline.recipe.making import make, parsed, plain_words, read_budgets
from enginesmith.pipeline.recipe.model import Recipe
from enginesmith.pipeline.recipe.text import commented, read

__all__ = ["Recipe", "commented", "make", "parsed", "plain_words", "read", "read_budgets"]
