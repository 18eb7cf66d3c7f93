"""The command line, one file per command; may import all other rooms, and none imports it."""
