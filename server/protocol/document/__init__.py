"""The OpenAPI document: endpoints and the schemas of bodies; never reads or writes a body."""
