"""Responses and messages: the other forms of a chat, and their answers; never runs a generation."""
