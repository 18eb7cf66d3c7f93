"""How long a script is watched for mistakes that cost time to look for.

Who makes one makes it at once: to look in every step would cost the host more than what is looked
at.
"""

#: So many of the first passes or steps of each optimizer are looked at.
WATCHED = 16
