"""What the project shows about its own accuracy: error bars, refitted constants, stored predictions, pages.

No command of ``plan`` needs any of it; ``tools/update_accuracy.py`` writes what follows from it.
"""
