"""A plan as each launcher takes it. One file a target; nothing is dropped silently."""

from planner.export.registry import export, export_files, exporter_names

__all__ = ["export", "export_files", "exporter_names"]
