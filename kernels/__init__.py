"""The operators: one documented function each, and the implementations that serve it."""
