"""HTTP only: routes, schemas and the way from engine events to server-sent events."""
