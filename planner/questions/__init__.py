"""One folder per question: numbers (what is computed), show (what is printed), command (what is typed)."""
