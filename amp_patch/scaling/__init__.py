"""The loss scale and the rule that it moves by, on the host and on a device."""
