"""`python -m jaxpage.cli` is the `jaxpage` command."""

from jaxpage.cli import main

main()
