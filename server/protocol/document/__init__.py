"""The OpenAPI document: endpoints, and what bodies look like; never reads or writes a body."""
