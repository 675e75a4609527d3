"""headrace.server.routes: one file an endpoint, each a short way from a body to what the engine is asked."""
