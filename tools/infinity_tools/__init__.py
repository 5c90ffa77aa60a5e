"""Command line of `infinity`."""

import logging

# At import, matplotlib warns about the location of its cache if HOME is not set, which does not concern our users.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
