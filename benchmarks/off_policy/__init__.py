"""Stale data: what each objective reaches on data of a fixed age, and in the buffer of the paper.

python -m benchmarks.off_policy PANEL... [--sweep] [--budget-minutes M]

setting.py   everything that a run depends on
tasks.py     two tasks with training problems, problems to choose by and problems to report
sampling.py  responses of a policy, with rewards, and what they measure
sources.py   batches of an exact staleness, or of the paper's buffer
results.py   setting -> result, and the file of results
panels.py    the settings of each panel; rates are chosen from the sweep in the file
report.py    table and picture from the file
"""
