"""headrace.server.observability: metrics, request log, spans and watchdog; changes nothing that it watches."""
