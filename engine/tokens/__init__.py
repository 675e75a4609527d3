"""Text and chats to token ids, and ids to text; never runs code that a model names."""
