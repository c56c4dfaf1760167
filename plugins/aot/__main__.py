"""`python -m plugins.aot OUT`: see `library.py`."""

import sys

from plugins.aot.library import main

sys.exit(main())
