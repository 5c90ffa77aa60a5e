"""`python -m infinity_tools …`, the form that torchrun starts."""

from infinity_tools.cli import main

if __name__ == "__main__":
    main()
