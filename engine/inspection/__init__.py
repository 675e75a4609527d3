"""What is known of a model before it is opened: from headers and configs, without its weights; never runs anything."""
