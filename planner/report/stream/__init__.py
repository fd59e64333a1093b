"""Job streams to look at: pages, Markdown and traces of recorded episodes."""
