"""Connections, from the bytes of a request to the events of its answer; never knows what a request asks."""
