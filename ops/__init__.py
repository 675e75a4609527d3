"""headrace.ops: the arithmetic of a decoder step on each device; never imports anything else of headrace."""
