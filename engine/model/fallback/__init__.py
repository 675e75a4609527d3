"""Models without a family run by transformers' own modules, with headrace's pages, scheduler and samplers around them."""
