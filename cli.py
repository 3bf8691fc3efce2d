"""``python cli.py`` in a checkout is the installed command ``plan``."""

from planner.commands.main import main_entry

if __name__ == "__main__":
    main_entry()
