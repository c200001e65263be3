"""The engine: serving state, text, models, plans and the devices that run them."""
