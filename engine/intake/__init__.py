"""From what a caller asks to the scheduler's requests; never plans a step and never delivers a token."""
