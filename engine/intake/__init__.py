"""Turns a caller's arguments into requests of the scheduler; never plans a step and never delivers a token."""
