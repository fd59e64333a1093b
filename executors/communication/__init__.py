"""Exchange of gradients in buckets of our own, and codecs that make them smaller."""
