"""The order of service: queues, shares, deadlines and turns; never assigns a row or a page."""
