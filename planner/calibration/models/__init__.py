"""From a measurement to the graph of the model that was measured."""
