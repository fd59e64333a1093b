"""From a measurement to the machines that it was taken on."""
