"""``python -m planner`` is the command ``plan``."""

from planner.commands.start import start

if __name__ == "__main__":
    start()
