"""Processes: started, watched, ended; and how they find each other.

Launcher and worker import nothing heavy, and neither must this: a launched process is
tied to its launcher before it spends seconds on importing torch.
"""
