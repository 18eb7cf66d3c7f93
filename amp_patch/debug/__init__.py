"""What a run can tell of itself; nothing here runs unless it is asked to."""
