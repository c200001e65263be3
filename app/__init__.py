"""Tandem: one OpenAI-compatible endpoint, one model, any number of devices below it."""

__version__ = "0.1.0"
