"""Holds the thread and the streams of an `LLM`, for code without an event loop; never knows the questions asked."""
