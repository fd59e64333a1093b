"""The learned partitioner: networks, training, and the search around them."""
