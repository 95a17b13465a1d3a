"""Configuration of models, memory and sampling."""
