"""python -m proximo_lab.bench"""

import sys

from proximo_lab.bench.running import main

sys.exit(main(sys.argv[1:]))
