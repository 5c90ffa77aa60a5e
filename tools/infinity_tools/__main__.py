"""Entry point of the console script `infinity`, and of `python -m infinity_tools …`, which torchrun starts."""

import os
import signal


def main() -> None:
    """Run the command line. If required packages are missing, print how to install them."""
    # Ctrl-C during the imports ends the process silently. A KeyboardInterrupt would print a traceback.
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    from infinity.optional_dependencies import import_command

    command = import_command("infinity", "cli", "infinity_tools.cli")
    signal.signal(signal.SIGINT, before)
    command()


if __name__ == "__main__":
    main()
