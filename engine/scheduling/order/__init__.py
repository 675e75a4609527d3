"""Who is next: queues, shares, deadlines and turns; never gives a row or a page."""
