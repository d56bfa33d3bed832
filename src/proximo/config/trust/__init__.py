"""Which code a run folder may have executed: what the user names on his command line, and what he has run before.

naming.py lists what a config names, files.py the files that loading it executes, remembered.py keeps what was run in
the user's own data folder, and permission.py asks it.
"""
