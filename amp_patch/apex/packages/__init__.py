"""What scripts import in the place of apex: each file lies under the name it is imported by.

Not to be imported as ``amp_patch.apex.packages...``: `amp_patch.apex.install` makes the names.
"""
