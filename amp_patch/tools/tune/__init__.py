"""``amp-patch tune``: the fastest setting whose loss stays that of fp32."""
