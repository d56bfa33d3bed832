"""python -m proximo.bench"""

import sys

from proximo.bench.running import main

sys.exit(main(sys.argv[1:]))
