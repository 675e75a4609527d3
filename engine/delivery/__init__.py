"""From committed tokens to what a reader takes; never waits for a reader and never plans a step."""
