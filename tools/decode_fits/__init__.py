"""Fits of measured kernels of serving: tables, laws, meshes, and one file per group of operators.

``tools/build_decode_curves.py`` puts them together; no command of ``plan`` needs any of it.
"""
