"""What the runners of all devices share: threads, host memory, choices of the host; never a runner."""
