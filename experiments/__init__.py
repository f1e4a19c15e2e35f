"""Experiments: one command a claim, with frozen configs that anyone can override and sweep."""
