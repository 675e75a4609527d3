"""Requests, pages, plans and the scheduler, in pure Python; never imports torch or anyio."""
