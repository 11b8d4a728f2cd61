"""Two models: whether they fit, what is known of them, how to load them."""
