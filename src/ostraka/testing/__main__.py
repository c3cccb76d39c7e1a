"""`python -m ostraka.testing`: how `run_processes` starts each of its processes."""

import sys

from ostraka.testing._child import main

sys.exit(main(sys.argv[1:]))
