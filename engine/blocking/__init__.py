"""The thread and the streams of an `LLM`, for code without an event loop; never what is asked of it."""
