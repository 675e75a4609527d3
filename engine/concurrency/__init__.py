"""Threads, processes, tasks and turns between tenants; never knows their uses."""
