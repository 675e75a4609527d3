"""headrace.server.observability: metrics, request log, spans and watchdog; what it sees changes nothing it watches."""
