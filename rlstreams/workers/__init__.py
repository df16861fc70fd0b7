"""The roles, one process each. Roles meet in topics only.

data set -> prompts -> [prompts] -> rollout -> [trajectories] -> logprob -> [scored-trajectories]
         -> trainer -> [steps], [policy-versions] -> rollout and logprob pull weights
"""

if __name__ != "rlstreams.workers":  # a module under two names would have two of every class
    raise ImportError(f"import rlstreams.workers, not {__name__}")
