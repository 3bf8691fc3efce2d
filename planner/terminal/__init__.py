"""What every command shares on the terminal: flags, tables, errors as sentences, progress."""
