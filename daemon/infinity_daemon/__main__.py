"""The console script `infinityd`, and `python -m infinity_daemon`."""

from infinity.optional_dependencies import run_command


def main() -> None:
    """Run the daemon. If required packages are missing, print how to install them."""
    run_command("infinityd", "daemon", "infinity_daemon.main")


if __name__ == "__main__":
    main()
