"""``python cli.py`` in a checkout is the installed command ``plan``."""

from planner.commands.start import start

if __name__ == "__main__":
    start()
