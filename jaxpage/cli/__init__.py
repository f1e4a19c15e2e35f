"""The command line: the one place where models, decoding and terminal come together."""

import importlib.metadata
import os
import sys
from collections.abc import Sequence

import jax
import tyro

from jaxpage.cli.chat import Chat
from jaxpage.cli.convert import Convert
from jaxpage.cli.fetch import Fetch
from jaxpage.cli.generate import Generate
from jaxpage.cli.kernels import Kernels
from jaxpage.fetch import default_home

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `jaxpage` command. Bad input ends it with one line on stderr and exit code 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # Compiled programs are kept beside the models, so that only the first run of a shape waits for the compiler.
    jax.config.update("jax_compilation_cache_dir", str(default_home() / "programs"))
    try:
        if arguments == ["--version"]:
            print(importlib.metadata.version("jaxpage"))
        else:
            _command(arguments).run()
    except BrokenPipeError:
        # The reader has gone, as in `jaxpage ... | head`; what else is buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, NotImplementedError, OSError) as error:
        _fail(" ".join(str(error).split()))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _fail("out of memory: model and KV pool do not fit; lower --num-blocks, --max-tokens or --max-seqs")
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str) -> None:
    print(f"jaxpage: error: {message}", file=sys.stderr)
    sys.exit(2)


def _command(arguments: list[str]) -> Generate | Chat | Fetch | Convert | Kernels:
    return tyro.extras.subcommand_cli_from_dict(
        {"generate": Generate, "chat": Chat, "fetch": Fetch, "convert": Convert, "kernels": Kernels},
        prog="jaxpage",
        description="Paged attention in JAX: run language models from a paged KV cache. `jaxpage --version` prints the version.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
    )
