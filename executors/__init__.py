"""Run a Plan on torch.distributed. May import planner.schema and planner.errors alone."""
