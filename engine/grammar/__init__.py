"""Response formats, from a JSON schema to the masks of a row; never chooses a token."""
