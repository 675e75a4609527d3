"""Compiles response formats, such as a JSON schema, into the masks of a row; never chooses a token."""
