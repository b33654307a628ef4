"""`python -m trunkline`: the same as the script `trunkline`."""

from trunkline.cli import main

if __name__ == "__main__":
    main()
