"""Memory of a GPU at addresses that stay, and writing to it; never decides what goes where."""
