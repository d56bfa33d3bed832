"""Permission for code that a run folder names: the user's, on his command line, or because he has run it before.

naming.py lists what a config names, files.py the files that loading it executes, remembered.py keeps what was run in
the user's own data folder, and permission.py asks it.
"""
