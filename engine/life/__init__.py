"""Opens an engine, gives its memory back and takes it again, and closes it; never makes a request."""
