"""Recipes, shipped as package data: `draftsmith recipes` lists them."""
