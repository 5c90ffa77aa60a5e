"""Entry point of the console script `infinity`, and of `python -m infinity_tools …`, which torchrun starts."""

from infinity.optional_dependencies import run_command


def main() -> None:
    """Run the command line. If required packages are missing, print how to install them."""
    run_command("infinity", "cli", "infinity_tools.cli")


if __name__ == "__main__":
    main()
