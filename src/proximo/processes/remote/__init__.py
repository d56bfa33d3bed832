"""How the process of a worker is started: on this machine, or on a node of a cluster through a relay."""
