"""What a plan costs: one file a roofline term, and ``step_time``, the tree that combines them."""
