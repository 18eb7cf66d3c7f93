"""What every room may use; no module here imports one of another room.

None knows what amp_patch does with a model: who called, what was imported, who is alive, how a
rules file is written.
"""
