"""headrace.server.protocol: OpenAI's requests and answers as values and bytes; never runs a generation."""
