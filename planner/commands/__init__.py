"""The commands of ``plan``, one module each; cli.py names them and imports the one that is asked for."""
