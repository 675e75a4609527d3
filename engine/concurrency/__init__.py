"""Threads, processes, tasks and turns between tenants; never knows what they are for."""
