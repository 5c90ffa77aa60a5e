"""Entry point of the console script `infinityd` and of `python -m infinity_daemon`."""

from infinity.optional_dependencies import run_command


def main() -> None:
    """Run the daemon, or print installation instructions if required packages are missing."""
    run_command("infinityd", "daemon", "infinity_daemon.main")


if __name__ == "__main__":
    main()
