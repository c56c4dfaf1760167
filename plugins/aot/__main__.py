"""`python -m plugins.aot OUT`: see `command_line.py`."""

import sys

from plugins.aot.command_line import main

sys.exit(main())
