"""Files that survive: folders that are whole or not there, rows that are not lost, a lock that dies with its owner."""
