"""Opening an engine, giving its memory back and taking it again, and closing it; never makes a request."""
