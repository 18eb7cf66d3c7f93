"""``amp-patch compare``: what a level does to each output and gradient of a script."""
