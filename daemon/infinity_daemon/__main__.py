"""Entry point of the console script `infinityd` and of `python -m infinity_daemon`."""

import os
import signal


def main() -> None:
    """Run the daemon, or print installation instructions if required packages are missing."""
    # Ctrl-C during the imports ends the process silently. A KeyboardInterrupt would print a traceback.
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    from infinity.optional_dependencies import import_command

    command = import_command("infinityd", "daemon", "infinity_daemon.main")
    signal.signal(signal.SIGINT, before)
    command()


if __name__ == "__main__":
    main()
