"""Stale data: what each objective reaches on data of a fixed age, and in the buffer of the paper.

python -m benchmarks.off_policy PANEL... [--small] [--budget-minutes M]

setting.py       everything that a run depends on
tasks.py         two tasks with training problems, problems to choose by and problems to report
copying_model.py the model of the second task
sampling.py      responses of a policy, with rewards
sources.py       batches of an exact staleness, or of the paper's buffer
exam.py          expected reward, greedy accuracy, pass@8
training.py      setting -> result
results.py       the file of results; runs that are in it are not repeated
panels.py        the settings of each panel; rates are chosen from the sweep in the file
report.py        tables from the file
plot.py          pictures from the file
"""
