"""Who acts: one process per role. Roles meet in topics only.

data set -> prompts -> [prompts] -> rollout -> [trajectories] -> logprob -> [scored-trajectories]
         -> trainer -> [steps], [policy-versions] -> rollout and logprob pull weights
"""
