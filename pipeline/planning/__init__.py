"""Turn a recipe into a plan: variants, and the steps that lead to them."""
