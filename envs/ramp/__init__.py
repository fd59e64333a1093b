"""The job-stream benchmark of PAC-ML: jobs arrive at an optical RAMP cluster.

Source: Parsonson et al. 2023, "Partitioning Distributed Compute Jobs with Reinforcement
Learning and Graph Neural Networks" (arXiv 2301.13799).
"""
