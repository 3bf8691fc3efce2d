"""Fits of measured hardware: products, attention, links, networks, and what devices are beyond that.

``tools/build_hardware_profiles.py`` puts them together; no command of ``plan`` needs any of it.
"""
