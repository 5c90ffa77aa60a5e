"""The command line of `infinity`: train, probe, store."""

import logging

# At import it warns where its cache lies if there is no HOME, which is nothing to those who wait for a picture.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
