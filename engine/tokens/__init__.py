"""Turns text and chats into token ids, and ids into text; never runs code that a model names."""
