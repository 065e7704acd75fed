"""The objectives: pure functions of the same tensors, one file per family.

    responses.py        the arguments of an objective, and sums over them
    advantages.py       rewards relative to the other responses to the same prompt
    balance.py          squared residuals: tb, of whole responses and of turns, tb_learned_z, oapl
    policy_gradient.py  advantage times log-probability: reinforce, rloo, tba_prime, grpo, dr_grpo, ppo_clip, ...;
                        of pairs: online_dpo; distill; the likelihood, for supervised fine-tuning
    from_config.py      the objective that the configuration names

Shape suffixes: B prompts of the batch, b of a micro-batch, K responses to each, N = b x K rows, R response tokens.
"""
