"""The objectives: pure functions of the same tensors, one file per family.

    responses.py        what an objective sees, and the sums over it
    advantages.py       what a response was worth beside the others of its prompt
    balance.py          squared residuals: tb, tb_learned_z, oapl
    policy_gradient.py  advantage times log-probability: reinforce, rloo, tba_prime, grpo, dr_grpo, ppo_clip, ...
    preference.py       pairs: online_dpo
    choose.py           from the configuration to a function
    health.py           what can be read off a batch, whatever the objective

Shape suffixes: B prompts of the batch, b of a micro-batch, K responses to each, N = b x K rows, R response tokens.
"""
