"""Each contribution's benchmark behind one command, with its peers, as one kind of evidence."""
