"""The console script `infinity`, and `python -m infinity_tools …`, the form that torchrun starts."""

from infinity.optional_dependencies import run_command


def main() -> None:
    """Run the command line; without the packages that it needs, say how to install them."""
    run_command("infinity", "cli", "infinity_tools.cli")


if __name__ == "__main__":
    main()
