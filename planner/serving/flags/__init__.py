"""Flags of the engines: names, types and choices as their own classes declare them, and what an export is held against.

``engine_sources`` reads them from the sources of a package without importing it, ``recorded`` (JSON) keeps what was read, by engine
and version, and ``flag_check`` holds command lines and configurations against either.
"""
