"""``amp-patch sweep`` and `amp_patch.sweep`: one training at several levels, compared.

In the script's process: `recorder` with `memory`, or `function`. In the command's: `runs` starts
the scripts, `verdicts` compares what they recorded, `tables`, `plots` and `report` show it.
"""
