"""``python -m amp_patch``: the command line."""

from .tools.command_line import main

if __name__ == "__main__":
    main(prog_name="amp-patch")
