"""Parts that the runners of all devices share: threads, host memory, choices on the host; never a runner."""
