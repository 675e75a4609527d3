"""headrace.server.bench: load on a server over loopback, from a process of its own; never imported by the server."""
