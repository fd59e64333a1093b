"""Policies of the job stream on any cluster: what they see ahead, and training them."""
