"""For every test: one thread of arithmetic per process, in engines started by tests too, since many run side by side."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
