"""What everything stands on: errors, paths, whole files, the machine, the terminal, units."""
