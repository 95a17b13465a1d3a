"""For every test: one thread of arithmetic a process, in the engines that tests start too, as many run side by side."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
