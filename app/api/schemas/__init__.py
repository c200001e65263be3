"""Shapes of requests and answers. A wrong type is refused; a field nobody knows is ignored; null is absent."""
